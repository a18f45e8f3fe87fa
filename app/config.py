"""Every setting of the server in one typed object, and where its value comes from.

A flag beats an environment variable (`PONDER_PORT`), which beats the configuration file (TOML: `--config`,
`PONDER_CONFIG`, or `ponder.toml` in the working directory), which beats the default. Nothing below `app/` reads the
environment: the engine gets an `EngineConfig` made from this. Knows nothing of the command line's words.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin

from pydantic import ByteSize, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from app.efforts import BudgetFields, Thinking
from tools.mcp.config import McpSettings

if TYPE_CHECKING:
    from engine import EngineConfig

ENV_PREFIX = "PONDER_"
CONFIG_VARIABLE = "PONDER_CONFIG"
KEY_VARIABLE = "PONDER_API_KEY"  # of our clients on the command line
DEFAULT_FILE = "ponder.toml"
BUNDLED_MODEL = "models/pebble"
DEFAULT_NAME = "default"  # what clients may call the first of the models
AUTO_NAME = "auto"  # what they ask for where the server is to choose among several
LOCAL_USER = "local"  # whose everything is, where nobody has to say who they are

_NO_FILE: Mapping[str, Any] = MappingProxyType({})
_file_values: ContextVar[Mapping[str, Any]] = ContextVar("_file_values", default=_NO_FILE)


class BadSetting(Exception):
    """A setting cannot be used; the message says which, where it came from and what is accepted."""


class _FileSource(PydanticBaseSettingsSource):
    """The configuration file, read already, as the weakest of the sources."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:  # the base class's signature
        return _file_values.get().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(_file_values.get())


# Settings of several values, which are given one by one on the command line.
_FLAGS = {"cors_origins": "--cors-origin", "allowed_hosts": "--allowed-host", "models": "--also"}

CommaSeparated = Annotated[tuple[str, ...], NoDecode]


