"""The program inside a sandbox: it says it is ready, waits for one job, runs it and reports. Standard library only.

It is handed to the sandbox's interpreter as text, so nothing of ours has to be readable in there. The code runs in this
very process and can do anything to it: nothing that is reported from here is to be believed, and every limit that
matters is kept from outside. Knows nothing of its parent.
"""

from __future__ import annotations

import ast
import builtins
import gc
import io
import json
import linecache
import os
import resource
import stat
import struct
import sys
import threading
import traceback
import types
from typing import Any

CODE = "<code>"
_LENGTH = struct.Struct(">I")


def main(settings: dict[str, Any], out: int) -> None:
    """Prepares, says so with one byte on descriptor `out`, then runs the job that comes on descriptor 0."""
    os.set_inheritable(out, False)
    for name in settings["preload"]:
        __import__(name)
    sys.path[:] = [path for path in sys.path if path] + settings["packages"]
    for limit, value in settings["limits"].items():
        resource.setrlimit(getattr(resource, limit), tuple(value))
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    gc.collect()
    gc.freeze()
    os.write(out, b"R")
    try:
        job = json.loads(_exactly(_LENGTH.unpack(_exactly(_LENGTH.size))[0]))
    except EOFError:
        return  # the sandbox was not needed
    given = {name: _exactly(size) for name, size in job["files"]}
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for name, content in given.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)
    report = _run(job["code"], settings["value_chars"])
    contents = list[bytes]()
    try:
        report["files"], report["left_out"], contents = _collect(given, settings["files"], settings["file_bytes"])
    except (OSError, MemoryError, RecursionError) as error:
        report["left_out"] = [["(all files)", f"{type(error).__name__}: {error}"]]
    header = json.dumps(report).encode()
    _send(out, _LENGTH.pack(len(header)) + header)
    for content in contents:
        _send(out, content)


def _exactly(count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        piece = os.read(0, min(count - len(content), 1 << 20))
        if not piece:
            raise EOFError
        content += piece
    return bytes(content)


def _send(out: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(out, view) :]


def _run(code: str, value_chars: int) -> dict[str, Any]:
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv[:] = [CODE]
    linecache.cache[CODE] = (len(code), None, code.splitlines(keepends=True), CODE)
    report: dict[str, Any] = {"exit": "ok", "value": None, "reason": "", "files": [], "left_out": []}
    try:
        value = _evaluate(code, module.__dict__)
        if value is not None:
            report["value"] = _cut(_plain(repr(value)), value_chars)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except SystemExit as error:
        if error.code not in (None, 0):
            report.update(exit="error", reason=_cut(_plain(f"SystemExit: {error.code}"), 500))
    except BaseException as error:
        kind = "memory" if isinstance(error, MemoryError) else "error"
        report["exit"] = kind
        # The first frame is this file's; the code's own frames begin below it.
        below = error.__traceback__.tb_next if error.__traceback__ else None
        if below is not None and below.tb_frame.f_code is _evaluate.__code__:
            below = below.tb_next
        try:
            report["reason"] = _cut(_plain("".join(traceback.format_exception_only(error)).strip()), 500)
            traceback.print_exception(type(error), error, below)
        except BaseException as second:  # the exception's own __str__, closed streams, no memory left
            report["reason"] = report["reason"] or type(error).__name__ + f" (not shown: {type(second).__name__})"
    _flush()
    return report


def _evaluate(code: str, names: dict[str, Any]) -> Any:
    """Runs the code; the value of its last statement where that is an expression."""
    tree = ast.parse(code, CODE)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, CODE, "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), CODE, "eval"), names)
    return None


def _flush() -> None:
    """Files that the code left open are written out, as they would be at the end of a program."""
    for thing in [sys.stdout, sys.stderr, *gc.get_objects()]:
        try:
            if isinstance(thing, io.IOBase) and not thing.closed and thing.writable():
                thing.flush()
        except BaseException:  # objects of the code's own classes may raise anything
            continue


def _collect(
    given: dict[str, bytes], most: int, max_bytes: int
) -> tuple[list[list[Any]], list[list[str]], list[bytes]]:
    """New and changed regular files below the work directory; links are not followed, and left-out ones are listed."""
    names, left_out, contents, total = list[list[Any]](), list[list[str]](), list[bytes](), 0
    top = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    for folder, folders, files, at in os.fwalk(".", dir_fd=top, follow_symlinks=False):
        folders.sort()
        for each in sorted([*files, *(each for each in folders if _is_link(each, at))]):
            name = os.path.normpath(os.path.join(folder, each))
            why, content = _read(each, at, max_bytes)
            if not why and given.get(name) == content:
                continue
            if not why and len(names) >= most:
                why = f"more than {most} files"
            elif not why and total + len(content) > max_bytes:
                why = f"more than {max_bytes} bytes in all"
            if why:
                if len(left_out) < most:
                    left_out.append([_cut(_plain(name), 500), why])
                continue
            names.append([name, len(content)])
            contents.append(content)
            total += len(content)
    return names, left_out, contents


def _is_link(name: str, at: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)


def _read(name: str, at: int, max_bytes: int) -> tuple[str, bytes]:
    """Returns why it is not collected, or else its content."""
    if not stat.S_ISREG(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
        return "not a regular file", b""
    try:
        name.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8", b""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    except OSError as error:
        return os.strerror(error.errno or 0), b""
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return "not a regular file", b""
        if status.st_size > max_bytes:
            return f"more than {max_bytes} bytes in all", b""
        return "", file.read(max_bytes)


def _plain(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… (cut from {len(text)} characters)"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
