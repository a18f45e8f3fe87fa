"""`kv_transfer_params` of a request, in vLLM's names: prompts that one server prefills and another one decodes.

The router sends a prompt to a server with `do_remote_decode`, and to another with `do_remote_prefill` and where the
first one's K/V is. Neither changes a token of an answer: K/V that does not come is computed.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.answering.served_model import ServedModel
from app.errors import invalid
from engine.errors import InvalidParameter
from engine.params import RemotePrefill

if TYPE_CHECKING:
    from app.answering.remote_model import RemoteModel

FIELD = "kv_transfer_params"
KV_TRANSFER = (
    '{"do_remote_decode": true}, or {"do_remote_prefill": true, "remote_host": a peer, "remote_port": 1 to 65535}'
)


class KVTransferFields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_host: str | None = Field(None, min_length=1, max_length=253)
    remote_port: int | None = Field(None, ge=1, le=65535)
    remote_engine_id: None = None  # of vLLM's own connectors, whose clients send null
    remote_block_ids: None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.do_remote_decode and self.do_remote_prefill:
            raise invalid(FIELD, f"{FIELD} asks for do_remote_decode and do_remote_prefill; accepted: one of them.")
        if self.do_remote_prefill != (self.remote_host is not None and self.remote_port is not None):
            found = str(self.do_remote_prefill).lower()
            accepted = "true together with remote_host and remote_port, or false without them"
            raise invalid(FIELD, f"{FIELD} has do_remote_prefill {found}; accepted: {accepted}.")
        return self


KVTransferField = Annotated[KVTransferFields | None, Field(description=KV_TRANSFER)]


def remote_prefill(fields: KVTransferFields | None, served: ServedModel, *, stream: bool) -> RemotePrefill | None:
    """Returns the engine that prefills a request's prompt; None: this one does.

    Raises:
        ApiError: 400: this server exchanges no K/V that way, or the engine is no peer of it.
    """
    if fields is None:
        return None
    config = served.engine.config
    if fields.do_remote_decode:
        if (transfer := config.kv_transfer) is None or not transfer.produces or transfer.uses_stores:
            message = f"{FIELD} asks for do_remote_decode, and this server serves no K/V; accepted: of a server with"
            raise invalid(FIELD, f"{message} kv_transfer, as kv_producer or kv_both of a TcpConnector.")
        if stream:
            raise invalid(FIELD, f"{FIELD} asks for do_remote_decode with stream; accepted: without stream.")
    if fields.remote_host is None or fields.remote_port is None:
        return None
    try:
        config.check_peer(fields.remote_host, fields.remote_port)
    except InvalidParameter as error:
        raise invalid(FIELD, str(error)) from None
    return RemotePrefill(fields.remote_host, fields.remote_port)


def reply_fields(fields: KVTransferFields | None, served: ServedModel | RemoteModel) -> dict[str, Any]:
    """Returns the field of a reply that says where the prompt's K/V is, as the other server is to be told; none unless
    it was asked for. `remote_host` is null where this server listens at all of its addresses."""
    if fields is None or not fields.do_remote_decode:
        return {}
    assert isinstance(served, ServedModel) and served.engine.config.kv_transfer is not None, "it was refused before"
    transfer = served.engine.config.kv_transfer
    try:
        anywhere = ipaddress.ip_address(transfer.kv_ip).is_unspecified
    except ValueError:  # a name
        anywhere = False
    host = None if anywhere else transfer.kv_ip
    where = {"remote_host": host, "remote_port": transfer.kv_port}
    return {FIELD: {"do_remote_prefill": True, "do_remote_decode": False, **where}}
