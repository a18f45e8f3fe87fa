"""The HTTP client of the audio server: a recording or a text out, a transcript or speech back, both as they come.

A body is held in memory nowhere. Redirects are not followed, proxies and `.netrc` are not read, a compressed reply is
refused, and the key is taken out of whatever comes back. Nothing is asked twice: a recording is gone once it was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

import httpx

from app.config.remote_settings import AudioSettings
from app.errors import ApiError
from app.remote.http_client import MAX_ERROR_BYTES, MAX_QUOTED, REDACTED, redacted, retry_after

MAX_REPLY_BYTES = 256 << 20  # of speech: hours of it
_PASSED = (400, 404, 413, 415, 422)  # the client's own faults


class AudioError(ApiError):
    """A failure of the audio server."""

    def __init__(self, status: int, what: str, code: str, wait_s: float | None = None) -> None:
        text = f"The audio server {what}"
        text = text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]} …"
        text = text if text.endswith((".", "…")) else f"{text}."
        kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
        headers = {} if wait_s is None else {"Retry-After": str(max(1, round(wait_s)))}
        super().__init__(
            status, text if text.endswith((".", "…")) else f"{text}.", code=code, kind=kind, headers=headers
        )


@dataclass(frozen=True, slots=True)
class AudioReply:
    """A reply's media type, and its bytes as they come; closing them closes the connection."""

    media_type: str
    body: AsyncGenerator[bytes, None]


class AudioClient:
    """Asks one audio server. `key` is its secret, None where it wants none."""

    def __init__(self, settings: AudioSettings, key: str | None) -> None:
        self.settings = settings
        self._key = key
        self._http = httpx.AsyncClient(
            follow_redirects=False, trust_env=False, verify=httpx.create_ssl_context(),
            timeout=httpx.Timeout(None, connect=settings.connect_s),
        )  # fmt: skip

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(
        self, path: str, content: bytes | AsyncIterator[bytes], media_type: str, length: str | None = None
    ) -> AudioReply:
        """Sends a body to `path`, below the server's address, and returns its reply once that begins.

        Args:
            length: the body's bytes, where they are known; else it goes in chunks.

        Raises:
            AudioError: 502, 503 or 504: it cannot be reached, is too slow or fails; 429; or a refusal of the request,
                with its own status.
            ApiError: what `content` raises.
        """
        headers = {"User-Agent": "ponder", "Content-Type": media_type, "Accept-Encoding": "identity"}
        headers |= {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        headers |= {} if length is None else {"Content-Length": length}
        try:
            response = await self._sent(path, content, headers)
        except TimeoutError:
            raise AudioError(504, "did not answer in time", "audio_timeout") from None
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise AudioError(503, "cannot be reached", "audio_unavailable") from None
        except httpx.HTTPError as error:
            raise AudioError(502, f"broke off: {type(error).__name__}", "audio_dropped") from None
        return AudioReply(response.headers.get("content-type", "application/octet-stream"), self._received(response))

    async def _sent(self, path: str, content: bytes | AsyncIterator[bytes], headers: dict[str, str]) -> httpx.Response:
        """Returns the reply that has begun. The server's time runs while it is to take a piece, or to answer; the
        client's is watched by its own connection."""
        settings, loop = self.settings, asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:

            async def timed(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
                async for piece in pieces:
                    limit.reschedule(loop.time() + settings.next_byte_s)
                    yield piece
                    limit.reschedule(None)
                limit.reschedule(loop.time() + settings.first_byte_s)

            if isinstance(content, bytes):
                limit.reschedule(loop.time() + settings.first_byte_s)
            body = content if isinstance(content, bytes) else timed(content)
            request = self._http.build_request("POST", settings.url + path, headers=headers, content=body)
            response = await self._http.send(request, stream=True)
            limit.reschedule(loop.time() + settings.next_byte_s)
            try:
                if response.status_code != 200:
                    raise await self._refusal(response)
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise AudioError(502, "sent a compressed body, which was not asked for", "audio_invalid")
            except BaseException:
                await response.aclose()
                raise
            return response

    async def _received(self, response: httpx.Response) -> AsyncGenerator[bytes, None]:
        """The reply's bytes without the key, also where that is spread over pieces: its beginning is held back.

        Raises:
            AudioError: it stops, breaks off or is too long; the connection to the client ends without its last bytes.
        """
        key = None if self._key is None else self._key.encode()
        held, size = b"", 0
        try:
            pieces = response.aiter_raw()
            while True:
                async with asyncio.timeout(self.settings.next_byte_s):
                    piece = await anext(pieces, None)
                if piece is None:
                    break
                if (size := size + len(piece)) > MAX_REPLY_BYTES:
                    raise AudioError(502, f"sent more than {MAX_REPLY_BYTES} bytes", "audio_invalid")
                if key is not None:
                    piece = (held + piece).replace(key, REDACTED.encode())
                    begun = next((n for n in range(len(key) - 1, 0, -1) if piece.endswith(key[:n])), 0)
                    piece, held = piece[: len(piece) - begun], piece[len(piece) - begun :]
                yield piece
            yield held
        except TimeoutError:
            what = f"stopped sending for {self.settings.next_byte_s:g} s"
            raise AudioError(504, what, "audio_timeout") from None
        except httpx.HTTPError as error:
            raise AudioError(502, f"broke off: {type(error).__name__}", "audio_dropped") from None
        finally:
            await response.aclose()

    async def _refusal(self, response: httpx.Response) -> AudioError:
        status, body = response.status_code, bytearray()
        if 300 <= status < 400:
            return AudioError(502, f"answered {status}, a redirect, and none is followed", "audio_redirected")
        async for piece in response.aiter_raw():
            body += piece
            if len(body) >= MAX_ERROR_BYTES:
                break
        said = " ".join(redacted(body[:MAX_ERROR_BYTES].decode(errors="replace"), self._key).split())
        what = f"answered {status}: {said}" if said else f"answered {status}"
        match status:
            case 429:
                return AudioError(429, what, "audio_rate_limited", retry_after(response))
            case 401 | 403:
                return AudioError(502, f"does not take this server's key: {what}", "audio_unauthorized")
            case 503 | 529:
                return AudioError(503, what, "audio_overloaded", retry_after(response))
            case _ if status in _PASSED:
                return AudioError(status, f"refused the request: {what}", "audio_refused")
        return AudioError(502, what, "audio_failed")