class Settings(BaseSettings):
    """What an operator may set. A field's description is what is accepted, as an error message says it."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", min_length=1, description="an address or host name to listen on")
    port: int = Field(8000, ge=0, le=65535, description="0 (any free port) to 65535")
    model: str = Field(BUNDLED_MODEL, min_length=1, description="a model directory, or a Hugging Face Hub name")
    served_model_name: str | None = Field(None, min_length=1, description="the name that clients ask for")
    models: dict[str, str] = Field(
        {},
        description="NAME=DIR or NAME=HUB-NAME, or a table of them: further models by the names that clients ask for",
    )
    router: CommaSeparated = Field(
        (), description="names of two or more served models, comma-separated, in the order they are asked"
    )
    router_gate: Literal["confidence", "entropy", "whole"] = Field(
        "confidence", description="confidence, entropy or whole"
    )
    router_bar: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="0 to 1 for confidence, 0 or more nats for entropy, none for whole"
    )
    tool_dialect: Literal["auto", "hermes", "llama3_json", "qwen3_coder", "mistral"] = Field(
        "auto", description="auto, hermes, llama3_json, qwen3_coder or mistral"
    )
    data_dir: Path | None = Field(None, description="a directory that Ponder may write to")
    plugins: Path | None = Field(None, description="a directory with tool plugins")
    databases: dict[str, Path] = Field({}, description="SQLite files that tools may read, by name")
    mcp: dict[str, McpSettings] = Field({}, description="MCP servers by name, each a table with command or url")
    searxng: str = Field("", description="the address of a SearXNG server, for searching the web")
    web: bool = Field(True, description="true or false: whether tools may fetch public pages")
    sandbox: bool = Field(True, description="true or false: whether a tool may run Python in a jail")
    tool_steps: int = Field(8, ge=1, le=100, description="turns of an answer that may call tools, 1 to 100")
    tool_seconds: float = Field(300.0, gt=0, le=86_400, description="seconds of an answer with tools, up to 86400")
    efforts: dict[Thinking, BudgetFields] = Field(
        {}, description="budgets of thinking by effort (minimal, low, medium, high, xhigh), each a table"
    )
    thinking_text: Literal["shown", "summarised", "hidden"] = Field(
        "shown", description="shown, summarised or hidden: what people see of the thinking"
    )
    summary_model: str | None = Field(
        None, min_length=1, description="the name of a served model that writes the summaries; the first, by default"
    )
    strategy_branches: int = Field(64, ge=1, le=4096, description="sequences side by side of a strategy, 1 to 4096")
    strategy_nodes: int = Field(2_000, ge=2, le=100_000, description="nodes of a strategy's search, 2 to 100000")
    strategy_seconds: float = Field(600.0, gt=0, le=86_400, description="seconds of an answer's strategy, up to 86400")
    sequences_per_user: int = Field(256, ge=1, description="open sequences of one user, 1 or more")
    sequence_tokens_per_user: int = Field(
        262_144, ge=1, description="tokens of a user's open sequences together, 1 or more"
    )
    sequence_lease_s: float = Field(600.0, gt=0, le=86_400, description="seconds of the longest lease, up to 86400")
    embedder: str = Field(
        "all-MiniLM-L6-v2", min_length=1, description="a sentence-transformers model, by name or directory"
    )
    max_upload: ByteSize = Field(
        ByteSize(200 << 20), ge=1, description="a size such as 200MiB, of all files of a request together"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto, float32, bfloat16 or float16"
    )
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    max_model_len: int | None = Field(None, ge=16, description="tokens of context, 16 or more")
    kv_bytes: ByteSize | None = Field(None, ge=1 << 16, description="a size of 64KiB or more, such as 512MiB or 2GiB")
    kv_blocks: int | None = Field(None, ge=2, description="a number of KV blocks, 2 or more")
    block_size: int = Field(16, ge=1, le=256, description="tokens in a KV block, 1 to 256")
    max_batch_tokens: int = Field(512, ge=1, description="tokens in a step, 1 or more")
    max_running: int = Field(64, ge=1, description="sequences in a batch, 1 or more")
    max_waiting: int = Field(1024, ge=1, description="sequences that may wait, 1 or more")
    policy: Literal["decode-first", "prefill-first", "fcfs", "shortest-first", "priority", "fair"] = Field(
        "decode-first", description="decode-first, prefill-first, fcfs, shortest-first, priority or fair"
    )
    itl_goal_s: float | None = Field(None, gt=0, description="seconds between two tokens, above 0")
    prefix_cache: bool = Field(True, description="true or false")
    threads: int | None = Field(None, ge=1, description="CPU threads, 1 or more")
    auth: Literal["off", "keys"] = Field(
        "off", description="off (whoever reaches the server may use it) or keys (who shows an API key)"
    )
    cors_origins: CommaSeparated = Field((), description="origins such as https://chat.example.org, comma-separated")
    allowed_hosts: CommaSeparated = Field((), description="host names such as chat.example.org, comma-separated")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="debug, info, warning or error"
    )

    @field_validator("models", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        pairs = [str(each).partition("=") for each in value]
        if bad := [name + sign + model for name, sign, model in pairs if not (name and model)]:
            raise ValueError(f"{bad[0]!r} is no pair")
        if twice := [name for at, (name, _, _) in enumerate(pairs) if name in {each[0] for each in pairs[:at]}]:
            raise ValueError(f"{twice[0]!r} is there twice")
        return {name: model for name, _, model in pairs}

    @field_validator("cors_origins", "allowed_hosts", "router", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return tuple(value) if isinstance(value, list) else value

    @field_validator("cors_origins")
    @classmethod
    def _is_origin(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [o for o in value if o != "*" and (not o.startswith(("http://", "https://")) or o.count("/") != 2)]:
            raise ValueError(f"{bad[0]!r} is not an origin")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _FileSource(settings_cls)

    @property
    def model_name(self) -> str:
        """The first model's name: the given one, or its directory's, or its whole name on the Hub."""
        if self.served_model_name:
            return self.served_model_name
        directory = Path(find_model(self.model)).expanduser()
        return directory.name if directory.is_dir() else self.model

    def check_models(self) -> None:
        """Whether the models have a name each, and the router's settings fit them. For who serves them.

        Raises:
            BadSetting: which do not go together, and what is accepted.
        """
        taken = {self.model_name: "the name of model", DEFAULT_NAME: "the first model", AUTO_NAME: "the router"}
        for name, model in self.models.items():
            if not (name and model):
                raise BadSetting(f"models has {name!r} = {model!r}; accepted: a name and a directory or Hub name.")
            if name in taken:
                raise BadSetting(f"models has {name!r}, which is {taken[name]}; accepted: another name.")
        if self.models and self.model_name == AUTO_NAME:
            raise BadSetting("model is called 'auto', which is the router; accepted: another served_model_name.")
        self._check_router()

    def _check_router(self) -> None:
        given = [name for name in ("router", "router_gate", "router_bar") if name in self.model_fields_set]
        if given and not self.models:
            raise BadSetting(
                f"{given[0]} is set, and one model alone is served; accepted: {given[0]} not set, or more models "
                "(--also NAME=DIR)."
            )
        served = (self.model_name, *self.models)
        if bad := [name for name in self.router if name not in served]:
            raise BadSetting(f"router has {bad[0]!r}, which is not served; accepted: {', '.join(served)}.")
        if self.router and len(set(self.router)) != max(2, len(self.router)):
            raise BadSetting(f"router is {', '.join(self.router)}; accepted: two or more models, each once.")
        if self.router_bar is not None:
            if self.router_gate == "whole":
                raise BadSetting("router_bar is set, and the gate 'whole' has none; accepted: router_bar not set.")
            if self.router_gate == "confidence" and self.router_bar > 1:
                raise BadSetting(f"router_bar is {self.router_bar:g}; accepted: a probability, 0 to 1.")

    @property
    def resolved_data_dir(self) -> Path:
        return (self.data_dir or default_data_dir()).expanduser()

    def engine_config(self, model: str | None = None) -> EngineConfig:
        """The engine's part of the settings, for the first model or another. Imports the engine, and so torch."""
        from engine import EngineConfig

        return EngineConfig(
            model=find_model(model or self.model),
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            kv_blocks=self.kv_blocks,
            kv_bytes=None if self.kv_bytes is None else int(self.kv_bytes),
            max_batch_tokens=self.max_batch_tokens,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            policy=self.policy,
            itl_goal_s=self.itl_goal_s,
            prefix_cache=self.prefix_cache,
            threads=self.threads,
            cache_dir=str(self.resolved_data_dir / "constraints"),
        )


