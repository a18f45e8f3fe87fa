"""Opens files of a folder that others may write to: no link below the folder is followed, also one made meanwhile.

A path is opened folder by folder, each by its own descriptor (`openat` with `O_NOFOLLOW`), so that no name can come to
mean another file between a check and the opening.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would else wait for its writer
LINK = "It is a link, or stands behind one. Links are not followed: index what they lead to under its own name."


def descriptor(path: Path, root: Path) -> int:
    """Returns a descriptor of the regular file `path`, to be closed by the caller. `root` may itself stand behind
    links.

    Raises:
        OSError: it cannot be opened; `ELOOP` with the sentence `LINK` where a link is on the way from `root`, or
            where `path` is no regular file below it.
    """
    try:
        *folders, name = path.relative_to(root).parts
    except ValueError:
        raise OSError(errno.ELOOP, LINK, str(path)) from None
    if ".." in (*folders, name):
        raise OSError(errno.ELOOP, LINK, str(path))
    at = os.open(root, _FOLDER & ~os.O_NOFOLLOW)
    try:
        for folder in folders:
            inner = os.open(folder, _FOLDER, dir_fd=at)
            os.close(at)
            at = inner
        found = os.open(name, _FILE, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise OSError(errno.ELOOP, LINK, str(path)) from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.ELOOP, LINK, str(path))
    return found


def digest(path: Path, root: Path | None) -> str:
    """Returns the SHA-256 of a file's bytes, in hexadecimal digits.

    Raises:
        OSError: as `descriptor`.
    """
    with opened(path, root) as at, at.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def opened(path: Path, root: Path | None) -> Iterator[Path]:
    """Yields a path of the file while it is open, which leads to that file alone; `path` itself without a `root`.

    Raises:
        OSError: as `descriptor`.
    """
    if root is None:
        yield path
        return
    found = descriptor(path, root)
    try:
        yield Path(f"/dev/fd/{found}")
    finally:
        os.close(found)
