"""Names that the settings share, the declaration of one setting, and the error of one that cannot be used."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from pydantic_settings import NoDecode

ENV_PREFIX = "PONDER_"
CONFIG_VARIABLE = "PONDER_CONFIG"
KEY_VARIABLE = "PONDER_API_KEY"  # of our clients on the command line
DEFAULT_FILE = "ponder.toml"
BUNDLED_MODEL = "models/pebble"
DEFAULT_NAME = "default"  # the first model's second name for clients
AUTO_NAME = "auto"  # the router's name for clients
LOCAL_USER = "local"  # owns everything on a server without accounts

# Given as one text, its parts between commas, or as a list.
CommaSeparated = Annotated[tuple[str, ...], NoDecode]


def setting(
    default: Any, text: str, *, accepts: str, more: str = "", unset: str = "none", flag: str = "", **limits: Any
) -> Any:  # Any: pydantic's FieldInfo in the place of a value of the field's type, as Field itself returns it
    """Declares one setting for everything that lists it: flags, variables, the file, errors and the docs' table.

    Args:
        default: the value without any source.
        text: its meaning in Markdown, as `ponder serve --help` shows it.
        accepts: the accepted values, as an error message ends.
        more: what the table in docs/operations.md adds to `text`.
        unset: the default in words, where it is None or empty.
        flag: the repeatable option of one value of a list or table.
        limits: pydantic's constraints, such as `ge`.
    """
    extra: dict[str, Any] = {"more": more, "unset": unset, "flag": flag}
    return Field(default, title=text, description=accepts, json_schema_extra=extra, **limits)


class BadSetting(Exception):
    """A setting cannot be used; the message says which, where it came from and what is accepted."""
