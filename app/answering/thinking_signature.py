"""Signatures of thinking that leaves the server, so that what a client sends back is known to be the model's own.

An HMAC-SHA-256 (RFC 2104) with a key that is made once and kept in the data directory, where all processes of a server
read it. Knows nothing of APIs.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import secrets
from functools import cached_property
from pathlib import Path

KEY_FILE = "thinking.key"
_KEY_BYTES = 32


class ThinkingSigner:
    """Signs texts with the key of a data directory, which is made when it is first needed."""

    def __init__(self, data_dir: Path) -> None:
        self._file = data_dir / KEY_FILE

    def sign(self, text: str) -> str:
        """Returns the signature of `text` in base64."""
        return base64.b64encode(hmac.digest(self._key, text.encode(), "sha256")).decode()

    def verify(self, text: str, signature: str) -> bool:
        """Returns whether `signature` is one of `sign`'s for `text`."""
        return hmac.compare_digest(self.sign(text).encode(), signature.encode())

    @cached_property
    def _key(self) -> bytes:
        """The key. The first process that needs it makes it: a link appears whole, or is there already."""
        with contextlib.suppress(FileNotFoundError):
            return self._file.read_bytes()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        made = self._file.with_name(f"{KEY_FILE}.{secrets.token_hex(4)}.partial")
        with open(made, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(made, self._file)
        made.unlink()
        return self._file.read_bytes()
