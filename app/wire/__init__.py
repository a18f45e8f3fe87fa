"""The connections below requests: how long each may take, how many there may be, what every answer carries."""

from app.wire.connection import HEAD_BYTES, AnswerHeaders, Patience, protocol_of
from app.wire.handover import Giver, OwnOrOthers, Taker, adopted
from app.wire.server import connections_allowed, raise_file_limit

__all__ = [
    "HEAD_BYTES", "AnswerHeaders", "Giver", "OwnOrOthers", "Patience", "Taker", "adopted", "connections_allowed",
    "protocol_of", "raise_file_limit",
]  # fmt: skip
