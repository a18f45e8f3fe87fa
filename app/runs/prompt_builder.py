"""Plans a run's answer: its chat's history and the retrieved passages as one prompt, and the tools that it may call.

With the calls and results that stand in an earlier answer's sequence, the next prompt begins with that sequence, so its
K/V is used again.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from app.admission.request_budget import output_limit
from app.answering.answer_pipeline import AnswerPipeline
from app.answering.answer_plan import AnswerPlan, plan_held, select_call, without_calls
from app.answering.context_shift import SHARE, EndlessPrompt, first_seen, plan_endless
from app.answering.next_turn import Render
from app.answering.reasoning_config import ReasoningConfig
from app.answering.remote_model import Collections, RemoteModel, RemotePlan
from app.answering.served_model import ServedModel
from app.answering.tool_selection import ToolSelector
from app.db.answer_steps import AnswerStep, Usage
from app.db.sqlite import Row
from app.errors import ApiError, invalid
from app.remote.wire_formats import RemotePrompt
from app.runs.rag import RetrievedContext, quotations
from engine.errors import ChatTemplateError
from engine.kv_cache.chunk_reuse.find_chunks import find_chunks
from engine.params import ChunkSpans, RepetitionDetection, Span
from engine.structured_output.layout import Constrained, Layout
from engine.tool_parsers import read_tools
from reasoning.dialogue import turn_messages
from reasoning.strategy import ContextDocument
from reasoning.thinking import Tally

Messages = list[dict[str, Any]]  # as chat templates take them: role and content, and a call's JSON
IMPORTED = "an imported chat"  # with words that may be anybody's
DOCUMENTS = "documents"


@dataclass(frozen=True, slots=True)
class History:
    """The conversation down to the question, with calls and without. `read_from`: sources of its untrusted text.

    `private`: its chat is kept from remote models. `called`: tools with results in it. `files`: ids of those that its
    questions were sent with; `asks_files`: the last one was.
    """

    messages: Messages
    plain: Messages
    question: str
    read_from: frozenset[str]
    private: bool = False
    called: frozenset[str] = frozenset()
    files: tuple[str, ...] = ()
    asks_files: bool = False
    asked: tuple[str, ...] = ()  # ids of the questions, the last one's included

    @property
    def turns(self) -> list[tuple[str, str]]:
        """Returns the earlier questions with their answers."""
        said = [each["content"] for each in self.plain[:-1] if each["role"] != "system"]
        return list(zip(said[::2], said[1::2], strict=True))

    @classmethod
    def of(
        cls, branch: Sequence[Row], *, system: str | None = None, imported: bool = False, grounded: bool = False,
        private: bool = False,
    ) -> History:  # fmt: skip
        """`branch` ends with the question, and `system` stands before it all. A turn without an answer (it failed, or
        was stopped at once) is left out.
        """
        *turns, question = branch
        first = Messages() if system is None else [{"role": "system", "content": system}]
        messages, plain = [*first], [*first]
        called, ids = set[str](), list[str]()
        read_from = {name for name, read in ((IMPORTED, imported), (DOCUMENTS, grounded)) if read}
        for asked, answer in zip(turns[::2], turns[1::2], strict=True):
            if not answer["content"]:
                continue
            ids.append(asked["id"])
            said = [_asked(asked)]
            messages += said + answer_messages(answer["content"], answer["steps"])
            plain += said + answer_messages(answer["content"])
            read_from |= _untrusted(answer["steps"])
            called |= {call.name for step in answer["steps"] for call in step.calls}
        last = _asked(question)
        files = tuple(each["id"] for message in branch for each in message.get("files") or () if each["id"])
        return cls(
            [*messages, last], [*plain, last], question["content"], frozenset(read_from), private, frozenset(called),
            files, bool(question.get("files")), (*ids, question["id"]),
        )  # fmt: skip


def _asked(question: Row) -> dict[str, Any]:
    """Returns a question as a message, its images before its text."""
    kept = question.get("images") or ()
    images = [{"at": 0, "url": url, "detail": "auto", "where": "images"} for url in kept]
    return {"role": "user", "content": question["content"], **({"images": images} if images else {})}


def answer_messages(content: str, steps: Sequence[AnswerStep] = ()) -> Messages:
    """Returns an answer as later prompts have it: with its calls and results, where they can be shown as a whole."""
    return _acted(steps) or [{"role": "assistant", "content": content}]


def _acted(steps: Sequence[AnswerStep]) -> Messages:
    """An answer's calls, results and last words; nothing where they cannot be shown as a whole."""
    made = Messages()
    if not steps or not steps[-1].content:
        return made
    for step in steps[:-1]:
        calls = list[tuple[str, str, dict[str, Any]]]()  # Any: JSON
        for call in step.calls:
            given = _object(call.arguments)
            if given is None:
                return []
            calls.append((call.id, call.name, given))
        made += turn_messages(step.content, calls, [result.text for result in step.results])
    return [*made, {"role": "assistant", "content": steps[-1].content}]


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _untrusted(steps: Sequence[AnswerStep]) -> set[str]:
    return {
        call.name for step in steps for call, result in zip(step.calls, step.results, strict=True) if result.untrusted
    }


