"""`POST /v1/completions`: text (or token ids) in, its continuation out, streamed or whole.

Nothing is parsed out of the text: thinking markers, where a model writes them, are just text here. With `echo` and
`logprobs` it scores a prompt, as evaluation harnesses do.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from app.admission.request_budget import enter, narrow
from app.answering.answer_pipeline import AnswerPipeline
from app.answering.answer_plan import AnswerPlan, remaining_context
from app.answering.model_registry import ModelRegistry
from app.errors import invalid
from app.observability.metrics import Counting
from app.openai.chat_completions import ended_json, finite_logprob, usage_json
from app.openai.event_stream import event
from app.openai.kv_transfer import remote_prefill, reply_fields
from app.openai.request_models import CompletionRequest
from app.openai.text_constraints import constrain_text
from engine.outputs import TokenLogprob
from reasoning.agent import Wrote
from reasoning.thinking import Piece

if TYPE_CHECKING:
    from engine import Tokenizer

DEFAULT_MAX_TOKENS = 16  # as OpenAI documents it for this endpoint


@dataclass(slots=True)
class CompletionJob:
    """A checked completion request, ready to run."""

    request: CompletionRequest
    pipeline: AnswerPipeline
    texts: list[str]  # the prompts as text, for `echo`
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    async def of(
        cls, request: CompletionRequest, models: ModelRegistry, counting: Counting, user: str
    ) -> CompletionJob:
        """
        Raises:
            ApiError: 400 or 404, naming the field.
        """
        narrow(request.priority, request.deadline_s)
        served = models.get(request.model)
        enter(served)
        tokenizer = served.engine.tokenizer
        prompts: list[list[int]] = []
        texts: list[str] = []
        for i, prompt in enumerate(request.prompts):
            ids = await served.text_tokens(prompt) if isinstance(prompt, str) else list(prompt)
            if not ids and tokenizer.bos_token_id is not None:
                ids = [tokenizer.bos_token_id]
            if not ids:
                raise invalid("prompt", f"prompt {i} is empty; accepted: at least one token to continue.")
            if (worst := max(ids)) >= served.engine.vocab_size:
                accepted = f"token ids from 0 to {served.engine.vocab_size - 1}"
                raise invalid("prompt", f"prompt {i} has token {worst}; accepted: {accepted}.")
            remaining_context(served, ids, request.max_tokens or 1, "prompt")
            prompts.append(ids)
            if not request.echo:
                texts.append("")
            elif isinstance(prompt, str):
                texts.append(prompt)
            else:
                texts.append(await asyncio.to_thread(tokenizer.decode, ids, skip_special=False))
        if not prompts:
            raise invalid("prompt", "prompt is an empty list; accepted: at least one prompt.")
        held = await constrain_text(request, served, user)
        constraint = None if held is None else held.constrained
        plans = []
        for ids in prompts:
            remaining = remaining_context(served, ids, request.max_tokens or 1, "prompt")
            span = request.span(
                served.sampling, remaining=remaining, vocab_size=served.engine.vocab_size,
                default_limit=1 if request.max_tokens == 0 else DEFAULT_MAX_TOKENS,
            )  # fmt: skip
            served.engine.check_speculation(span.speculation)
            remote = remote_prefill(request.kv_transfer_params, served, stream=request.stream)
            scored = request.logprobs if request.echo else None
            span = replace(span, logprobs=request.logprobs, prompt_logprobs=scored, constraint=constraint)
            plans.append(
                AnswerPlan(
                    served, ids, span, remaining, chat=False, check=None if held is None else held.check,
                    warnings=() if held is None else held.warnings, remote_prefill=remote,
                )
            )  # fmt: skip
        return cls(request, AnswerPipeline(partial(counting.watch, "completions"), plans, request.n, user), texts)

    async def whole(self) -> dict[str, Any]:
        """The reply, when all of it is there."""
        choices = [_Choice(self, i) for i in range(len(self.texts) * self.request.n)]
        async with aclosing(self.pipeline.stream()) as stream:
            async for index, wrote in stream:
                assert isinstance(wrote, Wrote)
                choices[index].add(wrote.piece)
        replies = []
        for index, choice in enumerate(choices):
            text, logprobs = choice.take()
            replies.append({"index": index, "text": text, "logprobs": logprobs, **ended_json(choice.finish_reason)})
        kept = reply_fields(self.request.kv_transfer_params, self.pipeline.plan.served)
        return {**self._head(), "choices": replies, "usage": self._usage(), **self._warnings(), **kept}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The reply as events, `[DONE]` excepted."""
        head = self._head()
        tail = {"usage": None} if self.request.include_usage else {}
        choices = [_Choice(self, i) for i in range(len(self.texts) * self.request.n)]
        async with aclosing(self.pipeline.stream()) as stream:
            async for index, wrote in stream:
                assert isinstance(wrote, Wrote)
                choice = choices[index]
                choice.add(wrote.piece)
                text, logprobs = choice.take()
                if text or choice.finish_reason or logprobs:
                    reply = {"index": index, "text": text, "logprobs": logprobs, **ended_json(choice.finish_reason)}
                    yield event({**head, "choices": [reply], **tail})
        if self.pipeline.plan.warnings:
            yield event({**head, "choices": [], **self._warnings(), **tail})
        if self.request.include_usage:
            yield event({**head, "choices": [], "usage": self._usage()})

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.pipeline.plan.served.name,
        }

    def _warnings(self) -> dict[str, Any]:
        warnings = self.pipeline.plan.warnings
        return {"warnings": list(warnings)} if warnings else {}

    def _usage(self) -> dict[str, Any]:
        if self.request.max_tokens == 0:
            self.pipeline.tally.completion_tokens = 0
        return usage_json(self.pipeline.tally)


