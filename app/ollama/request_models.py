"""Bodies of Ollama's API, checked, and as chat requests: each field works, has no effect on any answer, or is refused.

Names may carry Ollama's tag `:latest`. `options` are those that the sampler has; those of llama.cpp's loading
(`num_ctx`, `num_thread`, …) have no effect, as the model is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from app.config import DEFAULT_NAME
from app.errors import ApiError, invalid
from app.openai.chat_messages import PLACE
from app.openai.request_models import ChatRequest
from app.request_body import Refusal, parse

Json = dict[str, Any]

TAG = ":latest"
NO_EFFECT = frozenset({"keep_alive"})
EMBED_NO_EFFECT = NO_EFFECT | {"options"}
SHOW_NO_EFFECT = frozenset({"verbose"})
EMBED_REFUSED: Mapping[str, Refusal] = {
    "truncate": Refusal("true: a longer text becomes the mean of its windows", lambda v: v is True),
}
CHAT_REFUSED: Mapping[str, Refusal] = {"logprobs": Refusal("false", lambda v: v is False)}
GENERATE_REFUSED: Mapping[str, Refusal] = {
    **CHAT_REFUSED,
    "suffix": Refusal("no suffix: this model continues a text, it does not fill gaps", lambda v: v == ""),
    "template": Refusal("the model's own template", lambda v: v == ""),
    "context": Refusal("messages in /api/chat", lambda v: v == []),
    "raw": Refusal("false; /v1/completions continues a text as it is", lambda v: v is False),
}
# Ollama's name of an option -> the field of a chat request
_OPTIONS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed", "stop": "stop",
    "num_predict": "max_tokens", "repeat_penalty": "repeat_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "speculation": "speculation",
}  # fmt: skip
_LOADING = frozenset(
    (
        "num_ctx",
        "num_batch",
        "num_gpu",
        "main_gpu",
        "use_mmap",
        "use_mlock",
        "num_thread",
        "num_keep",
        "numa",
        "low_vram",
    )
)
# samplers that we lack, where they are off, and the penalty's reach, which is the whole context here
_NEUTRAL = {"tfs_z": 1, "typical_p": 1, "mirostat": 0, "repeat_last_n": -1, "penalize_newline": True}
_OF_MIROSTAT = frozenset(("mirostat_tau", "mirostat_eta"))  # they do nothing while it is off
_EFFORTS = ("low", "medium", "high")


class ModelRequest(BaseModel):
    """The name of a model, which some clients send as `name`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(DEFAULT_NAME, description="a served model's name, with or without `:latest`")
    name: str | None = Field(None, description="an older name of model")

    @property
    def served_name(self) -> str:
        return (self.name if self.name is not None else self.model).removesuffix(TAG)


