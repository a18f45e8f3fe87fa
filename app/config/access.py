"""Settings of access: where the server listens, who may reach it, and how much of it one of them may take."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ByteSize, Field, field_validator

from app.config.names import CommaSeparated

STORAGE_PER_USER = 4 << 30  # bytes, where there are several


class AccessSettings(BaseModel):
    host: str = Field("127.0.0.1", min_length=1, description="an address or host name to listen on")
    port: int = Field(8000, ge=0, le=65535, description="0 (any free port) to 65535")
    auth: Literal["off", "keys"] = Field(
        "off", description="off (whoever reaches the server may use it) or keys (who shows an API key)"
    )
    cors_origins: CommaSeparated = Field((), description="origins such as https://chat.example.org, comma-separated")
    allowed_hosts: CommaSeparated = Field((), description="host names such as chat.example.org, comma-separated")
    max_connections: int | None = Field(None, ge=16, description="connections at the same time, 16 or more")
    max_upload: ByteSize = Field(
        ByteSize(200 << 20), ge=1, description="a size such as 200MiB, of all files of a request together"
    )
    storage_per_user: ByteSize | None = Field(
        None, ge=1, description="a size such as 4GiB, of all files of a user's documents together"
    )
    sequences_per_user: int = Field(256, ge=1, description="open sequences of one user, 1 or more")
    sequence_tokens_per_user: int = Field(
        262_144, ge=1, description="tokens of a user's open sequences together, 1 or more"
    )
    sequence_lease_s: float = Field(600.0, gt=0, le=86_400, description="seconds of the longest lease, up to 86400")
    mcp_idle_s: float = Field(
        1800.0, gt=0, le=86_400, description="seconds after which an MCP session without a request ends, up to 86400"
    )
    drain_s: float = Field(
        5.0, ge=0, le=86_400, description="seconds that what runs may go on after SIGTERM, up to 86400"
    )

    @property
    def resolved_storage_per_user(self) -> int | None:
        """Bytes; None: without a limit."""
        if self.storage_per_user is not None:
            return int(self.storage_per_user)
        return STORAGE_PER_USER if self.auth == "keys" else None

    @field_validator("cors_origins")
    @classmethod
    def _is_origin(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [o for o in value if o != "*" and (not o.startswith(("http://", "https://")) or o.count("/") != 2)]:
            raise ValueError(f"{bad[0]!r} is not an origin")
        return value
