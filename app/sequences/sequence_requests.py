"""The bodies of `/api/sequences` as typed objects, as strict as those of `/v1`.

`generate` takes the sampling, stops, limits and forms of completions; its list of fields is its own, so that a field
which `/v1` learns is refused here until it does something here. Knows nothing of the engine's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from app.errors import invalid
from app.openai.request_models import MAX_N, MAX_TOP_LOGPROBS, Priority, SamplingRequest, are_ids

MAX_CANDIDATES = 256

_Token = Annotated[int, Field(ge=0)]
_SPECIAL = "true or false: whether special tokens spelt out in a text count as such; only with text"
_LEASE = "seconds above 0, at most the server's sequence_lease_s"


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def _whole_ids(value: Any) -> Any:  # any JSON
    """
    Raises:
        ValueError: it is a list of something else than token ids; before an error for each of them.
    """
    if isinstance(value, list) and not are_ids(value):
        raise ValueError("tokens")
    return value


_Ids = BeforeValidator(_whole_ids)


class OpenRequest(_Body):
    """The body of `POST /api/sequences`."""

    model: str = Field("default", description='the served model\'s name or "default"; GET /v1/models lists them')
    prompt: Annotated[str | list[_Token] | None, _Ids] = Field(
        None, description="a string or a list of token ids, which may be empty"
    )
    messages: list[Any] | None = Field(  # checked as a chat's are
        None, min_length=1, description="a non-empty list of {role, content}, as for chat completions"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description='an object of template variables, such as {"enable_thinking": false}; only with messages'
    )
    special: bool | None = Field(None, description=_SPECIAL)
    lease_s: float | None = Field(None, gt=0, description=_LEASE)
    priority: Priority = None

    @model_validator(mode="after")
    def _consistent(self) -> OpenRequest:
        _one_of(prompt=self.prompt, messages=self.messages)
        if self.chat_template_kwargs is not None and self.messages is None:
            raise invalid("chat_template_kwargs", "chat_template_kwargs is only accepted together with messages.")
        _only_with_text(self.special, isinstance(self.prompt, str))
        return self


class AppendRequest(_Body):
    """The body of `POST /api/sequences/{id}/append`."""

    text: str | None = Field(None, min_length=1, description="a text of 1 character or more")
    tokens: Annotated[list[_Token] | None, _Ids] = Field(None, min_length=1, description="a list of 1 token id or more")
    special: bool | None = Field(None, description=_SPECIAL)

    @model_validator(mode="after")
    def _consistent(self) -> AppendRequest:
        _one_of(text=self.text, tokens=self.tokens)
        _only_with_text(self.special, self.text is not None)
        return self


class ForkRequest(_Body):
    """The body of `POST /api/sequences/{id}/fork`."""

    n: int = Field(1, ge=1, le=MAX_N, description=f"an integer from 1 to {MAX_N}")
    scope: str | None = Field(None, description="the id of the sequence, or of one that it closes with")
    lease_s: float | None = Field(None, gt=0, description=_LEASE)


class ScoreRequest(_Body):
    """The body of `POST /api/sequences/{id}/score`."""

    candidates: list[Annotated[str | list[_Token], _Ids]] = Field(
        min_length=1, max_length=MAX_CANDIDATES,
        description=f"a list of 1 to {MAX_CANDIDATES} texts or lists of token ids, none of them empty",
    )  # fmt: skip
    special: bool | None = Field(None, description=_SPECIAL)

    @model_validator(mode="after")
    def _consistent(self) -> ScoreRequest:
        if not all(self.candidates):
            at = self.candidates.index("" if "" in self.candidates else [])
            raise invalid(f"candidates[{at}]", f"candidates[{at}] is empty; accepted: one token or more.")
        _only_with_text(self.special, any(isinstance(candidate, str) for candidate in self.candidates))
        return self


class TruncateRequest(_Body):
    """The body of `POST /api/sequences/{id}/truncate`."""

    length: int = Field(ge=0, description="an integer from 0 to the sequence's length: the tokens that stay")


class GenerateRequest(SamplingRequest):
    """The body of `POST /api/sequences/{id}/generate`, of which `GENERATE_FIELDS` are a client's to give."""

    model: str = "default"
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description=f"an integer from 0 to {MAX_TOP_LOGPROBS}"
    )
    keep_stop_token: bool = Field(False, description="true or false")


GENERATE_FIELDS = frozenset(
    {
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos",
        "repetition_detection", "speculation", "response_format", "guided_json", "guided_regex", "guided_choice",
        "guided_grammar", "logprobs", "keep_stop_token",
    }
)  # fmt: skip
_INSTEAD = {
    "n": "fork, whose sequences are generated on",
    "stream": "nothing: the answer is always a stream",
    "stream_options": "nothing: the last event has the usage",
    "model": "nothing: the sequence was opened with its model",
    "prompt": "append",
    "messages": "append",
    "priority": "nothing: the sequence was opened with its priority",
    "deadline_s": "nothing: a sequence has a lease",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs, an integer here",
    "echo": "score, or the sequence's state",
}


def check_generate_fields(body: Mapping[str, Any]) -> None:
    """
    Raises:
        ApiError: 400: a field is not one of `GENERATE_FIELDS`.
    """
    for name, value in body.items():
        if name not in GENERATE_FIELDS and (name not in _INSTEAD or value is not None):
            accepted = _INSTEAD.get(name, ", ".join(sorted(GENERATE_FIELDS)))
            raise invalid(name, f"{name!r:.60} is not a field of this request; accepted: {accepted}.",
                          "unknown_parameter")  # fmt: skip


def _one_of(**given: object) -> None:
    """
    Raises:
        ApiError: none of them is given, or more than one.
    """
    names = [name for name, value in given.items() if value is not None]
    both = " or ".join(given)
    if not names:
        first = next(iter(given))
        raise invalid(first, f"{first} is missing; accepted: {both}.", "missing_required_parameter")
    if len(names) > 1:
        raise invalid(names[1], f"{' and '.join(names)} are both given; accepted: {both}.")


def _only_with_text(special: bool | None, text: bool) -> None:
    if special is not None and not text:
        raise invalid("special", "special is given without a text; accepted: special together with a text.")
