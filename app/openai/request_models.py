"""Request bodies of chat and completions.

A field's description names the accepted values; errors and docs quote it. Validation is strict ("5" is no number and 1
is no boolean), so a client's mistake is reported and not guessed around.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from app.admission.request_budget import DEADLINE, PRIORITY
from app.answering.checkers import CHECKER
from app.answering.reasoning_config import ReasoningRequest
from app.config.efforts import EFFORTS, THINKING, BudgetFields, Effort
from app.db.quotas import MAX_DEADLINE_S, MAX_PRIORITY
from app.errors import invalid
from app.openai.chat_messages import turns
from app.openai.kv_transfer import KVTransferField
from app.openai.speculation import PREDICTION, PredictionFields, SpeculationField
from engine.params import MAX_PATTERN_SIZE, MAX_REPETITIONS, MAX_TOP_K, RepetitionDetection, Sampling, Span

MAX_N = 128
MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20
MAX_PATTERN_LENGTH, MAX_GRAMMAR_LENGTH = 10_000, 100_000  # characters of an expression or a choice, and of a grammar
MAX_CHOICES = 4096

_Token = Annotated[int, Field(ge=0)]
_Choice = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_LENGTH)]


# The fields of sampling and scheduling, for every API of this server.
Temperature = Annotated[float | None, Field(ge=0, le=2, description="a number from 0 (greedy) to 2")]
TopP = Annotated[float | None, Field(gt=0, le=1, description="a number greater than 0, at most 1")]
TopK = Annotated[int | None, Field(ge=0, le=MAX_TOP_K, description=f"an integer: 0 (off), or 1 to {MAX_TOP_K}")]
MinP = Annotated[float | None, Field(ge=0, lt=1, description="a number from 0 (off) to less than 1")]
Penalty = Annotated[float, Field(ge=-2, le=2, description="a number from -2 to 2")]
OptionalPenalty = Annotated[float | None, Field(ge=-2, le=2, description="a number from -2 to 2")]
RepetitionPenalty = Annotated[
    float | None, Field(gt=0, le=100, description="a number greater than 0, at most 100; 1 is off")
]
Seed = Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1, description="a 64-bit signed integer")]
Priority = Annotated[int | None, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description=PRIORITY)]
DeadlineS = Annotated[float | None, Field(gt=0, le=MAX_DEADLINE_S, description=DEADLINE)]
Private = Annotated[bool, Field(description="true or false: whether it is kept from remote models")]
OutputTokens = Annotated[int | None, Field(ge=1, description="an integer of 1 or more")]


class RepetitionFields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    max_pattern_size: int = Field(ge=1, le=MAX_PATTERN_SIZE)
    min_pattern_size: int = Field(1, ge=1)
    min_count: int = Field(ge=2, le=MAX_REPETITIONS)

    @model_validator(mode="after")
    def _consistent(self) -> RepetitionFields:
        if self.min_pattern_size > self.max_pattern_size:
            name = "repetition_detection.min_pattern_size"
            accepted = f"1 to max_pattern_size ({self.max_pattern_size})"
            raise invalid(name, f"{name} is {self.min_pattern_size}; accepted: {accepted}.")
        return self


REPETITION = (
    f'{{"max_pattern_size": 1 to {MAX_PATTERN_SIZE} tokens, "min_pattern_size"?: 1 to max_pattern_size, '
    f'"min_count": 2 to {MAX_REPETITIONS}}}'
)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False  # hides lengths of chunks on OpenAI's network; without effect here


class SamplingRequest(BaseModel):
    """Fields that chat and plain completions share."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(description='the served model\'s name or "default"; GET /v1/models lists them')
    max_tokens: OutputTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K, description=f"an integer: 0 or -1 (off), or 1 to {MAX_TOP_K}")
    min_p: MinP = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = None
    repeat_penalty: RepetitionPenalty = None  # llama.cpp's and Ollama's name
    logit_bias: dict[str, float] = Field(
        default_factory=dict, max_length=1024,
        description='an object of at most 1024 token ids and biases, such as {"42": -100}; biases from -100 to 100',
    )  # fmt: skip
    seed: Seed = None
    priority: Priority = None
    deadline_s: DeadlineS = None
    n: int = Field(1, ge=1, le=MAX_N, description=f"an integer from 1 to {MAX_N}")
    stop: str | list[str] = Field(
        default_factory=list, max_length=1000,
        description=f"a non-empty string of at most 1000 characters, or a list of at most {MAX_STOPS} of them",
    )  # fmt: skip
    stop_token_ids: list[_Token] = Field(
        default_factory=list, max_length=64, description="a list of at most 64 token ids"
    )
    min_tokens: int = Field(0, ge=0, description="an integer of 0 or more, at most max_tokens")
    ignore_eos: bool = Field(False, description="true or false")
    repetition_detection: RepetitionFields | None = Field(None, description=REPETITION)
    speculation: SpeculationField = None
    kv_transfer_params: KVTransferField = None
    response_format: Any = Field(  # checked where its constraint is made (constraints.py)
        None, description='{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {…}}'
    )
    guided_json: Any = Field(None, description="a JSON Schema, as an object or as JSON text")
    guided_regex: str | None = Field(
        None, min_length=1, max_length=MAX_PATTERN_LENGTH,
        description=f"a regular expression of at most {MAX_PATTERN_LENGTH} characters, without look-around or "
        "references",
    )  # fmt: skip
    guided_choice: list[_Choice] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES, description=f"a list of 1 to {MAX_CHOICES} non-empty strings"
    )
    guided_grammar: str | None = Field(
        None, min_length=1, max_length=MAX_GRAMMAR_LENGTH,
        description=f"a grammar in Lark's notation, of at most {MAX_GRAMMAR_LENGTH} characters",
    )  # fmt: skip
    structured_outputs: Any = Field(  # checked where its constraint is made (text_constraints.py)
        None, description='an object with one of "json", "regex", "choice", "grammar" or "json_object": true'
    )
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions | None = Field(
        None, description='an object such as {"include_usage": true}, and only with stream'
    )

    @field_validator("stop", mode="before")
    @classmethod
    def _few_stops(cls, value: Any) -> Any:  # any JSON
        if isinstance(value, list) and len(value) > MAX_STOPS:
            raise ValueError("stop")
        return value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str]) -> list[str]:
        stops = [value] if isinstance(value, str) else value
        if len(stops) > MAX_STOPS or not all(0 < len(s) <= 1000 for s in stops):
            raise ValueError("stop")
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: dict[str, float]) -> dict[str, float]:
        for token, bias in value.items():
            if not (token.isascii() and token.isdigit() and len(token) < 10) or not -100 <= bias <= 100:
                raise ValueError("logit_bias")
        return value

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options is only accepted together with stream: true.")
        return self

    @model_validator(mode="after")
    def _one_penalty(self) -> SamplingRequest:
        if len({self.repetition_penalty, self.repeat_penalty} - {None}) > 1:
            raise invalid("repeat_penalty", "repeat_penalty and repetition_penalty differ; accepted: one of them.")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    def sampling(self, defaults: Sampling) -> Sampling:
        """Returns the sampling that was asked for; the model's own defaults where nothing was."""

        def choose(value: float | None, default: float) -> float:
            return default if value is None else value

        return Sampling(
            temperature=choose(self.temperature, defaults.temperature),
            top_k=max(0, int(choose(self.top_k, defaults.top_k))),
            top_p=choose(self.top_p, defaults.top_p),
            min_p=choose(self.min_p, defaults.min_p),
            repetition_penalty=choose(
                self.repetition_penalty, choose(self.repeat_penalty, defaults.repetition_penalty)
            ),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            seed=self.seed,
        )

    def span(self, defaults: Sampling, *, remaining: int, vocab_size: int, default_limit: int | None) -> Span:
        """The engine's parameters. `remaining` is the context left after the prompt.

        Raises:
            ApiError: a token id is not in the vocabulary, or `min_tokens` does not fit.
        """
        for field, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", map(int, self.logit_bias))):
            if (worst := max(ids, default=0)) >= vocab_size:
                raise invalid(field, f"{field} names token {worst}; accepted: token ids from 0 to {vocab_size - 1}.")
        limit = self.token_limit or min(default_limit or remaining, remaining)
        if self.min_tokens > limit:
            raise invalid("min_tokens", f"min_tokens is {self.min_tokens}; accepted: 0 to max_tokens ({limit}).")
        return Span(
            sampling=self.sampling(defaults),
            max_tokens=limit,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            repetition_detection=None
            if self.repetition_detection is None
            else RepetitionDetection(**dict(self.repetition_detection)),
            speculation=None if self.speculation is None else self.speculation.speculation,
        )


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class MessageImage(BaseModel):
    """An image of a message, `at` characters into its text. `where` is its place in the request."""

    at: int
    url: str
    detail: Literal["auto", "low", "high"]
    where: str