class _Choice:
    """One continuation being put together: `add` pieces, `take` the new part."""

    def __init__(self, job: CompletionJob, index: int) -> None:
        prompt = index // job.request.n
        self.finish_reason: str | None = None
        self._discard = job.request.max_tokens == 0  # the one token that was made to get the prompt scored
        self._text = [job.texts[prompt]] if job.request.echo else []
        plan = job.pipeline.plans[prompt]
        assert isinstance(plan, AnswerPlan), "a remote model continues no text"
        self._prompt = plan.prompt
        self._entries: list[tuple[int, TokenLogprob | None]] = []
        top = job.request.logprobs
        self._logprobs = None if top is None else CompletionLogprobs(plan.served.engine.tokenizer, top)

    def add(self, piece: Piece) -> None:
        if piece.prompt_logprobs is not None:
            self._entries += zip(self._prompt, piece.prompt_logprobs, strict=True)
        if not self._discard:
            self._text.append(piece.text)
            self._entries += [(entry.token_id, entry) for entry in piece.logprobs]
        if piece.finish_reason is not None:
            ended = piece.finish_reason in ("stop", "repetition") and not self._discard
            self.finish_reason = piece.finish_reason if ended else "length"

    def take(self) -> tuple[str, dict[str, Any] | None]:
        text = "".join(self._text)
        self._text.clear()
        if self._logprobs is None or not self._entries:
            return text, None
        logprobs = self._logprobs.take(self._entries)
        self._entries.clear()
        return text, logprobs


class CompletionLogprobs:
    """`choices[].logprobs` of a plain completion, in instalments: text offsets run on from one to the next."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0

    def take(self, entries: Sequence[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        """The next tokens, each with its log-probability: None for a prompt's first, which nothing precedes."""
        text = self._tokenizer.token_text
        tokens = [text(token) for token, _ in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if e is None else finite_logprob(e.logprob) for _, e in entries],
            "top_logprobs": [
                None if e is None else {text(t): finite_logprob(lp) for t, lp in self._with_chosen(e)}
                for _, e in entries
            ]
            if self._top
            else None,
            "text_offset": offsets,
        }

    def _with_chosen(self, entry: TokenLogprob) -> list[tuple[int, float]]:
        # As OpenAI documents it, the chosen token is always there, so there may be one more than asked for. It goes
        # first: should two ids share a text, the likeliest one's value stands.
        likeliest = list(entry.top[: self._top])
        return [(entry.token_id, entry.logprob), *likeliest[::-1]]
