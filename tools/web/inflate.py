"""A body decompressed as it arrives, never more of it than is wanted: a bomb is cut, not opened.

Reads gzip and deflate, one layer of it. A fetch asks for nothing else, and what a site sends all the same is refused.
"""

from __future__ import annotations

import zlib

from tools.web.errors import Failed, Refused

_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's window bits


class Inflate:
    """`feed` gives a piece's decompressed bytes, until `most_bytes` were given; then `full` is true."""

    def __init__(self, encoding: str, most_bytes: int) -> None:
        """
        Raises:
            Refused: the encoding is none of identity, gzip and deflate.
        """
        name = encoding.strip().lower()
        if name not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise Refused(f"The page is encoded as {encoding[:60]!r}; accepted: gzip, deflate or nothing.")
        self._kind = name.removeprefix("x-")
        self._left = most_bytes
        self._stream = zlib.decompressobj(_GZIP) if self._kind == "gzip" else None
        self.full = False

    def feed(self, data: bytes) -> bytes:
        """
        Raises:
            Failed: the data is damaged.
        """
        if self._kind in ("", "identity"):
            return self._give(data)
        if self._stream is None:  # "deflate" is zlib's format by the standard and the bare one by custom
            self._stream = zlib.decompressobj(_ZLIB if data[:1] and data[0] & 0x0F == 8 else _RAW)
        given = list[bytes]()
        try:
            while data and not self.full:
                # One byte more than wanted tells a full page from one that ends here.
                given.append(self._give(self._stream.decompress(data, self._left + 1)))
                data = self._stream.unconsumed_tail
                if self._stream.eof:
                    data = self._stream.unused_data
                    if self._kind != "gzip" or not data.startswith(b"\x1f\x8b"):
                        break
                    self._stream = zlib.decompressobj(_GZIP)  # gzip members may follow one another
        except zlib.error as error:
            raise Failed(f"The page's {self._kind} data is damaged ({error}).") from None
        return b"".join(given)

    def _give(self, data: bytes) -> bytes:
        self.full = len(data) > self._left
        given = data[: self._left]
        self._left -= len(given)
        return given
