"""Limits of the files and sockets that the process may have open."""

from __future__ import annotations

import sys

_OTHERS = 512  # files that are no connections: the database, documents, tools, models
_MOST = 20_000  # connections, unless told


def raise_file_limit() -> int:
    """Let the process open as many files as the system allows it; how many that is."""
    if sys.platform == "win32":
        return _MOST
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft not in (resource.RLIM_INFINITY, wanted):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # macOS says no to more than it says it allows
            return soft
    return wanted


def connections_allowed(asked: int | None, files: int) -> int:
    """Returns how many connections there may be, of those `asked` for and where so many `files` may be open."""
    return max(16, min(_MOST if asked is None else asked, files - _OTHERS))