class ChatMessage(BaseModel):
    """One turn. `content` is joined text once checked."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: str
    content: str
    images: SkipJsonSchema[list[MessageImage] | None] = None  # of the content's parts, once checked
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None  # as templates take them: arguments are objects
    tool_call_id: str | None = None


class ReasoningFields(BaseModel):
    """`reasoning` of a chat request, as OpenRouter has it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    effort: Effort | None = None
    max_tokens: int | None = Field(None, ge=2)
    enabled: bool | None = None
    exclude: Literal[False] | None = None


REASONING = f'{{"effort"?: {EFFORTS}, "max_tokens"?: 2 or more, "enabled"?: true or false, "exclude"?: false}}'
VERBOSITY = {"low": "Answer briefly.", "high": "Answer in detail."}  # instructions; "medium" is no instruction


class ChatRequest(SamplingRequest):
    messages: list[ChatMessage] = Field(
        min_length=1, max_length=10_000,
        description="a non-empty list of {role: system, developer, user, assistant or tool, content: text}",
    )  # fmt: skip
    tools: list[Any] | None = Field(  # checked by engine.tool_parsers
        None, description='a list of {"type": "function", "function": {"name", "description", "parameters", "strict"}}'
    )
    tool_choice: Any = Field(
        None, description='"auto", "none", "required" or {"type": "function", "function": {"name": "…"}}'
    )
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    max_completion_tokens: int | None = Field(None, ge=1, description="an integer of 1 or more")
    logprobs: bool = Field(False, description="true or false")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description=f"an integer from 0 to {MAX_TOP_LOGPROBS}, with logprobs: true"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description='an object of template variables, such as {"enable_thinking": false}'
    )
    reasoning_effort: Effort | None = Field(None, description=EFFORTS)
    reasoning: ReasoningFields | None = Field(None, description=REASONING)
    thinking: BudgetFields | None = Field(None, description=THINKING)
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description='"low", "medium" or "high"')
    strategy: str | None = Field(None, description="the name of a strategy, such as best_of_n; GET /api/strategies")
    strategy_options: dict[str, Any] | None = Field(None, description="an object of the strategy's options")
    checker: dict[str, Any] | None = Field(None, description=CHECKER)
    prediction: PredictionFields | None = Field(None, description=PREDICTION)
    context_shift: bool = Field(False, description="true or false")
    private: Private = False
    _described: frozenset[str] = PrivateAttr(frozenset())

    def described_in_messages(self, names: Iterable[str]) -> Self:
        """Returns the request with these tools left out of the prompt's list, as a message describes them: a tool that
        is loaded late then changes nothing before it, and the cache keeps the prompt."""
        self._described = frozenset(names)
        return self

    def listed(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Returns those of `tools` that the prompt lists."""
        return [tool for tool in tools if tool["function"]["name"] not in self._described]

    @field_validator("messages", mode="before")
    @classmethod
    def _messages(cls, value: Any) -> Any:  # any JSON: this is where it gets its type
        return turns(value) if isinstance(value, list) else value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := _RESERVED_VARIABLES & value.keys():
            name = sorted(taken)[0]
            raise invalid(
                "chat_template_kwargs", f"chat_template_kwargs may not set {name}: the server sets it itself."
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs is only accepted together with logprobs: true.")
        efforts = {self.reasoning_effort, None if self.reasoning is None else self.reasoning.effort} - {None}
        if len(efforts) > 1:
            raise invalid("reasoning", "reasoning.effort and reasoning_effort differ; accepted: one of them.")
        if self.reasoning is not None:
            self._check_reasoning(self.reasoning)
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; accepted: one of them.")
        return self

    def _check_reasoning(self, given: ReasoningFields) -> None:
        """Refuses what `reasoning` says beside a field that says otherwise. Raises ApiError."""
        if given.max_tokens is not None and self.thinking is not None:
            raise invalid("reasoning.max_tokens", "reasoning.max_tokens and thinking are both given; accepted: one.")
        thinks = self.chat_template_kwargs.get("enable_thinking")
        if isinstance(thinks, bool) and given.enabled is not None and thinks != given.enabled:
            raise invalid(
                "reasoning.enabled", "reasoning.enabled and chat_template_kwargs.enable_thinking differ; accepted: "
                "one of them.",
            )  # fmt: skip
        efforts = {given.effort, self.reasoning_effort} - {None, "none"}
        if given.enabled is False and (efforts or given.max_tokens is not None):
            raise invalid(
                "reasoning.enabled", "reasoning.enabled is false beside an effort or reasoning.max_tokens; accepted: "
                "true, or false without them.",
            )  # fmt: skip

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def engine_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def asked(self) -> ReasoningRequest:
        """Reasoning that the request asks for."""
        thinks = self.chat_template_kwargs.get("enable_thinking")
        effort, thinking, enabled = self.reasoning_effort, self.thinking, thinks if isinstance(thinks, bool) else None
        if (given := self.reasoning) is not None:
            effort = effort or given.effort or ("none" if given.enabled is False else None)
            thinking = thinking or (None if given.max_tokens is None else BudgetFields(max_tokens=given.max_tokens))
            enabled = enabled or (True if given.enabled else None)
        return ReasoningRequest(effort, thinking, self.strategy, self.strategy_options, enabled, self.checker)

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as a chat template takes them. Verbosity is an instruction after those that begin them."""
        made = [message.model_dump(exclude_none=True) for message in self.messages]
        if (instruction := VERBOSITY.get(self.verbosity or "medium")) is not None:
            first = next((at for at, message in enumerate(made) if message["role"] != "system"), len(made))
            made.insert(first, {"role": "system", "content": instruction})
        return made


class CompletionRequest(SamplingRequest):
    prompt: str | list[str] | list[_Token] | list[list[_Token]] = Field(
        description="a string, a list of strings, a list of token ids, or a list of such lists; none of them empty"
    )
    max_tokens: int | None = Field(None, ge=0, description="an integer of 1 or more; 0 only with echo: true")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description=f"an integer from 0 to {MAX_TOP_LOGPROBS}"
    )
    echo: bool = Field(False, description="true or false")
    best_of: int | None = Field(None, description="the value of n; there is no ranking of candidates")

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _texts_or_ids(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:  # any JSON
        """By hand: half a million token ids are tried as each of the kinds otherwise, and each found wrong."""
        if not isinstance(value, list):
            return handler(value)
        if _all(value, str) or are_ids(value) or (_all(value, list) and all(map(are_ids, value))):
            return value
        raise ValueError("prompt")

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "max_tokens is 0; accepted: an integer of 1 or more (0 only with echo: true).")
        if self.best_of is not None and self.best_of != self.n:
            raise invalid(
                "best_of", f"best_of is {self.best_of}; accepted: the value of n ({self.n}), as nothing is ranked.",
                "unsupported_parameter",
            )  # fmt: skip
        if len(self.prompts) * self.n > MAX_N:
            raise invalid("prompt", f"{len(self.prompts)} prompts times n={self.n}; accepted: at most {MAX_N} answers.")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]


def _all(values: list[Any], kind: type) -> bool:
    return all(type(each) is kind for each in values)


def are_ids(values: list[Any]) -> bool:
    """Checks token ids in one pass; a validator would list half a million errors."""
    return _all(values, int) and min(values, default=0) >= 0


_RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "self"})
