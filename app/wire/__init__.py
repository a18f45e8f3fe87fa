"""The connections below requests: limits of their time and number, and headers of every answer."""

from app.wire.connection import HEAD_BYTES, AnswerHeaders, Patience, protocol_of
from app.wire.handover import ConnectionReceiver, ConnectionSender, OwnOrOthers, adopted
from app.wire.http_server import connections_allowed, raise_file_limit

__all__ = [
    "HEAD_BYTES",
    "AnswerHeaders",
    "ConnectionReceiver",
    "ConnectionSender",
    "OwnOrOthers",
    "Patience",
    "adopted",
    "connections_allowed",
    "protocol_of",
    "raise_file_limit",
]  # fmt: skip
