"""A remote model beside the served ones: its name, its plan of a request, and the rule of what may be sent to it.

A request that is private never leaves, and neither do passages of documents and results of the server's tools, unless
the operator lists them for this remote. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from app.admission.request_budget import output_limit
from app.answering.request_images import RequestImages
from app.config.remote_settings import RemoteSettings
from app.errors import ApiError, invalid
from app.remote.spending import Spending
from app.remote.wire_formats import RemotePrompt, wire_format
from engine.tool_parsers import ToolSpec
from reasoning.strategy import Event

if TYPE_CHECKING:
    from app.remote.http_client import RemoteClient

Collections = Literal["own", "all"] | Sequence[int] | None

_SAMPLING: Mapping[str, tuple[str, ...]] = {
    "openai": ("temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty", "reasoning_effort"),
    "anthropic": ("temperature", "top_p", "top_k", "stop"),
}
_OURS = (
    "model", "messages", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options", "private",
    "deadline_s", "tools", "tool_choice", "parallel_tool_calls", "response_format", "verbosity",
)  # fmt: skip


class RemoteModel:
    """A model of another server, with its settings, its key and what it has used."""

    def __init__(self, settings: RemoteSettings) -> None:
        """
        Raises:
            BadSetting: its key is not in the environment.
        """
        self.settings = settings
        self.name = settings.name
        self.created = int(time.time())
        self.spending = Spending(settings)
        self.images = RequestImages()  # until a registry of models shares its own
        self._key = settings.key()
        self._client: RemoteClient | None = None

    @property
    def client(self) -> RemoteClient:
        from app.remote.http_client import RemoteClient  # httpx comes with it: not before a remote is asked

        if self._client is None:
            self._client = RemoteClient(self.settings, wire_format(self.settings), self._key)
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def check_fields(self, given: Iterable[str]) -> None:
        """
        Raises:
            ApiError: 400: a field of a chat request is given that means nothing to this remote.
        """
        known = (*_OURS, *_SAMPLING[self.settings.api])
        if (unknown := next((name for name in given if name not in known), None)) is not None:
            raise invalid(
                unknown, f"{unknown} is given, which the remote model {self.name!r} does not take; accepted: "
                f"{', '.join(known)}.", "unsupported_parameter",
            )  # fmt: skip

    def sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of sampling among those given, as they are sent.

        Raises:
            ApiError: 400: a value is not as the remote's API takes it.
        """
        made = {name: given[name] for name in _SAMPLING[self.settings.api] if given.get(name) not in (None, [])}
        if self.settings.api == "anthropic":
            if made.get("top_k", 1) < 1:  # off, as it is without it
                del made["top_k"]
            if (temperature := made.get("temperature", 0)) > 1:
                raise invalid(
                    "temperature", f"temperature is {temperature:g}; accepted: 0 to 1 with the remote model "
                    f"{self.name!r}, which has Anthropic's API.",
                )  # fmt: skip
        return made

    async def with_images(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages with their images as they are sent: see `RequestImages.as_sent`.

        Raises:
            ApiError: 400, naming the image: this remote sees none, there are too many, or one cannot be had or read.
        """
        for image in self.images.checked(messages, self.name, sees=self.settings.sees):
            if image["detail"] == "low" and self.settings.api == "anthropic":
                raise invalid(
                    f"{image['where']}.detail", f"{image['where']}.detail is 'low'; accepted: auto, high with the "
                    f"remote model {self.name!r}, which has Anthropic's API.", "unsupported_parameter",
                )  # fmt: skip
        return await self.images.as_sent(messages)

    def limit(self, asked: int | None) -> int:
        """Returns the tokens that an answer may have.

        Raises:
            ApiError: 400: more are asked for than the remote's setting, the key or the server allows.
        """
        most = self.settings.max_tokens
        if asked is not None and asked > most:
            message = f"max_tokens is {asked}; accepted: at most {most} with the remote model {self.name!r}."
            raise invalid("max_tokens", message)
        allowed = output_limit(asked)
        return asked or (most if allowed is None else min(most, allowed))

    def check_leaving(
        self, *, private: bool, collections: Collections = None, grounded: bool = False, tools: Collection[str] = ()
    ) -> None:
        """
        Args:
            collections: those that passages of this request come from.
            grounded: the conversation has files, or earlier answers of it are made from documents of any collection, or
                may be.
            tools: the server's tools with results in the request, now or later.

        Raises:
            ApiError: 403: something of it may not be sent to this remote.
        """
        if private:
            what = f"this is private, and {self.name!r} is on another server"
            raise _stays("model", "private_stays_local", what, "a model of this server")
        instead, allowed = "those, or a model of this server", self.settings.collections
        named: Sequence[int | None] = [None] if isinstance(collections, str) else collections or ()
        fits = set(named) <= set(allowed)
        if allowed != "all" and (grounded or not fits):
            may = ", ".join(map(str, allowed)) or "none"
            what = (
                "the chat has files, or earlier answers quote documents, or may"
                if fits
                else f"collections is {collections!r:.60}"
            )
            what += f", and documents of these collections may be sent to the remote model {self.name!r}: {may}"
            raise _stays("collections", "documents_stay_local", what, instead)
        if self.settings.tools != "all" and (kept := sorted(set(tools) - set(self.settings.tools))):
            may = ", ".join(self.settings.tools) or "none"
            what = f"results of the tool {kept[0]!r:.70} would be sent to the remote model {self.name!r}, and those of "
            raise _stays("tools", "results_stay_local", f"{what}these tools may be: {may}", instead)


def _stays(param: str, code: str, what: str, accepted: str) -> ApiError:
    return ApiError(403, f"{what}; accepted: {accepted}.", param=param, code=code, kind="permission_error")


@dataclass(frozen=True, slots=True)
class RemoteSampling:
    """The sampling that is sent; None: the remote's own default."""

    temperature: float | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True)
class RemotePlan:
    """A checked request, ready to be sent. `tools` are those that may be called; `check` is the JSON schema, as text,
    that the whole answer is validated against; `passages` of documents are in the prompt.
    """

    served: RemoteModel
    prompt: RemotePrompt
    tools: tuple[ToolSpec, ...] = ()
    check: str | None = None
    passages: int = 0
    warnings: tuple[str, ...] = ()
    answer_tokens: ClassVar[None] = None  # nothing bounds the answer without its thinking

    @property
    def limit(self) -> int:
        """Tokens that an answer may have, thinking included."""
        return self.prompt.max_tokens

    @property
    def may_call(self) -> bool:
        return bool(self.tools)

    @property
    def sampling(self) -> RemoteSampling:
        given = self.prompt.sampling
        return RemoteSampling(given.get("temperature"), given.get("top_p"))

    def limited(self, max_tokens: int) -> RemotePlan:
        return replace(self, prompt=replace(self.prompt, max_tokens=min(max_tokens, self.limit)))


@dataclass(frozen=True, slots=True)
class SentToRemote(Event):
    """A report of what left this server, to which remote model, and why. `sending`: it leaves now.

    `messages`, `characters`, `images` and `tool_results` are of the newest request; `cost` is of all. `error`: it
    failed.
    """

    model: str
    why: str
    messages: int = 0
    characters: int = 0
    images: int = 0
    passages: int = 0
    tool_results: int = 0
    requests: int = 0
    cost: float = 0.0
    error: str | None = None
    sending: bool = False

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["sending"]
        return {"sent": True, **fields}
