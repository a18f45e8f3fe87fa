"""Tests what an operator's tools read: the dashboard's metrics, the log's lines, and the spans of a request."""

from __future__ import annotations

import io
import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.observability import tracing
from app.observability.logs import JsonLines, begin_request, configure
from tests.app.chatting import begin, log_of, new_chat
from tests.app.conftest import Server, serving

DASHBOARD = Path(__file__).resolve().parents[3] / "docs/grafana/ponder.json"
CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 40}


def test_the_dashboard_asks_for_metrics_that_there_are(model: Path, tmp_path: Path) -> None:
    told = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in told["panels"] for target in panel.get("targets", ())]
    asked = set(re.findall(r"\b(?:ponder|process)_\w+", " ".join(queries)))
    with serving(model, tmp_path, price_per_hour=1.0) as server, httpx.Client(base_url=server.url) as http:
        http.post(CHAT, json={**ASK, "ignore_eos": True})
        http.post(CHAT, json={**ASK, "ignore_eos": True})
        text = http.get("/metrics").text
    samples = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    families = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))  # one with labels has no sample before its first
    assert len(asked) > 25
    assert {name for name in asked if name not in samples | families} == set()
    ids = [panel["id"] for panel in told["panels"]]
    assert len(ids) == len(set(ids))


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Yields what is traced, in memory."""
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracing.use(provider.get_tracer("test"))
    yield kept
    tracing.use(None)


def named(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    """Returns the one span of a name, once it has ended: a request's does a moment after its client has the answer."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not any(span.name == name for span in spans.get_finished_spans()):
        time.sleep(0.01)
    (found,) = [span for span in spans.get_finished_spans() if span.name == name]
    return found


def test_an_answers_phases_are_spans_of_the_clients_trace(server: Server, spans: InMemorySpanExporter) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {**ASK, "thinking": {"min_tokens": 5, "max_tokens": 10}}
    httpx.post(f"{server.url}{CHAT}", json=body, headers={"traceparent": f"00-{trace}-{parent}-01"})
    request = named(spans, f"POST {CHAT}")
    assert request.parent is not None and format(request.parent.span_id, "016x") == parent
    answer = named(spans, "chat")
    assert answer.attributes is not None and answer.attributes["ponder.outcome"] == "completed"
    last = answer.start_time
    for name in ("queue and prefill", "thinking", "answer"):
        phase = named(spans, name)
        assert format(phase.context.trace_id, "032x") == trace
        assert phase.parent is not None and phase.parent.span_id == answer.context.span_id
        assert phase.start_time == last, "one follows the other"
        last = phase.end_time
    assert last == answer.end_time


def test_a_run_is_traced_beyond_the_request_that_began_it(server: Server, spans: InMemorySpanExporter) -> None:
    with httpx.Client(base_url=server.url) as http:
        log_of(http, begin(http, new_chat(http), "abc")["run_id"])
    run, request = named(spans, "runs"), named(spans, "POST /api/chats/{chat_id}/runs")
    assert run.context.trace_id == request.context.trace_id
    assert "abc" not in json.dumps([span.to_json() for span in spans.get_finished_spans()]).replace("abcdef", "")


def test_each_call_of_a_tool_is_a_span(spans: InMemorySpanExporter) -> None:
    from tools.outcome import CallError, CallResult, CallStarted

    with tracing.span("run"):
        heard: list[Any] = []
        listen = tracing.calls(heard.append)
        outcome: Any = None
        listen(CallStarted("1", "clock", {}, 0.0))
        listen(CallStarted("2", "fetch", {}, 0.0))
        listen(CallError("2", "fetch", outcome, 1.0))
        listen(CallResult("1", "clock", outcome, 2.0))
    assert len(heard) == 4
    clock, fetch = named(spans, "tool clock"), named(spans, "tool fetch")
    assert clock.attributes is not None and fetch.attributes is not None
    assert (clock.attributes["tool.failed"], fetch.attributes["tool.failed"]) == (False, True)
    assert clock.parent is not None and clock.parent.span_id == named(spans, "run").context.span_id


def test_nothing_is_traced_unless_the_environment_asks(server: Server) -> None:
    for environment in ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"},
                        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}):  # fmt: skip
        tracing.setup(environment)()
        assert tracing.here() is None and tracing.trace_id() is None


# -- the log


@pytest.mark.parametrize("given", ["mine-1", "x" * 128])
def test_a_request_keeps_the_id_that_its_client_gave_it(server: Server, given: str) -> None:
    reply = httpx.get(f"{server.url}/health", headers={"X-Request-ID": given})
    assert reply.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "two words"])
def test_an_id_that_could_spoil_a_log_is_replaced(server: Server, given: str) -> None:
    reply = httpx.get(f"{server.url}/nothing", headers={"X-Request-ID": given})
    assert re.fullmatch(r"req_[0-9a-f]{24}", reply.headers["x-request-id"])


def test_lines_of_json_have_the_requests_id_and_the_error(spans: InMemorySpanExporter) -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonLines())
    log = logging.Logger("ponder.test")
    log.addHandler(handler)
    begin_request("req-7")
    with tracing.span("x"):
        try:
            raise ValueError("a\nb")
        except ValueError:
            log.exception("it %s", "broke")
    (line,) = out.getvalue().splitlines()
    told = json.loads(line)
    assert (told["level"], told["logger"], told["message"]) == ("error", "ponder.test", "it broke")
    assert told["request_id"] == "req-7" and "ValueError: a\nb" in told["error"] and len(told["trace_id"]) == 32
    assert told["time"].endswith("+00:00")


def test_the_access_log_has_no_query_string(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    access = logging.getLogger("uvicorn.access")
    for each in (access, logging.getLogger("uvicorn")):  # as they are when no server ran in this process before
        for name, value in (("disabled", False), ("propagate", True), ("handlers", []), ("filters", [])):
            monkeypatch.setattr(each, name, value)
    own_level = access.level
    access.setLevel(logging.NOTSET)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        configure("info", "text")
        access.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", "/api/chats/search?q=my+secret", "1.1", 200)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        access.setLevel(own_level)
    said = capsys.readouterr().err
    assert '"GET /api/chats/search HTTP/1.1" 200' in said and "secret" not in said


def test_the_log_is_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        begin_request("req-8")
        configure("info", "text")
        logging.getLogger("ponder").info("hello")
        configure("info", "json")
        logging.getLogger("ponder").info("hello")
    finally:
        root.handlers[:], root.level = before, level
    text, line = capsys.readouterr().err.splitlines()
    assert text.endswith("INFO ponder: hello [req-8]") and json.loads(line)["message"] == "hello"
