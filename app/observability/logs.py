"""The server's log: lines of text, or of JSON for a log collector, each with the id of its request.

A request's id is the client's own (`X-Request-ID`) where it has one, and is sent back. A line of the access log has no
query string: searches are people's own. Knows nothing else of the records.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

HEADER = "X-Request-ID"
_ACCEPTED = re.compile(r"[\x21-\x7e]{1,128}")
_current: ContextVar[str | None] = ContextVar("_current", default=None)


def begin_request(given: str | None) -> str:
    """The id of the request that begins here: the given one, if it is 1 to 128 visible ASCII characters."""
    id = given if given is not None and _ACCEPTED.fullmatch(given) else f"req_{secrets.token_hex(12)}"
    _current.set(id)
    return id


def request_id() -> str | None:
    """Of the request that is answered here; of a run, that which began it."""
    return _current.get()


def configure(level: str, form: Literal["text", "json"]) -> None:
    """Set up the process' log, on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn.access").addFilter(without_query)


def without_query(record: logging.LogRecord) -> bool:
    """A filter for uvicorn's access log: cuts the path, the third of its arguments, where its query begins."""
    if isinstance(record.args, tuple) and len(record.args) == 5 and isinstance(record.args[2], str):
        client, method, path, *rest = record.args
        record.args = (client, method, str(path).partition("?")[0], *rest)
    return True


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return line if (id := request_id()) is None else f"{line} [{id}]"


class JsonLines(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `message`, and where there are such `request_id`, `trace_id` and `error`."""

    def format(self, record: logging.LogRecord) -> str:
        from app.observability.tracing import trace_id

        record_fields: dict[str, str] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        ids = {"request_id": request_id(), "trace_id": trace_id()}
        record_fields |= {name: value for name, value in ids.items() if value is not None}
        if record.exc_info:
            record_fields["error"] = self.formatException(record.exc_info)
        return json.dumps(record_fields, ensure_ascii=False)
