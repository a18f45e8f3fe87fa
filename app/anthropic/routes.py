"""Routes of Anthropic's Messages API: each reads a body, checks it, and answers whole or as a stream.

The headers `anthropic-version` and `anthropic-beta` are accepted and change nothing: there is one version here, and a
beta's fields are known or refused by name like all others.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from app.anthropic.content_blocks import Json
from app.anthropic.message_job import count_tokens, event_bytes, message_job
from app.anthropic.request_models import (
    MESSAGES_NO_EFFECT,
    MESSAGES_REFUSED,
    ConversationRequest,
    MessagesRequest,
)
from app.current_user import AppServing, User
from app.errors import ApiError
from app.observability.logs import request_id
from app.openai.event_stream import EventStream, reply
from app.request_body import MAX_BODY_BYTES, JsonBody

router = APIRouter(prefix="/v1", tags=["Anthropic"])


class MessageStream(EventStream):
    """Server-sent events with pings and errors as Anthropic's API has them."""

    ping, done = event_bytes({"type": "ping"}), b""

    def failed(self, refusal: ApiError) -> bytes:
        return event_bytes(refusal.anthropic_body(request_id()))


MessagesBody = Annotated[
    MessagesRequest,
    Depends(JsonBody(MessagesRequest, MESSAGES_REFUSED, no_effect=MESSAGES_NO_EFFECT, most=MAX_BODY_BYTES)),
]
ConversationBody = Annotated[
    ConversationRequest,
    Depends(JsonBody(ConversationRequest, MESSAGES_REFUSED, no_effect=MESSAGES_NO_EFFECT, most=MAX_BODY_BYTES)),
]


@router.post("/messages")
async def create_message(request: Request, user: User, state: AppServing, wanted: MessagesBody) -> Response:
    job = await message_job(wanted, state, user)
    return await reply(request, job, MessageStream if wanted.stream else None, "messages")


@router.post("/messages/count_tokens")
async def count_message_tokens(user: User, state: AppServing, wanted: ConversationBody) -> Json:
    return await count_tokens(wanted, state, user)
