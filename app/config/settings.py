"""The settings as one object, the configuration file that they are read from, and the paths that follow from them.

The configuration file is the weakest source: the command line and then environment variables come before it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import SecretStr, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from app.config.engine_settings import EngineSettings
from app.config.model_settings import ModelSettings
from app.config.names import CONFIG_VARIABLE, DEFAULT_FILE, ENV_PREFIX, BadSetting, setting
from app.config.sections import AccessSettings, AnswerSettings, LimitSettings, ObservingSettings

if TYPE_CHECKING:
    from engine import EngineConfig
    from engine.config import Fallback


_NO_FILE: Mapping[str, Any] = MappingProxyType({})
file_values: ContextVar[Mapping[str, Any]] = ContextVar("file_values", default=_NO_FILE)


class FileSource(PydanticBaseSettingsSource):
    """The configuration file, read already, as the weakest of the sources."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:  # the base class's signature
        return file_values.get().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(file_values.get())


def read_file(config: Path | None) -> tuple[dict[str, Any], Path | None]:
    """The values of the configuration file, and where it is; nothing, where none is named and none is there.

    Raises:
        BadSetting: it cannot be read.
    """
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


class Settings(
    EngineSettings, AnswerSettings, ObservingSettings, LimitSettings, AccessSettings, ModelSettings, BaseSettings
):
    """All settings of an operator, each declared once by `setting`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    data_dir: Path | None = setting(
        None,
        "the directory of chats and documents",
        accepts="a directory that Ponder may write to",
        unset="the user's data directory",
    )
    database: SecretStr | None = setting(
        None,
        "the address of a [PostgreSQL database](#postgresql) for chats, runs, users and documents",
        more="`postgresql://user@host/name`; a password is better in `PONDER_DATABASE`, or where libpq looks for it",
        accepts="the address of a PostgreSQL database, such as postgresql://ponder@localhost:5432/ponder",
        unset="SQLite files in the data directory",
    )
    redis: SecretStr | None = setting(
        None,
        "the address of a Redis server, by which [several servers](#servers-of-one-database) share `database`",
        more="`redis://host:6379/0`, `rediss://` with TLS, or `unix:///path?db=0`; a password is better in "
        "`PONDER_REDIS`",
        accepts="the address of a Redis server, such as redis://localhost:6379/0",
        unset="none: one server uses a database",
    )

    @field_validator("database")
    @classmethod
    def _is_of_postgresql(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            parts = urlsplit(value.get_secret_value())
            if parts.scheme not in ("postgresql", "postgres") or not parts.path.strip("/"):
                raise ValueError("no address of a PostgreSQL database")
        return value

    @field_validator("redis")
    @classmethod
    def _is_of_redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            parts = urlsplit(value.get_secret_value())
            there = parts.path.strip("/") if parts.scheme == "unix" else parts.hostname and parts.port != 0
            if parts.scheme not in ("redis", "rediss", "unix") or not there:
                raise ValueError("no address of a Redis server")
        return value

    @field_validator("cors_origins", "allowed_hosts", "router", "pinned_loras", "skills", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return tuple(value) if isinstance(value, list) else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, FileSource(settings_cls)

    def check_remotes(self) -> None:
        """
        Raises:
            BadSetting: there are remote models and several processes, which would not know each other's budgets; or the
                key of one, or of the audio server, is not there.
        """
        if self.allow_runtime_lora and self.api_workers > 1:
            raise BadSetting(
                f"api_workers is {self.api_workers}, and adapters that are loaded later are one process's; accepted: 1 "
                "with allow_runtime_lora."
            )
        for upstream in (*self.remote, *filter(None, (self.audio,))):
            upstream.key()
        if self.remote and self.api_workers > 1:
            raise BadSetting(
                f"api_workers is {self.api_workers}, and the budgets of remote models are one process's; accepted: 1 "
                "with remote models."
            )

    def check_servers(self) -> None:
        """
        Raises:
            BadSetting: there is Redis without a database that servers could share, or with something that only one
                server may count.
        """
        if self.redis is None:
            return
        if self.database is None:
            raise BadSetting(
                "redis is set and database is not: servers share PostgreSQL's database, and no SQLite files; accepted: "
                "both (`--database postgresql://…`), or neither."
            )
        if self.remote:
            raise BadSetting(
                "redis and remote are both set, and the budgets of remote models are one server's; accepted: one of "
                "them."
            )

    @property
    def redis_address(self) -> str | None:
        """The whole address, with the password; None: this is the only server of its database."""
        return None if self.redis is None else self.redis.get_secret_value()

    @property
    def database_address(self) -> str | None:
        """The whole address, with the password; None: SQLite files in the data directory."""
        return None if self.database is None else self.database.get_secret_value()

    @property
    def resolved_data_dir(self) -> Path:
        return (self.data_dir or default_data_dir()).expanduser()

    def engine_fallback(self) -> Fallback | None:
        """Returns the first model's fallback weights, None where there are none. Imports the engine, and so torch.

        Raises:
            BadSetting: they cannot be had with the other settings.
        """
        if self.fallback_model is not None and self.models:
            raise BadSetting(
                f"fallback_model and models are both set ({', '.join(self.models)}); accepted: one of them."
            )
        return self.fallback_of(self.engine_config())

    def engine_config(self, model: str | None = None) -> EngineConfig:
        """The engine's part of the settings, for the first model or another. Imports the engine, and so torch."""
        first = model in (None, self.model)
        draft_model = self.draft_model if first else None  # of another vocabulary, mostly
        config = self.config_of(model or self.model, self.resolved_data_dir, draft_model)
        adapters = tuple(self.lora.items()) if first else ()
        return replace(
            config,
            adapters=adapters,
            max_adapters=self.max_loras,
            max_host_adapters=self.max_cpu_loras,
            pinned_adapters=tuple(dict.fromkeys(self.pinned_loras)) if first else (),
            kv_events=self.kv_events.config() if first and self.kv_events is not None else None,
            kv_transfer=self.kv_transfer.config() if first and self.kv_transfer is not None else None,
        )


def changed_settings(settings: Settings) -> dict[str, Any]:
    """The settings that are not as they come, as JSON. What may hold a secret is named without it."""
    told = settings.model_dump(mode="json")
    changed = {
        name: told[name] for name, field in Settings.model_fields.items() if getattr(settings, name) != field.default
    }
    if "mcp" in changed:
        changed["mcp"] = dict.fromkeys(settings.mcp, "…")
    for name in ("database", "redis"):
        if name in changed:
            changed[name] = "…"
    if (searxng := changed.get("searxng")) and "@" in searxng:
        scheme, _, rest = searxng.rpartition("//")
        changed["searxng"] = f"{scheme}//…@{rest.rpartition('@')[2]}"
    return changed


def server_file(settings: Settings) -> Path:
    """Returns the file in which a ready server says its address, for the command line."""
    return settings.resolved_data_dir / "server.url"


def default_data_dir() -> Path:
    """Returns Ponder's folder where the platform keeps a user's application data."""
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "ponder"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "ponder"
