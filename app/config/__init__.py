"""Every setting of the server in one typed object, and where its value comes from.

A flag beats an environment variable (`PONDER_PORT`), which beats the configuration file (TOML: `--config`,
`PONDER_CONFIG`, or `ponder.toml` in the working directory), which beats the default. Nothing below `app/` reads the
environment: the engine gets an `EngineConfig` made from this. Knows nothing of the command line's words.
"""

from app.config.load import load_settings, unknown_variables
from app.config.model_settings import find_model
from app.config.names import (
    AUTO_NAME,
    BUNDLED_MODEL,
    CONFIG_VARIABLE,
    DEFAULT_FILE,
    DEFAULT_NAME,
    ENV_PREFIX,
    KEY_VARIABLE,
    LOCAL_USER,
    BadSetting,
)
from app.config.settings import Settings, changed_settings, default_data_dir, server_file

__all__ = [
    "AUTO_NAME", "BUNDLED_MODEL", "CONFIG_VARIABLE", "DEFAULT_FILE", "DEFAULT_NAME", "ENV_PREFIX", "KEY_VARIABLE",
    "LOCAL_USER", "BadSetting", "Settings", "changed_settings", "default_data_dir", "find_model", "load_settings",
    "server_file", "unknown_variables",
]  # fmt: skip
