"""Names that the settings share, and the error of a setting that cannot be used."""

from __future__ import annotations

from typing import Annotated

from pydantic_settings import NoDecode

ENV_PREFIX = "PONDER_"
CONFIG_VARIABLE = "PONDER_CONFIG"
KEY_VARIABLE = "PONDER_API_KEY"  # of our clients on the command line
DEFAULT_FILE = "ponder.toml"
BUNDLED_MODEL = "models/pebble"
DEFAULT_NAME = "default"  # what clients may call the first of the models
AUTO_NAME = "auto"  # what they ask for where the server is to choose among several
LOCAL_USER = "local"  # whose everything is, where nobody has to say who they are

# Given as one text, its parts between commas, or as a list.
CommaSeparated = Annotated[tuple[str, ...], NoDecode]


class BadSetting(Exception):
    """A setting cannot be used; the message says which, where it came from and what is accepted."""
