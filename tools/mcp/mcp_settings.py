"""An operator's settings of an MCP server: its address, and the permissions of its tools.

One `[mcp.NAME]` table of ponder.toml is one `McpSettings`. Nothing is taken from the server here: a name, a class or a
limit is the operator's word, and the server's own claims can only make it stricter.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from tools.options import FEWEST_CHARS, MAX_S, Approval

NAME = re.compile(r"[a-zA-Z0-9_-]{1,32}")  # of a server: it may stand before a tool's name, which has 64 characters
McpName = Annotated[str, StringConstraints(pattern=rf"^{NAME.pattern}$")]

# Not "none": such a tool's results would count as our own words.
McpPermission = Literal["read", "write", "network", "execute"]


class McpSettings(BaseModel):
    """One server: a program that is started here, or an address. A field's description names the accepted values.

    Left out, `permission` is "execute" for a program and "network" for an address. `inherit` names variables of our
    own environment that the program gets; it gets no other but those in `env`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...] | None = Field(None, min_length=1, description="a program with its arguments, as a list")
    url: str | None = Field(None, pattern=r"^https?://[^\s/]", description="an address such as https://host/mcp")
    env: dict[str, str] = Field({}, description="variables of the program's environment")
    inherit: tuple[str, ...] = Field((), description="names of variables that the program gets from our environment")
    cwd: Path | None = Field(None, description="the program's working directory")
    headers: dict[str, str] = Field({}, description="headers that are sent to the address, such as Authorization")
    permission: McpPermission | None = Field(None, description="read, write, network or execute")
    approval: Approval | None = Field(None, description="never, once or always")
    timeout_s: float = Field(30.0, gt=0, le=MAX_S, description=f"seconds for a call, up to {MAX_S:g}")
    max_chars: int = Field(8000, ge=FEWEST_CHARS, description=f"characters of a result, {FEWEST_CHARS} or more")
    trust_descriptions: bool = Field(
        False, description="true or false: whether what its tools say of themselves may lead to calls of other tools"
    )
    trust_annotations: bool = Field(
        False, description="true or false: whether a tool is in the class read where its server says that it only reads"
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError('give either command, as in command = ["my-server", "--stdio"], or url')
        theirs = ("headers",) if self.url is None else ("env", "inherit", "cwd")
        if misplaced := [name for name in theirs if getattr(self, name)]:
            other = "url" if self.url is None else "command"
            raise ValueError(f"{misplaced[0]} has no effect here: it belongs to a server with {other}")
        return self

    @field_validator("command")
    @classmethod
    def _named_program(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (not value[0].strip() or any("\0" in each for each in value)):
            raise ValueError("the program's name is empty, or there is a zero character in it")
        return value

    @property
    def allowed(self) -> McpPermission:
        """The class of its tools."""
        return self.permission or ("execute" if self.url is None else "network")


def check_name(name: str) -> str:
    """The server's name.

    Raises:
        ValueError: it could not stand before a tool's name.
    """
    if NAME.fullmatch(name) is None:
        raise ValueError(f"The MCP server's name {name!r:.60} is not 1 to 32 of the characters a-z, A-Z, 0-9, _ and -.")
    return name
