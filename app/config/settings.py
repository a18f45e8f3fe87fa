"""All settings as one object, and the places that follow from them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from app.config.access import AccessSettings
from app.config.answering import AnswerSettings
from app.config.engine import EngineSettings
from app.config.file import FileSource
from app.config.limits import LimitSettings
from app.config.models import ModelSettings
from app.config.names import ENV_PREFIX
from app.config.observing import ObservingSettings

if TYPE_CHECKING:
    from engine import EngineConfig


class Settings(
    EngineSettings, AnswerSettings, ObservingSettings, LimitSettings, AccessSettings, ModelSettings, BaseSettings
):
    """All settings of an operator. A field's description is what is accepted, as an error message says it."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    data_dir: Path | None = Field(None, description="a directory that Ponder may write to")

    @field_validator("cors_origins", "allowed_hosts", "router", mode="before")
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

    @property
    def resolved_data_dir(self) -> Path:
        return (self.data_dir or default_data_dir()).expanduser()

    def engine_config(self, model: str | None = None) -> EngineConfig:
        """The engine's part of the settings, for the first model or another. Imports the engine, and so torch."""
        return self.config_of(model or self.model, self.resolved_data_dir)


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
    """Returns the file in which a ready server says its address, for the command line."""
    return settings.resolved_data_dir / "server.url"


def default_data_dir() -> Path:
    """Returns Ponder's folder where the platform keeps a user's application data."""
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "ponder"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "ponder"
