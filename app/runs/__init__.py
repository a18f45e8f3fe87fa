"""Runs: answers being made for the chat page, each with an append-only log that any number of readers follow.

`live` has all of a server, `run` makes one, `tools` is how one calls, `trace` how it can be made again.
"""
