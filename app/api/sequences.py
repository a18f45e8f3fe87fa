"""The routes of sequences: the engine's handle for programs elsewhere, with the abilities of a strategy in the server.

Each call renews the lease of its sequence; one that changes something is alone on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar

from fastapi import APIRouter, Depends, Request, Response

from app.admission.request_budget import enter, narrow
from app.answering.served_model import ServedModel
from app.connections import while_connected
from app.current_user import AppState, User
from app.errors import ApiError, from_exception, invalid
from app.openai.chat_completions import finite_logprob
from app.openai.event_stream import EventStream
from app.openai.request_models import ChatRequest
from app.query_params import ONLY_KNOWN
from app.request_body import MAX_BODY_BYTES, JsonBody, parse
from app.sequences.generation import written
from app.sequences.leased import LeasedSequence
from app.sequences.registry import Sequences
from app.sequences.sequence_requests import (
    AppendRequest,
    ForkRequest,
    GenerateRequest,
    OpenRequest,
    ScoreRequest,
    TruncateRequest,
    check_generate_fields,
)
from engine.errors import EngineError

router = APIRouter(prefix="/api/sequences", tags=["Sequences"], dependencies=[ONLY_KNOWN])

OpenBody = Annotated[OpenRequest, Depends(JsonBody(OpenRequest, most=MAX_BODY_BYTES))]
AppendBody = Annotated[AppendRequest, Depends(JsonBody(AppendRequest, most=MAX_BODY_BYTES))]
GenerateBody = Annotated[GenerateRequest, Depends(JsonBody(GenerateRequest, before=check_generate_fields))]
ForkBody = Annotated[ForkRequest, Depends(JsonBody(ForkRequest))]
ScoreBody = Annotated[ScoreRequest, Depends(JsonBody(ScoreRequest, most=MAX_BODY_BYTES))]
TruncateBody = Annotated[TruncateRequest, Depends(JsonBody(TruncateRequest))]

P = ParamSpec("P")
T = TypeVar("T")
_LONG_TEXT = 4_000  # characters, or tokens; working on more than this would be felt by running streams


@router.post("", status_code=201)
async def open_sequence(user: User, state: AppState, wanted: OpenBody) -> dict[str, Any]:
    served = state.models.get(wanted.model)
    narrow(wanted.priority, None)
    tokens, _images = await _prompt(wanted, served)  # the engine knows these while they are kept
    try:
        leased = await state.sequences.open(user, served, tokens, wanted.lease_s)
    except EngineError as error:
        raise from_exception(error, param="messages" if wanted.prompt is None else "prompt") from error
    return _shown(leased)


@router.get("")
async def sequences(user: User, state: AppState) -> dict[str, Any]:
    held = state.sequences.of(user)
    return {
        "sequences": [_shown(leased) for leased in held],
        "tokens": sum(leased.held_tokens for leased in held),
        "limits": {
            "sequences": state.sequences.most, "tokens": state.sequences.most_tokens,
            "lease_s": state.sequences.longest_lease_s,
        },
    }  # fmt: skip


@router.get("/{sequence_id}")
async def sequence(user: User, state: AppState, sequence_id: str) -> dict[str, Any]:
    leased = state.sequences.get(user, sequence_id)
    tokens = leased.tokens
    tokens = leased.served.shown_tokens(tokens)
    text = await _threaded(len(tokens), leased.served.engine.tokenizer.decode, tokens, skip_special=False)
    return {**_shown(leased), "tokens": tokens, "text": text}


@router.post("/{sequence_id}/append")
async def append(user: User, state: AppState, sequence_id: str, wanted: AppendBody) -> dict[str, Any]:
    leased = state.sequences.get(user, sequence_id)
    given, field = (wanted.tokens, "tokens") if wanted.text is None else (wanted.text, "text")
    try:
        with leased.call() as seq:
            tokens = await _ids(given or [], wanted.special, leased.served, field)
            state.sequences.check(user, 0, len(tokens))
            seq.append(tokens)
    except EngineError as error:
        raise from_exception(error, param=field) from error
    return {**_shown(leased), "tokens": tokens}


@router.post("/{sequence_id}/generate")
async def generate(user: User, state: AppState, sequence_id: str, wanted: GenerateBody) -> Response:
    leased = state.sequences.get(user, sequence_id)
    enter(leased.served)

    def explain(error: BaseException) -> ApiError:
        return from_exception(error, param="max_tokens")

    return EventStream(written(leased, wanted, state.sequences, state.meter), explain=explain)


@router.post("/{sequence_id}/fork", status_code=201)
async def fork(user: User, state: AppState, sequence_id: str, wanted: ForkBody) -> dict[str, Any]:
    leased = state.sequences.get(user, sequence_id)
    scope = None if wanted.scope is None else state.sequences.get(user, wanted.scope, param="scope")
    forks = state.sequences.fork(leased, wanted.n, scope=scope, lease_s=wanted.lease_s)
    return {"sequences": [_shown(each) for each in forks]}


@router.post("/{sequence_id}/score")
async def score(request: Request, user: User, state: AppState, sequence_id: str, wanted: ScoreBody) -> dict[str, Any]:
    leased = state.sequences.get(user, sequence_id)
    try:
        return await while_connected(request, _scores(leased, wanted, state.sequences))
    except EngineError as error:
        raise from_exception(error, param="candidates") from error


@router.post("/{sequence_id}/truncate")
async def truncate(user: User, state: AppState, sequence_id: str, wanted: TruncateBody) -> dict[str, Any]:
    leased = state.sequences.get(user, sequence_id)
    with leased.call() as seq:
        if wanted.length > len(seq):
            raise invalid("length", f"length is {wanted.length}; accepted: 0 to {len(seq)}, the sequence's length.")
        seq.truncate(wanted.length)
    return _shown(leased)


@router.delete("/{sequence_id}", status_code=204)
async def close(user: User, state: AppState, sequence_id: str) -> None:
    held = state.sequences
    held.close(held.get(user, sequence_id))


async def _prompt(wanted: OpenRequest, served: ServedModel) -> tuple[list[int], list[dict[str, Any]]]:
    """The tokens of a sequence, and its messages with their images. Any: as templates take them."""
    if wanted.messages is None:
        given, bos = wanted.prompt or "", isinstance(wanted.prompt, str)
        return await _ids(given, wanted.special, served, "prompt", bos=bos), []
    variables = wanted.chat_template_kwargs or {}
    chat = parse({"model": wanted.model, "messages": wanted.messages, "chat_template_kwargs": variables}, ChatRequest)
    messages = await served.images.in_parts(chat.template_messages(), served.engine, served.name)
    return await served.chat_tokens(messages, chat.chat_template_kwargs), messages


async def _ids(
    given: str | list[int], special: bool | None, served: ServedModel, field: str, *, bos: bool = False
) -> list[int]:
    """A text's token ids, or those that were given.

    Raises:
        ApiError: 400: an id is not in the vocabulary.
    """
    if isinstance(given, str):
        return await served.text_tokens(given, field, special=special is not False, bos=bos)
    if (worst := max(given, default=0)) >= served.engine.vocab_size:
        raise invalid(
            field, f"{field} has token {worst}; accepted: token ids from 0 to {served.engine.vocab_size - 1}."
        )
    return given


async def _threaded(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work` on something of `size`, off the event loop where it is long."""
    return await asyncio.to_thread(work, *args, **kwargs) if size > _LONG_TEXT else work(*args, **kwargs)


async def _scores(leased: LeasedSequence, wanted: ScoreRequest, held: Sequences) -> dict[str, Any]:
    with leased.call() as seq:
        candidates = [
            await _ids(given, wanted.special, leased.served, f"candidates[{at}]")
            for at, given in enumerate(wanted.candidates)
        ]
        most = sum(map(len, candidates))
        held.check(leased.user, 0, most)
        with leased.growing(most):
            scored = [[finite_logprob(value) for value in logprobs] for logprobs in await seq.score(candidates)]
    return {
        "scores": [
            {"tokens": tokens, "logprobs": logprobs, "logprob": sum(logprobs)}
            for tokens, logprobs in zip(candidates, scored, strict=True)
        ]
    }


def _shown(leased: LeasedSequence) -> dict[str, Any]:
    """Returns the fields that every answer gives of a sequence."""
    return {
        "id": leased.id, "model": leased.served.name, "length": len(leased), "busy": leased.busy,
        "scope": None if leased.scope is None else leased.scope.id, "created_at": leased.created_at,
        "lease_s": leased.lease.length_s, "expires_at": leased.lease.expires_at,
    }  # fmt: skip
