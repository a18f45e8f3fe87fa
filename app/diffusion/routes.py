"""`POST /api/diffusion`: fills the gaps of a text, or answers behind it, as a stream of the model's passes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, ConfigDict, Field

from app.admission.request_budget import output_limit, scheduling
from app.current_user import AppState, User
from app.diffusion.service import DiffusionService
from app.errors import ApiError, from_exception, invalid, stopping
from app.openai.chat_completions import usage_json
from app.openai.event_stream import EventStream, event
from app.openai.request_models import Seed, Temperature
from app.query_params import ONLY_KNOWN
from app.request_body import JsonBody
from app.state import State
from reasoning.thinking import Tally

if TYPE_CHECKING:  # torch comes with it
    from engine.diffusion import BlockRun, DiffuseRequest

MAX_CHARACTERS = 100_000  # more than any model's context; a text is read before its tokens are counted

router = APIRouter(prefix="/api", tags=["Masked diffusion"], dependencies=[ONLY_KNOWN])


class DiffusionRequest(BaseModel):
    """The body of `POST /api/diffusion`. The limits of tokens and places are the engine's, which knows the model."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    text: str = Field(
        min_length=1, max_length=MAX_CHARACTERS,
        description=f"a text of 1 to {MAX_CHARACTERS} characters: with the model's mask for each place to fill, or a "
        "prompt without one",
    )  # fmt: skip
    length: int | None = Field(
        None, ge=1, description="an integer of 1 or more: tokens of the answer at most; for a text without masks"
    )
    block_size: int | None = Field(None, ge=1, description="an integer from 1 to 1024: places that are filled together")
    tokens_per_step: int | None = Field(
        None, ge=1, description="an integer from 1 to 1024: places that a pass fills; or else threshold"
    )
    threshold: float | None = Field(
        None, ge=0, le=1, description="a number from 0 to 1: a pass fills all places of this probability or more"
    )
    temperature: Temperature = None
    seed: Seed = None

    def request(self) -> DiffuseRequest:
        from engine.diffusion import DiffuseRequest

        return DiffuseRequest(**self.model_dump(exclude_none=True))


DiffusionBody = Annotated[DiffusionRequest, Depends(JsonBody(DiffusionRequest))]


@router.post("/diffusion")
async def diffusion(user: User, state: AppState, wanted: DiffusionBody) -> Response:
    if state.diffusion is None:
        message = (
            "This server has no masked-diffusion model. Set diffusion_model, or start it with --diffusion-model DIR."
        )
        raise ApiError(404, message, code="diffusion_off")
    most = output_limit(wanted.length, "length")

    def explain(error: BaseException) -> ApiError:
        return from_exception(error, param="text")

    return EventStream(_passes(state.diffusion, wanted, most, state, user), explain=explain)


async def _passes(
    service: DiffusionService, wanted: DiffusionRequest, most: int | None, state: State, user: str
) -> AsyncGenerator[bytes, None]:
    """The events: the text's places, each pass, and the end. At most `most` places are filled.

    Raises:
        ApiError, EngineError: the request cannot be met, now or at all.
    """
    from engine.diffusion import shown_places, step_json

    model, watch, tally = service.model, state.meter.watch("diffusion"), Tally()
    left_s = scheduling()["deadline_s"]
    until = None if left_s is None else time.monotonic() + left_s
    with watch.measured(), service.run():
        run = await service.compute(lambda: _begin(service, wanted.request(), most))
        places = run.text.count(model.mask_token_id)
        tally.prompt_tokens = len(run.text) - places
        watch.admit([], user, tally.prompt_tokens, places)
        yield event({"type": "start", "places": shown_places(model, run)})
        steps = iter(run)
        while until is None or time.monotonic() < until:
            if (step := await service.compute(lambda: next(steps, None))) is None:
                break
            watch.tokens(0, len(step.tokens))
            tally.completion_tokens += len(step.tokens)
            yield event({"type": "pass", **step_json(model, run, step)})
            if state.ending.is_set():
                raise stopping()
        reason = "stop" if run.ended or not run.stops else "length"
        if model.mask_token_id in run.text:
            reason = "deadline"
        end = {"answer": model.tokenizer.decode(run.answer), "length": len(run.text), "passes": run.passes}
        yield event({"type": "end", "finish_reason": reason, **end, "usage": usage_json(tally)})


def _begin(service: DiffusionService, request: DiffuseRequest, most: int | None) -> BlockRun:
    """Starts the run, of at most `most` places.

    Raises:
        ApiError: 400: the text has more masks.
        EngineError: see `DiffuseRequest.start`.
    """
    run = request.start(service.model)
    masks = run.text.count(service.model.mask_token_id)
    if most is None or masks <= most:
        return run
    if not run.stops:
        message = f"text has {masks} masks; accepted: at most {most}, the longest answer of this key or server."
        raise invalid("text", message)
    return replace(request, length=most).start(service.model)
