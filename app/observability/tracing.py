"""Spans of a request's phases, by OpenTelemetry, for an operator who has a collector. Off unless `setup` turns it on.

Spans of an answer's phases are made when it ends, from times that are noted as it goes, so that a token costs nothing.
No text of anybody's is in a span. Knows nothing of where spans go: that is the standard environment's to say.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tools.outcome import CallError, CallResult, CallStarted, Event

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

log = logging.getLogger("ponder")

_WANTED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_tracer: Tracer | None = None

Attributes = Mapping[str, str | int | float | bool]


def setup(environment: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """Send spans where the environment says (`OTEL_EXPORTER_OTLP_ENDPOINT` and its like), if it does; the returned
    function sends the last of them and stops."""
    disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if (
        disabled
        or environment.get("OTEL_TRACES_EXPORTER") == "none"
        or not any(environment.get(name) for name in _WANTED)
    ):
        return lambda: None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning(
            "Traces are asked for (OTEL_EXPORTER_OTLP_ENDPOINT), but not installed: pip install 'ponder[otel]'."
        )
        return lambda: None
    name = environment.get("OTEL_SERVICE_NAME", "ponder")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    use(provider.get_tracer("ponder"))

    def stop() -> None:
        use(None)
        provider.shutdown()

    return stop


def use(tracer: Tracer | None) -> None:
    """Make spans with it from now on; None: none."""
    global _tracer  # one per process, as OpenTelemetry has it
    _tracer = tracer


def trace_id() -> str | None:
    """Of the trace that goes on here."""
    if _tracer is None:
        return None
    from opentelemetry import trace

    found = trace.get_current_span().get_span_context()
    return format(found.trace_id, "032x") if found.is_valid else None


def here() -> Context | None:
    """Returns the parent context of spans that are made later."""
    if _tracer is None:
        return None
    from opentelemetry import context

    return context.get_current()


@contextmanager
def span(name: str, **attributes: str | int | float | bool) -> Iterator[None]:
    """Records a span of the work inside."""
    if _tracer is None:
        yield
        return
    with _tracer.start_as_current_span(name, attributes=attributes):
        yield


def made(name: str, began_ns: int, ended_ns: int, parent: Context | None, attributes: Attributes) -> None:
    """A span of a finished phase. Times are nanoseconds since the epoch."""
    if _tracer is not None and parent is not None:
        _tracer.start_span(name, context=parent, start_time=began_ns, attributes=attributes).end(ended_ns)


def answer(
    name: str, began_ns: int, phases: Sequence[tuple[str, int]], parent: Context | None, attributes: Attributes
) -> None:
    """A span of an answer that ends now, and in it one for each of its phases: its name, and since when."""
    if _tracer is None or parent is None:
        return
    from opentelemetry.trace import set_span_in_context

    ends = [*(since for _, since in phases[1:]), time.time_ns()]
    whole = _tracer.start_span(name, context=parent, start_time=began_ns, attributes=attributes)
    for (phase, since), until in zip(phases, ends, strict=True):
        made(phase, since, until, set_span_in_context(whole, parent), {})
    whole.end(ends[-1])


def calls(listen: Callable[[Event], None]) -> Callable[[Event], None]:
    """`listen`, with a span for each call of a tool."""
    parent, began = here(), dict[str, tuple[str, int]]()
    if parent is None:
        return listen

    def heard(event: Event) -> None:
        match event:
            case CallStarted():
                began[event.call_id] = event.name, time.time_ns()
            case CallResult() | CallError() if event.call_id in began:
                name, since = began.pop(event.call_id)
                failed = isinstance(event, CallError)
                made(f"tool {name}", since, time.time_ns(), parent, {"tool.name": name, "tool.failed": failed})
        listen(event)

    return heard


class Traced:
    """ASGI middleware: a span for each request, which goes on a trace that the client began (W3C `traceparent`)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _tracer is None or scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        method = scope["method"]
        with _tracer.start_as_current_span(
            method, context=TraceContextTextMapPropagator().extract(carrier), kind=SpanKind.SERVER,
            attributes={"http.request.method": method},
        ) as current:  # fmt: skip

            async def send_traced(message: Message) -> None:
                if message["type"] == "http.response.start":
                    route: Any = scope.get("route")  # FastAPI's, once it is found: never the address itself
                    if (path := getattr(route, "path", None)) is not None:
                        current.update_name(f"{method} {path}")
                        current.set_attribute("http.route", path)
                    current.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        current.set_status(Status(StatusCode.ERROR))
                await send(message)

            await self.app(scope, receive, send_traced)