# Ends an answer after 12 repetitions that are 96 tokens or more: a shorter pattern counts by its multiples, so that a
# line of 80 dashes, a row of zeros or "ha ha ha" goes through, whatever the tokens are.
REPETITION = RepetitionDetection(max_pattern_size=64, min_pattern_size=8, min_count=12)


def quoting(span: Span, served: ServedModel, quotable: Sequence[tuple[str, str]]) -> Span:
    """Returns the span of an answer that may only quote these texts, each under its label."""
    held = Constrained(quotations(quotable), Layout(breaks=served.line_breaks))
    return replace(span, constraint=held, repetition_detection=None)


async def usage_of(pipeline: AnswerPipeline | None) -> Usage:
    """Returns the usage of an answer that is there, with what an endless chat's model saw first."""
    if pipeline is None:
        return Usage.of(Tally())
    plan, forgotten = pipeline.plan, pipeline.tally.forgotten_tokens
    first = plan.first_seen if isinstance(plan, AnswerPlan) and forgotten else None
    return Usage.of(pipeline.tally, None if first is None else await first(forgotten))


MIN_REMAINING = 256  # tokens for an answer; with fewer, earlier answers' calls are left out of the prompt


async def plan_run(
    served: ServedModel,
    reasoning_config: ReasoningConfig,
    history: History,
    found: RetrievedContext | None,
    specs: Sequence[dict[str, Any]],  # Any: JSON, as OpenAI's `tools` has it
    *,
    sampling: Mapping[str, Any],
    max_tokens: int | None,
    user: str,
    tool_selector: ToolSelector | None = None,
    endless: bool = False,
) -> AnswerPlan:
    """`sampling` overrides the model authors' defaults. An answer that repeats itself ends, and one from documents is
    not longer than its sources. An `endless` conversation may grow past the context.

    Raises:
        ApiError, InvalidParameter: the conversation leaves no context for an answer, or the model cannot be offered
            tools.
        ChatTemplateError: the model's template does not take the conversation.
    """
    variables, seen = reasoning_config.variables, list[Messages]()  # images are known to the engine while kept

    async def in_parts(messages: Sequence[dict[str, Any]]) -> Messages:
        seen.append(await served.images.in_parts(messages, served.engine, served.name))
        return seen[-1]

    async def tokens(messages: Messages, found: RetrievedContext | None = found) -> list[int]:
        shown = await in_parts(messages if found is None else found.messages(messages))
        return reasoning_config.prompt(await served.chat_tokens(shown, variables, specs), served, calls=bool(specs))

    def render_after(messages: Messages) -> Render | None:
        if found is not None:
            return None  # the next question has passages of its own, at the prompt's beginning

        async def render(after: Sequence[dict[str, Any]]) -> list[int]:
            return await served.chat_tokens(await in_parts([*messages, *after]), variables, specs)

        return render

    async def rendered(messages: Sequence[dict[str, Any]]) -> list[int]:
        return await served.chat_tokens(await in_parts(messages), variables, specs, endless=True)

    context = served.engine.max_model_len
    endless = (
        endless and served.engine.config.context_shift and found is None and reasoning_config.strategy is None
        and not any("images" in message for message in history.plain)
    )  # fmt: skip
    least = int(SHARE * context) if endless else MIN_REMAINING
    prompt: list[int] | None = None
    render = render_after(history.messages)
    if history.messages != history.plain:
        with suppress(ChatTemplateError, ApiError):  # not every template takes calls and results; or it is too long
            whole = await tokens(history.messages)
            prompt = whole if context - len(whole) >= least else None
    shifted: EndlessPrompt | None = None
    if prompt is None and endless:
        whole = reasoning_config.prompt(await rendered(history.plain), served, calls=bool(specs))
        shifted = await plan_endless(served, whole, history.plain, rendered, max_tokens, "content")
        prompt, render = shifted.tokens, None if shifted.streaming else render_after(history.plain)
    elif prompt is None:
        render = render_after(history.plain)
        try:
            prompt = await tokens(history.plain)
        except ApiError as error:
            raise invalid(
                "content", f"{error.message} Start a new chat, or ask a shorter question.", error.code or "",
            ) from None  # fmt: skip
    chunks: ChunkSpans = ()
    if found is not None and found.chunks:
        chunks = await asyncio.to_thread(find_chunks, prompt, found.chunks, served.engine.tokenizer.encode)
    remaining = context - len(prompt) if shifted is None else shifted.limit
    longest = output_limit(max_tokens)
    if remaining < 1:
        raise invalid(
            "content", f"This conversation has {len(prompt)} tokens and the model's context "
            f"{context}. Start a new chat, or ask a shorter question.", "context_length_exceeded",
        )  # fmt: skip
    streaming = None if shifted is None else shifted.streaming

    async def first_seen_of(forgotten_tokens: int) -> str:
        """Returns the id of the first question that is seen whole; nothing where there is none."""
        assert streaming is not None and prompt is not None
        number = await first_seen(history.plain, prompt, streaming.sinks + forgotten_tokens, rendered)
        return (*history.asked, "")[number]

    chosen = replace(served.sampling, **sampling)
    if chosen.seed is None:
        chosen = replace(chosen, seed=secrets.randbits(53))  # so that it can be made again
    limit = min(max_tokens or longest or remaining, remaining)
    if not specs:
        answer_tokens: int | None = None
        if found is not None:  # with tools, their results are sources, too, and not known yet
            answer_tokens = await asyncio.to_thread(found.answer_limit, served.engine.tokenizer)
            if served.markers is None:  # there is nothing but the answer
                limit = min(limit, answer_tokens)
        span = Span(sampling=chosen, max_tokens=limit, repetition_detection=REPETITION)
        if found is not None and found.quotable:
            span = quoting(span, served, found.quotable)
        documents: list[ContextDocument] = []
        if found is not None and reasoning_config.reads_documents:
            for source, alone in found.alone():
                documents.append(
                    ContextDocument(tuple(await tokens(history.plain, alone)), source.score, str(source.label))
                )
        return AnswerPlan(
            served, prompt, span, remaining, reasoning_config, variables, answer_tokens=answer_tokens,
            documents=tuple(documents), render=render, seen=seen, chunks=chunks, streaming=streaming,
            first_seen=first_seen_of,
        )  # fmt: skip
    span = Span(sampling=chosen, max_tokens=limit, repetition_detection=REPETITION)
    tools = read_tools(specs)
    held = tools if tool_selector is None else await tool_selector.held(served, tools)
    _, tool_plan = await plan_held(served, held, tools, "auto", True, user)
    selected = None if tool_selector is None else await tool_selector.select(served, history.messages, held)
    if selected == ():
        span = replace(span, sampling=without_calls(span.sampling, tool_plan))
    call = await select_call(served, selected, tools, True, user)
    return AnswerPlan(
        served, prompt, span, remaining, reasoning_config, variables, tool_plan, selected=call, render=render,
        seen=seen, chunks=chunks, streaming=streaming, first_seen=first_seen_of,
    )  # fmt: skip


async def plan_remote_run(
    remote: RemoteModel,
    history: History,
    found: RetrievedContext | None,
    specs: Sequence[dict[str, Any]],  # Any: JSON, as OpenAI's `tools` has it
    *,
    sampling: Mapping[str, Any],
    max_tokens: int | None,
    collections: Collections,
) -> RemotePlan:
    """Plans a run for a remote model, with the calls and results of earlier answers.

    Raises:
        ApiError: 403: something in it may not be sent there. 400: a field of `sampling` means nothing to it, or it
            does not read the images of the chat.
    """
    tools = read_tools(specs)
    quotes = DOCUMENTS in history.read_from or bool(history.files)
    remote.check_leaving(
        private=history.private, collections=collections, grounded=quotes,
        tools={*history.called, *(tool.name for tool in tools)},
    )  # fmt: skip
    remote.check_fields(sampling)
    messages = history.messages if found is None else found.messages(history.messages)
    limit, sampled = remote.limit(max_tokens), remote.sampling(sampling)
    prompt = RemotePrompt(await remote.with_images(messages), limit, sampled, specs)
    return RemotePlan(remote, prompt, tuple(tools), passages=0 if found is None else len(found.sources))
