"""The routes of `/v1`: read a body, check it, answer it whole or as a stream."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from app.body import MAX_BODY_BYTES, json_object
from app.disconnect import while_connected
from app.errors import ApiError, from_exception
from app.openai.chat import ChatJob, RoutedChat, chat_job
from app.openai.completions import CompletionJob
from app.openai.embeddings import embeddings
from app.openai.models import model_entry, model_list
from app.openai.stream import EventStream
from app.state import Serving, State
from app.users import Asker, User, check_checker_scope

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/chat/completions")
async def chat_completions(request: Request, user: User, who: Asker) -> Response:
    state = Serving.of(request)
    body = await json_object(request, MAX_BODY_BYTES)
    check_checker_scope(body, who)
    return await _reply(request, await chat_job(body, state, user), "messages")


@router.post("/completions")
async def completions(request: Request, user: User) -> Response:
    state = Serving.of(request)
    body = await json_object(request, MAX_BODY_BYTES)
    return await _reply(request, await CompletionJob.of(body, state.models, state.counting, user), "prompt")


@router.post("/embeddings")
async def embed(request: Request) -> Response:
    body = await json_object(request, MAX_BODY_BYTES)
    reply = await while_connected(request, embeddings(body, State.of(request).library.embedder))
    return await asyncio.to_thread(JSONResponse, reply)  # a few megabytes, for many texts


@router.get("/models")
async def models(request: Request) -> dict[str, Any]:
    return model_list(Serving.of(request).models)


@router.get("/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    return model_entry(Serving.of(request).models, name)


async def _reply(request: Request, job: ChatJob | RoutedChat | CompletionJob, prompt_field: str) -> Response:
    def explain(error: BaseException) -> ApiError:
        return from_exception(error, param=prompt_field)

    if job.request.stream:
        return EventStream(job.chunks(), explain=explain)
    try:
        return JSONResponse(await while_connected(request, job.whole()))
    except Exception as error:
        raise explain(error) from error