def changed_settings(settings: Settings) -> dict[str, Any]:
    """The settings that are not as they come, as JSON. What may hold a secret is named without it."""
    told = settings.model_dump(mode="json")
    changed = {
        name: told[name] for name, field in Settings.model_fields.items() if getattr(settings, name) != field.default
    }
    if "mcp" in changed:
        changed["mcp"] = dict.fromkeys(settings.mcp, "…")
    if (searxng := changed.get("searxng")) and "@" in searxng:
        scheme, _, rest = searxng.rpartition("//")
        changed["searxng"] = f"{scheme}//…@{rest.rpartition('@')[2]}"
    return changed


def server_file(settings: Settings) -> Path:
    """Where a server that is ready says its address, for the command line."""
    return settings.resolved_data_dir / "server.url"


def default_data_dir() -> Path:
    """Where the platform keeps a user's application data."""
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "ponder"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "ponder"


def find_model(model: str) -> str:
    """`model` itself, except that the bundled model is also found beside the code when started from elsewhere."""
    if model == BUNDLED_MODEL and not Path(model).exists():
        beside_code = Path(__file__).resolve().parent.parent / BUNDLED_MODEL
        if beside_code.exists():
            return str(beside_code)
    return model


def unknown_variables() -> list[str]:
    """Environment variables with our prefix that mean nothing to us: likely misspelt."""
    known = {f"{ENV_PREFIX}{name}".upper() for name in Settings.model_fields} | {CONFIG_VARIABLE, KEY_VARIABLE}
    return sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)


def load_settings(config: Path | None = None, **flags: Any) -> Settings:
    """Settings from flags (those not None), environment, file and defaults, in that order.

    Raises:
        BadSetting: a value is not accepted, a key of the file is unknown, or the file cannot be read.
    """
    values, file = _read_file(config)
    token = _file_values.set(values)
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        raise BadSetting("\n".join(_explain(e, given, file) for e in error.errors())) from None
    except SettingsError:
        raise BadSetting(_not_json()) from None
    finally:
        _file_values.reset(token)


def _read_file(config: Path | None) -> tuple[dict[str, Any], Path | None]:
    named = config or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
    path = named or Path(DEFAULT_FILE)
    if named is None and not path.is_file():
        return {}, None
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSetting(f"The configuration file {path} cannot be read: {error.strerror or error}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting(f"The configuration file {path} is not valid TOML: {error}.") from None
    return {name.replace("-", "_"): value for name, value in values.items()}, path


def _not_json() -> str:
    """Which variable of a table cannot be read: pydantic-settings says it in words of its own."""
    for name, field in Settings.model_fields.items():
        variable = f"{ENV_PREFIX}{name}".upper()
        if get_origin(field.annotation) is dict and variable in os.environ:
            try:
                json.loads(os.environ[variable])
            except ValueError:
                return f"{variable} is not JSON; accepted: a JSON object, of {field.description}."
    return "A variable of the environment cannot be read."


def _explain(error: Any, given: Mapping[str, Any], file: Path | None) -> str:
    """One validation error as a sentence. `error` is pydantic's ErrorDetails."""
    name = str(error["loc"][0]) if error["loc"] else "?"
    # pydantic-settings names a field by its environment variable when that is where the value came from.
    field = name.lower().removeprefix(ENV_PREFIX.lower())
    if field not in Settings.model_fields:
        accepted = ", ".join(sorted(Settings.model_fields))
        return f"{file}: {name!r} is not a setting; accepted: {accepted}."
    if field in given:
        source = _FLAGS.get(field, f"--{field}".replace("_", "-"))
    elif any(n.upper() == f"{ENV_PREFIX}{field}".upper() for n in os.environ):
        source = f"{ENV_PREFIX}{field.upper()}"
    else:
        source = f"{field} in {file}"
    accepted = Settings.model_fields[field].description or "another value"
    if inside := error["loc"][1:]:  # of a table, which may hold tokens and so is never shown whole
        at = ".".join([source.removesuffix(f" in {file}"), *map(str, inside)])
        return f"{at}: {error['msg']}; accepted: {accepted}."
    return f"{source} is {error['input']!r}; accepted: {accepted}."
