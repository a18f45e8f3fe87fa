"""Plans a run's answer: its chat's history and the retrieved passages as one prompt, and the tools that it may call.

With the calls and results that stand in an earlier answer's sequence, the next prompt begins with that sequence, so its
K/V is used again.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from app.admission.request_budget import output_limit
from app.answering.answer_plan import AnswerPlan, plan_calls
from app.answering.reasoning_config import ReasoningConfig
from app.answering.served_model import ServedModel
from app.db.answer_steps import AnswerStep
from app.db.sqlite import Row
from app.errors import ApiError, invalid
from engine.errors import ChatTemplateError
from engine.params import Span
from engine.tool_parsers import read_tools

if TYPE_CHECKING:
    from app.runs.rag import RetrievedContext


Messages = list[dict[str, Any]]  # as chat templates take them: role and content, and a call's JSON
IMPORTED = "an imported chat"  # with words that may be anybody's
DOCUMENTS = "documents"


@dataclass(frozen=True, slots=True)
class History:
    """The conversation down to the question, with calls and without. `read_from`: sources of its untrusted text."""

    messages: Messages
    plain: Messages
    question: str
    read_from: frozenset[str]

    @classmethod
    def of(
        cls, branch: Sequence[Row], *, system: str | None = None, imported: bool = False, grounded: bool = False
    ) -> History:
        """`branch` ends with the question, and `system` stands before it all. A turn without an answer (it failed, or
        was stopped at once) is left out.
        """
        *turns, question = branch
        first = Messages() if system is None else [{"role": "system", "content": system}]
        messages, plain = [*first], [*first]
        read_from = {name for name, read in ((IMPORTED, imported), (DOCUMENTS, grounded)) if read}
        for asked, answer in zip(turns[::2], turns[1::2], strict=True):
            if not answer["content"]:
                continue
            said = [{"role": "user", "content": asked["content"]}]
            spoken = [{"role": "assistant", "content": answer["content"]}]
            messages += said + (_acted(answer["steps"]) or spoken)
            plain += said + spoken
            read_from |= _untrusted(answer["steps"])
        last = {"role": "user", "content": question["content"]}
        return cls([*messages, last], [*plain, last], question["content"], frozenset(read_from))


def _acted(steps: Sequence[AnswerStep]) -> Messages:
    """An answer's calls, results and last words; nothing where they cannot be shown as a whole."""
    made = Messages()
    if not steps or not steps[-1].content:
        return made
    for step in steps[:-1]:
        calls = list[dict[str, Any]]()  # Any: JSON
        for call in step.calls:
            given = _object(call.arguments)
            if given is None:
                return []
            calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": given}})
        made.append({"role": "assistant", "content": step.content, "tool_calls": calls})
        made += [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
            for call, result in zip(step.calls, step.results, strict=True)
        ]
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
) -> AnswerPlan:
    """`sampling` overrides the model authors' defaults.

    Raises:
        ApiError, InvalidParameter: the conversation leaves no context for an answer, or the model cannot be offered
            tools.
        ChatTemplateError: the model's template does not take the conversation.
    """
    variables = reasoning_config.variables

    async def tokens(messages: Messages) -> list[int]:
        shown = messages if found is None else found.messages(messages)
        return reasoning_config.prompt(await served.chat_tokens(shown, variables, specs), served)

    prompt: list[int] | None = None
    if history.messages != history.plain:
        with suppress(ChatTemplateError, ApiError):  # not every template takes calls and results; or it is too long
            whole = await tokens(history.messages)
            prompt = whole if served.engine.max_model_len - len(whole) >= MIN_REMAINING else None
    if prompt is None:
        try:
            prompt = await tokens(history.plain)
        except ApiError as error:
            raise invalid(
                "content", f"{error.message} Start a new chat, or ask a shorter question.", error.code or "",
            ) from None  # fmt: skip
    remaining = served.engine.max_model_len - len(prompt)
    longest = output_limit(max_tokens)
    if remaining < 1:
        raise invalid(
            "content", f"This conversation has {len(prompt)} tokens and the model's context "
            f"{served.engine.max_model_len}. Start a new chat, or ask a shorter question.", "context_length_exceeded",
        )  # fmt: skip
    chosen = replace(served.sampling, **sampling)
    if chosen.seed is None:
        chosen = replace(chosen, seed=secrets.randbits(53))  # so that it can be made again
    span = Span(sampling=chosen, max_tokens=min(max_tokens or longest or remaining, remaining))
    tool_plan = await plan_calls(served, read_tools(specs), "auto", True, user) if specs else None
    return AnswerPlan(served, prompt, span, remaining, reasoning_config, variables, tool_plan)
