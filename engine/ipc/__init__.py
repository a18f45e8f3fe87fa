"""The core in a process of its own: what crosses the border, who stands on either side, and what if it dies."""
