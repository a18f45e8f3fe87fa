"""Settings of other servers: remote models, which answer under a name of ours, and the server of speech.

One `[[remote]]` table of ponder.toml is one `RemoteSettings`, and `[audio]` is `AudioSettings`. A key never stands in
the file: `key_env` names the environment variable that has it. Knows nothing of how they are asked.
"""

from __future__ import annotations

import ipaddress
import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from app.config.names import BadSetting

RemoteApi = Literal["openai", "anthropic"]
Seconds = Annotated[float, Field(gt=0, le=3600)]
Money = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MIN_KEY_LENGTH = 8  # a shorter text is no secret, and would be redacted wherever it stands
KEY_ENV: Any = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")  # Any: as `setting` returns it
_KEYS = ("key", "api_key", "apikey", "token", "secret", "password", "headers")


class Upstream(BaseModel):
    """Another server: the rules of its address, and of the variable with its key. Each kind declares the fields, in its
    own order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    if TYPE_CHECKING:
        url: str
        key_env: str | None

    @property
    @abstractmethod
    def title(self) -> str:
        """Returns its name in messages."""

    @model_validator(mode="before")
    @classmethod
    def _no_key(cls, value: Any) -> Any:  # Any: TOML
        if isinstance(value, Mapping) and (named := [each for each in _KEYS if each in value]):
            raise ValueError(
                f"{named[0]} is set: a key in this file would be in its copies and backups; put it into an environment "
                "variable, and name that in key_env"
            )
        return value

    @field_validator("url", check_fields=False)
    @classmethod
    def _is_address(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ValueError("url is no address such as https://host/v1") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not url.isascii():
            raise ValueError("url is no address such as https://host/v1")
        if "@" in parts.netloc:
            raise ValueError("url has a user or a password in it; name the key's environment variable in key_env")
        if parts.query or parts.fragment:
            raise ValueError("url has a query or a fragment; give the address alone, such as https://host/v1")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.key_env is not None and self.url.startswith("http:") and not _is_loopback(self.url):
            raise ValueError("url begins with http:, which would send the key in the clear; use https, or no key_env")
        return self

    def key(self) -> str | None:
        """Returns the server's key from the environment; None where it wants none.

        Raises:
            BadSetting: the variable is not set, or has no key in it. The message does not show it.
        """
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env, "").strip()
        if not (len(key) >= MIN_KEY_LENGTH and key.isascii() and key.isprintable() and " " not in key):
            what = "is not set" if not key else "has no key in it"
            raise BadSetting(
                f"{self.title} takes its key from {self.key_env}, which {what}; accepted: at least {MIN_KEY_LENGTH} "
                "printable ASCII characters without a space, or no key_env."
            )
        return key


class RemoteSettings(Upstream):
    """One remote model. Prices are per million tokens, in any currency; the budgets of money are in the same one.

    `collections` and `tools` list the collections of documents and the server's tools with contents or results that
    may be sent to it; `auto` makes it the last step of the router. With `sees` it reads images.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}$")
    url: str
    api: RemoteApi = "openai"
    model: str = Field(min_length=1, max_length=200)
    key_env: str | None = KEY_ENV
    max_tokens: int = Field(4096, ge=1)
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    connect_s: Seconds = 10.0
    first_token_s: Seconds = 120.0
    next_token_s: Seconds = 60.0
    retries: int = Field(2, ge=0, le=5)
    price_in: Money | None = None
    price_out: Money | None = None
    tokens_per_day: int | None = Field(None, ge=1)
    tokens_per_month: int | None = Field(None, ge=1)
    cost_per_day: Money | None = None
    cost_per_month: Money | None = None
    sees: bool = False
    auto: bool = False
    collections: Literal["all"] | tuple[int, ...] = ()
    tools: Literal["all"] | tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"The remote {self.name!r}"

    @model_validator(mode="after")
    def _affordable(self) -> Self:
        budgets = self.cost_per_day is not None or self.cost_per_month is not None
        if budgets and (self.price_in is None or self.price_out is None):
            raise ValueError("a budget of money needs price_in and price_out, per million tokens")
        if self.api == "anthropic" and self.max_tokens_field != "max_tokens":
            raise ValueError("max_tokens_field has no effect with Anthropic's API; leave it out")
        return self

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Returns the price of an answer, in the currency of the prices; 0 where there are none."""
        return ((self.price_in or 0) * prompt_tokens + (self.price_out or 0) * completion_tokens) / 1e6


class AudioSettings(Upstream):
    """A server with OpenAI's API of speech. `max_audio` bounds a recording; the seconds, each wait for bytes of it.

    The models and the voice are those that the page asks for; clients name their own.
    """

    url: str
    key_env: str | None = KEY_ENV
    connect_s: Seconds = 10.0
    first_byte_s: Seconds = 120.0
    next_byte_s: Seconds = 60.0
    max_audio: ByteSize = Field(ByteSize(25 << 20), ge=1)
    transcription_model: str = Field("whisper-1", min_length=1, max_length=200)
    speech_model: str = Field("tts-1", min_length=1, max_length=200)
    voice: str = Field("alloy", min_length=1, max_length=200)

    @property
    def title(self) -> str:
        return "The audio server"


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
