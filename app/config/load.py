"""Settings from flags, environment and file, or a sentence that says which value is wrong and what is accepted."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_settings import SettingsError

from app.config.names import CONFIG_VARIABLE, ENV_PREFIX, KEY_VARIABLE, BadSetting
from app.config.settings import Settings, file_values, read_file

log = logging.getLogger("ponder")

RENAMED = {"tool_dialect": "tool_call_parser"}  # old names that this version takes for the last time


def unknown_variables() -> list[str]:
    """Environment variables with our prefix that mean nothing to us: likely misspelt."""
    names = {*Settings.model_fields, *RENAMED}
    known = {f"{ENV_PREFIX}{name}".upper() for name in names} | {CONFIG_VARIABLE, KEY_VARIABLE}
    return sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)


def load_settings(config: Path | None = None, **flags: Any) -> Settings:
    """Settings from flags (those not None), environment, file and defaults, in that order.

    Raises:
        BadSetting: a value is not accepted, a key of the file is unknown, or the file cannot be read.
    """
    values, file = read_file(config)
    given = {name: value for name, value in flags.items() if value is not None}
    _rename(values, given)
    token = file_values.set(values)
    try:
        return Settings(**given)
    except ValidationError as error:
        raise BadSetting("\n".join(_explain(e, given, file) for e in error.errors())) from None
    except SettingsError:
        raise BadSetting(_not_json()) from None
    finally:
        file_values.reset(token)


def _rename(values: dict[str, Any], given: dict[str, Any]) -> None:
    """Moves values of old names to the new ones, with a warning each; a value of the new name goes before."""
    for old, new in RENAMED.items():
        variable = f"{ENV_PREFIX}{old}".upper()
        for source in (given, os.environ, values):
            name = variable if source is os.environ else old
            if name in source:
                log.warning("%s is called %s now; the old name goes with the next version", name, new)
        if old in given:
            given.setdefault(new, given.pop(old))
        elif variable in os.environ and f"{ENV_PREFIX}{new}".upper() not in os.environ:
            given.setdefault(new, os.environ[variable])
        if old in values:
            values.setdefault(new, values.pop(old))


def _not_json() -> str:
    """Tells which variable of a table cannot be read: pydantic-settings says it in words of its own."""
    for name, field in Settings.model_fields.items():
        variable = f"{ENV_PREFIX}{name}".upper()
        if (
            get_origin(field.annotation) is dict or name in ("remote", "audio", "kv_events", "kv_transfer")
        ) and variable in os.environ:
            try:
                json.loads(os.environ[variable])
            except ValueError:
                what = "list" if name == "remote" else "object"
                return f"{variable} is not JSON; accepted: a JSON {what}, of {field.description}."
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
        extra = Settings.model_fields[field].json_schema_extra
        source = (isinstance(extra, dict) and str(extra["flag"])) or f"--{field}".replace("_", "-")
    elif any(n.upper() == f"{ENV_PREFIX}{field}".upper() for n in os.environ):
        source = f"{ENV_PREFIX}{field.upper()}"
    else:
        source = f"{field} in {file}"
    accepted = Settings.model_fields[field].description or "another value"
    if field in ("database", "redis"):  # it may hold a password
        return f"{source} is none that is accepted; accepted: {accepted}."
    inside = error["loc"][1:]
    if inside or field in ("remote", "audio"):  # of a table, which may hold tokens and so is never shown whole
        at = ".".join([source.removesuffix(f" in {file}"), *map(str, inside)])
        return f"{at}: {error['msg']}; accepted: {accepted}."
    return f"{source} is {error['input']!r}; accepted: {accepted}."
