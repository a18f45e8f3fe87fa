"""The configuration file as a source of settings, the weakest of them."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic_settings import PydanticBaseSettingsSource

from app.config.names import CONFIG_VARIABLE, DEFAULT_FILE, BadSetting

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
