"""OpenAI's routes of speech, answered by the audio server that the settings name. Its key is this server's alone.

A recording goes through as it comes, and speech comes back as it is made: this server keeps neither, and reads no
model's name in them. Without an audio server each is a 404 that says what to set.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from app.connections import while_connected
from app.current_user import AppState
from app.errors import ApiError, invalid
from app.request_body import JsonBody, pieces
from app.state import State

if TYPE_CHECKING:  # its HTTP client is loaded where an audio server is set
    from app.remote.audio_client import AudioClient, AudioReply

MAX_SPOKEN = 100_000  # characters

router = APIRouter(prefix="/v1/audio", tags=["OpenAI"])


class SpeechRequest(BaseModel):
    """The body of `POST /v1/audio/speech`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(min_length=1, max_length=200, description="the name of one of the audio server's models")
    input: str = Field(
        min_length=1, max_length=MAX_SPOKEN, description=f"a text of 1 to {MAX_SPOKEN} characters, to be spoken"
    )
    voice: str | dict[str, Any] = Field(description="the name of one of the audio server's voices, or an object of it")
    instructions: str | None = Field(None, max_length=MAX_SPOKEN, description="a text: how to speak")
    response_format: str | None = Field(None, max_length=20, description="mp3, opus, aac, flac, wav, pcm or the like")
    speed: float | None = Field(None, ge=0.25, le=4, description="a number from 0.25 to 4")
    stream_format: Literal["sse", "audio"] | None = Field(None, description="sse or audio")


SpeechBody = Annotated[SpeechRequest, Depends(JsonBody(SpeechRequest))]


def _audio(state: State) -> AudioClient:
    if state.audio is None:
        accepted = "on a server with [audio] and its url in ponder.toml, or --audio-url"
        raise ApiError(404, f"No audio server is set here; accepted: {accepted}.", code="audio_off")
    return state.audio


@router.post("/transcriptions")
async def transcriptions(request: Request, state: AppState) -> StreamingResponse:
    return await _heard(request, _audio(state), "/audio/transcriptions")


@router.post("/translations")
async def translations(request: Request, state: AppState) -> StreamingResponse:
    return await _heard(request, _audio(state), "/audio/translations")


@router.post("/speech")
async def speech(request: Request, state: AppState, wanted: SpeechBody) -> StreamingResponse:
    body = json.dumps(wanted.model_dump(mode="json", exclude_none=True), ensure_ascii=False).encode()
    return _streamed(await while_connected(request, _audio(state).ask("/audio/speech", body, "application/json")))


async def _heard(request: Request, audio: AudioClient, path: str) -> StreamingResponse:
    """Passes a form with a recording on, and its reply back.

    Raises:
        ApiError: 400: it is no form; 413: it is larger than `max_audio`; or what the audio server refuses.
    """
    media_type = request.headers.get("content-type", "")
    if not media_type.lower().startswith("multipart/form-data"):
        message = f"The body is {media_type or 'of no type'!r:.80}; accepted: multipart/form-data with a file."
        raise invalid("file", message)
    read = asyncio.Event()
    async with aclosing(pieces(request, audio.settings.max_audio)) as received:
        first = await anext(received, b"")  # what is announced as too large never reaches the audio server

        async def body() -> AsyncIterator[bytes]:
            yield first
            async for piece in received:
                yield piece
            read.set()

        asked = audio.ask(path, body(), media_type, request.headers.get("content-length"))
        return _streamed(await while_connected(request, asked, read))


def _streamed(reply: AudioReply) -> StreamingResponse:
    return StreamingResponse(reply.body, media_type=reply.media_type, headers={"Cache-Control": "no-store"})
