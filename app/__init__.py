"""Ponder's outside: the HTTP server, the runs behind the chat page, the OpenAI-compatible API and the command line.

Everything a person or another program touches is here; how tokens come about is `engine`'s business. Nothing is
imported at this level, so that `ponder --help` answers without loading a web framework or torch.
"""
