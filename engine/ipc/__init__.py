"""The core in a process of its own: messages on the wire, both ends of the link, supervision and restarts."""
