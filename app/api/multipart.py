"""A multipart form, fed piece by piece: files go to disk as they come, fields stay in memory and must be short.

Files on disk are deleted again unless `hand_over` gives them to somebody. Knows nothing of HTTP or of the content; the
whole body's size is its caller's to limit.
"""

from __future__ import annotations

import contextlib
import os
import threading
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from retrieval.durable import sync_folder

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_PARTS = 2000
MAX_FIELD_LENGTH = 64 * 1024  # bytes
MAX_NAME_LENGTH = 255  # characters

T = TypeVar("T")


class BadForm(Exception):
    """A form that is not accepted; `field` names the part at fault."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Received:
    """A file that came, under the last part of the name that its sender gave it."""

    name: str
    path: Path


class Form:
    """Safe in threads: `discard` waits until `feed` is done."""

    def __init__(self, content_type: str, new_file: Callable[[], Path], *, file_field: str = "file") -> None:
        """
        Raises:
            BadForm: it is no multipart form.
        """
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise BadForm(f"The body is {content_type or 'of no type'!r:.80}; accepted: multipart/form-data.")
        self.fields: dict[str, list[str]] = {}
        self.files: list[Received] = []
        self._new_file, self._file_field = new_file, file_field
        self._lock = threading.Lock()
        self._parts = 0
        self._header, self._value = b"", b""
        self._disposition = b""
        self._field, self._text = "", bytearray()
        self._open: IO[bytes] | None = None
        self._ended = self._kept = self._discarded = False
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._part_begin, "on_header_field": self._header_field,
            "on_header_value": self._header_value, "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished, "on_part_data": self._part_data,
            "on_part_end": self._part_end, "on_end": self._end,
        }  # fmt: skip
        try:
            self._parser = MultipartParser(options[b"boundary"], callbacks)
        except FormParserError as error:
            raise BadForm(f"The form cannot be read: {error}.") from None

    def feed(self, data: bytes) -> None:
        """Take the next piece. Blocks on the disk.

        Raises:
            BadForm: the form is damaged, or a part of it is not accepted.
            OSError: a file cannot be written.
        """
        with self._lock:
            if self._discarded:
                return
            try:
                self._parser.write(data)
            except FormParserError as error:
                raise BadForm(f"The form cannot be read: {error}.") from None

    def finish(self) -> None:
        """Nothing comes any more.

        Raises:
            BadForm: it stops before its end.
        """
        if not self._ended:
            raise BadForm("The form stops before its end; was the connection cut?")

    def hand_over(self, work: Callable[[], T]) -> T:
        """Runs `work` and returns its result; if it succeeds, the files are somebody else's from then on.

        They are on the disk before that: a client notified of an upload may delete the original.
        """
        with self._lock:
            for folder in {file.path.parent for file in self.files}:
                sync_folder(folder)
            made = work()
            self._kept = True
            return made

    def discard(self) -> None:
        """Delete the files that nobody took."""
        with self._lock:
            self._discarded = True
            if self._open is not None:
                with contextlib.suppress(OSError):  # a full disk, once more
                    self._open.close()
            if not self._kept:
                for file in self.files:
                    file.path.unlink(missing_ok=True)

    # Callbacks of the parser

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise BadForm(f"The form has more than {MAX_PARTS} parts; send the files in several requests.")
        self._disposition, self._text = b"", bytearray()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._field = _decoded(options.get(b"name", b""))
        if not self._field:
            raise BadForm("A part of the form has no name.")
        named = options.get(b"filename")
        if named is None:
            if self._field == self._file_field:
                raise BadForm(f"{self._field} comes without a file name; accepted: a file.", self._field)
            return
        if self._field != self._file_field:
            raise BadForm(f"{self._field!r:.60} is a file; accepted for files: {self._file_field}.", self._field)
        name = plain_name(_decoded(named))
        if not name:
            raise BadForm(f"{self._field} is called {_decoded(named)!r:.60}, which is no name.", self._field)
        path = self._new_file()
        self._open = path.open("xb")
        self.files.append(Received(name, path))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._open is not None:
            self._open.write(memoryview(data)[start:end])
        elif len(self._text) + end - start > MAX_FIELD_LENGTH:
            raise BadForm(f"{self._field!r:.60} has more than {MAX_FIELD_LENGTH} bytes.", self._field)
        else:
            self._text += data[start:end]

    def _part_end(self) -> None:
        if self._open is not None:
            self._open.flush()
            os.fsync(self._open.fileno())
            self._open.close()
            self._open = None
        else:
            self.fields.setdefault(self._field, []).append(_decoded(bytes(self._text)))

    def _end(self) -> None:
        self._ended = True


def plain_name(name: str) -> str:
    """The last part of a path, as any system writes paths, in characters that can be seen; "" if nothing is left."""
    last = name.replace("\\", "/").rpartition("/")[2]
    seen = "".join(
        " " if character.isspace() else character
        for character in unicodedata.normalize("NFC", last)
        if character.isprintable() or character in "\u00a0\u3000"
    ).strip()
    if seen in ("", ".", ".."):
        return ""
    stem, dot, suffix = seen.rpartition(".")
    if len(seen) > MAX_NAME_LENGTH and dot and len(suffix) < 20:
        return f"{stem[: MAX_NAME_LENGTH - 1 - len(suffix)]}.{suffix}"
    return seen[:MAX_NAME_LENGTH]


def plain_path(path: str) -> str:
    """A path below nowhere: its parts as plain names, without steps up; "" if nothing is left."""
    return "/".join(filter(None, map(plain_name, path.replace("\\", "/").split("/"))))


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")