class _Generating(ModelRequest):
    stream: bool = Field(True, description="true or false")
    format: str | Json | None = Field(None, description='"json", or a JSON Schema as an object')
    options: Json = Field(default_factory=dict, description=f"an object of {', '.join(sorted(_OPTIONS))}")
    think: bool | Literal["low", "medium", "high"] | None = Field(
        None, description='true, false, "low", "medium", "high"'
    )

    @field_validator("format")
    @classmethod
    def _form(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in ("", "json"):
            raise invalid("format", f'format is {value!r:.60}; accepted: "json", or a JSON Schema as an object.')
        return value

    def chat_fields(self, thinks: bool) -> Json:
        """The fields of a chat request, its messages excepted, for a model that thinks or does not.

        Raises:
            ApiError: 400, naming the option.
        """
        fields: Json = {"model": self.served_name, "stream": False}
        for option, value in self.options.items():
            if option in _OPTIONS and value is not None:
                fields[_OPTIONS[option]] = value
            elif option not in _OPTIONS and not _neutral(option, value):
                where = f"options.{option:.60}"
                accepted = ", ".join(sorted(_OPTIONS))
                raise invalid(where, f"{where} is {value!r:.60}, which is no option here; accepted: {accepted}.")
        if isinstance(fields.get("max_tokens"), int) and fields["max_tokens"] < 0:  # -1, -2: without an end
            del fields["max_tokens"]
        if fields.get("seed") == 0:  # Ollama's default: any
            del fields["seed"]
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            form = {"name": "format", "schema": self.format, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
        if thinks and self.think is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.think is not False}
            if isinstance(self.think, str):
                fields["reasoning_effort"] = self.think
        elif self.think in (True, *_EFFORTS):
            raise invalid("think", f"{self.served_name} does not think; accepted: false.")
        return fields


def reworded(error: ApiError, *, generates: bool) -> ApiError:
    """Returns a chat request's refusal in the words of this API, of `/api/generate` if it `generates`."""

    def reword(text: str) -> str:
        for theirs, ours in (*_WORDS, *(_PROMPT if generates else ())):
            text = re.sub(theirs, ours, text)
        return _AT_FAULT.sub(lambda found: f"options.{_OPTION_OF[found[0]]}", text)

    return error.reworded(reword)


_OPTION_OF = {field: option for option, field in _OPTIONS.items()}
_AT_FAULT = re.compile(rf"^({'|'.join(_OPTION_OF)})\b")  # elsewhere a word such as "stop" is no field
_WORDS = (
    (r'(?<![.\w"])max_tokens\b', "options.num_predict"),
    (r"\bresponse_format(\.json_schema)?(\.schema)?\b", "format"),
    (r"\breasoning_effort\b", "think"),
    (r', or "strict": false', ""),
)
_PROMPT = ((r"^messages(\[\d+\])?(\.content)?", "prompt"),)


def _neutral(option: str, value: Any) -> bool:
    known = option in _LOADING | _OF_MIROSTAT
    return value is None or known or (option in _NEUTRAL and value == _NEUTRAL[option])


class OllamaChatRequest(_Generating):
    messages: list[Any] = Field(  # checked by `ChatRequest`
        default_factory=list,
        max_length=10_000,
        description="a list of {role: system, user, assistant or tool, content}",
    )
    tools: list[Any] | None = Field(None, description='a list of {"type": "function", "function": {…}}')

    def chat(self, thinks: bool) -> ChatRequest:
        """Raises ApiError: 400, naming the field."""
        body = {**self.chat_fields(thinks), "messages": _messages(self.messages), "tools": self.tools or None}
        return parse(body, ChatRequest)


class OllamaGenerateRequest(_Generating):
    prompt: str = Field("", description="a text")
    system: str | None = Field(None, description="a text")
    images: list[str] | None = Field(None, description="a list of images, each a file in base64")

    def chat(self, thinks: bool) -> ChatRequest:
        """Raises ApiError: 400, naming the field."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": _with_images(self.prompt, self.images, "images")}]
        return parse({**self.chat_fields(thinks), "messages": messages}, ChatRequest)


class EmbedRequest(ModelRequest):
    """The body of `/api/embed`."""

    input: Any = Field(description="a non-empty string, or a list of them")  # checked by `EmbeddingRequest`
    dimensions: int | None = Field(None, ge=1, description="an integer from 1 to the length of the model's vectors")


class EmbedPromptRequest(ModelRequest):
    """The body of the older `/api/embeddings`."""

    prompt: str = Field(min_length=1, description="a non-empty string")


def _messages(items: Sequence[Any]) -> list[Any]:
    """Ollama's messages as a chat's: its calls have no ids, their arguments are objects, results name their tool."""
    made, waiting = list[Any](), list[tuple[str, str]]()  # ids and names of calls without a result
    for at, item in enumerate(items):
        if not isinstance(item, dict):
            made.append(item)  # refused by name, where all are checked
            continue
        message = {name: value for name, value in item.items() if name not in ("images", "thinking", "tool_name")}
        if item.get("images"):
            message["content"] = _with_images(item.get("content"), item["images"], f"messages[{at}].images")
        if item.get("thinking"):
            message["reasoning_content"] = item["thinking"]
        if isinstance(item.get("tool_calls"), list):
            message["tool_calls"] = [
                _call(call, f"call_{at}_{number}") for number, call in enumerate(item["tool_calls"])
            ]
            waiting = [
                (call["id"], str(call["function"].get("name")))
                for call in message["tool_calls"]
                if isinstance(call, dict) and isinstance(call.get("function"), dict)
            ]
        elif item.get("role") == "tool" and "tool_call_id" not in message:
            name = item.get("tool_name")
            id = next((id for id, called in waiting if name in (None, called)), None)
            if id is not None:
                message["tool_call_id"] = id
                waiting = [each for each in waiting if each[0] != id]
            if name is not None:
                message["name"] = name
        made.append(message)
    return made


def _with_images(text: Any, images: Any, where: str) -> Any:
    """Returns a message's content with its images before its text, as Ollama puts them. Any: a client's JSON."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise invalid(where, f"{where} is {images!r:.60}; accepted: a list of images, each a file in base64.")
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{each}"}, PLACE: f"{where}[{at}]"}
        for at, each in enumerate(images)
    ]
    return [*parts, {"type": "text", "text": text}] if isinstance(text, str) else parts


def _call(call: Any, id: str) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = {name: value for name, value in call["function"].items() if name != "index"}
    if isinstance(function.get("arguments"), dict):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": call.get("id") or id, "type": "function", "function": function}
