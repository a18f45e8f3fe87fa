"""Speech by another server: recordings go through as they are, speech comes as it is made, and no key leaves."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.config import BadSetting, load_settings
from tests.app.conftest import Server, serving
from tests.app.gate import GatedEmbedder
from tests.app.keyed import beside, client_of, key_of
from tests.app.library import error
from tests.app.remote.planted import KEY, Planted, Reply, planted_server

MAX = 200_000
SOUND = bytes(range(256)) * 200


def says(text: str, media_type: str = "application/json") -> Callable[[Reply], None]:
    def behave(reply: Reply) -> None:
        reply.begin(200, content_type=media_type, content_length=str(len(text.encode())))
        reply.send(text.encode())

    return behave


@pytest.fixture(scope="module")
def planted() -> Iterator[Planted]:
    with planted_server() as planted:
        yield planted


@pytest.fixture(scope="module")
def server(planted: Planted, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    audio = {
        "url": f"{planted.url}/v1", "key_env": "PLANTED_KEY", "connect_s": 2, "first_byte_s": 0.5, "next_byte_s": 0.5,
        "max_audio": MAX, "voice": "echo",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANTED_KEY", KEY)
        data = tmp_path_factory.mktemp("audio")
        with serving(model, data, GatedEmbedder(), auth="keys", audio=audio) as server:
            server.app.dependency_overrides.clear()
            yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key_of(server, "ana"), max_retries=0)


def sent(client: openai.OpenAI, **fields: Any) -> Any:
    return client.audio.transcriptions.create(model="whisper-1", file=("a.wav", io.BytesIO(SOUND)), **fields)


def test_a_recording_goes_through_byte_by_byte_with_our_key(client: openai.OpenAI, planted: Planted) -> None:
    planted.does(says('{"text": "Hello there."}'))
    assert sent(client, language="en").text == "Hello there."
    path, headers, body = planted.requests[-1]
    assert path == "/v1/audio/transcriptions" and headers["Authorization"] == f"Bearer {KEY}"
    assert SOUND.decode("latin-1") in body["form"] and 'name="language"' in body["form"]
    assert client.api_key not in planted.received
    planted.does(says("Hello.", "text/plain; charset=utf-8"))
    assert sent(client, response_format="text") == "Hello."
    planted.does(says('{"text": "Good day."}'))
    assert client.audio.translations.create(model="w", file=("a.wav", io.BytesIO(SOUND))).text == "Good day."
    assert planted.requests[-1][0] == "/v1/audio/translations"


def test_speech_comes_as_it_is_made(client: openai.OpenAI, planted: Planted) -> None:
    first, go_on = b"RIFF" + SOUND[:100], threading.Event()

    def speak(reply: Reply) -> None:
        reply.begin(200, content_type="audio/wav")
        reply.send(first)
        go_on.wait(0.4)  # the next bytes may take half a second
        reply.send(SOUND)

    planted.does(speak)
    made = client.audio.speech.with_streaming_response
    with made.create(model="tts-1", voice="alloy", input="Grüße", response_format="wav", speed=1.5) as speech:
        assert speech.headers["content-type"] == "audio/wav"
        pieces = speech.iter_bytes(1)
        got = b"".join(next(pieces) for _ in first)
        go_on.set()  # what came first was read before the rest was made
        assert got + b"".join(pieces) == first + SOUND
    assert planted.body == {
        "model": "tts-1", "voice": "alloy", "input": "Grüße", "response_format": "wav", "speed": 1.5
    }  # fmt: skip


def test_events_of_a_transcript_are_passed_and_the_key_is_taken_out(client: openai.OpenAI, planted: Planted) -> None:
    def echo(reply: Reply) -> None:
        reply.begin()
        line = json.dumps({"type": "transcript.text.delta", "delta": f"Your key is {KEY}."}).encode()
        for part in (line[:40], line[40:60], line[60:]):
            reply.send((b"data: " if part == line[:40] else b"") + part)
        reply.send(b"\n\n")
        reply.event({"type": "transcript.text.done", "text": "ok"})

    planted.does(echo)
    events = list(sent(client, stream=True))
    assert [each.type for each in events] == ["transcript.text.delta", "transcript.text.done"]
    assert events[0].delta == "Your key is [redacted]."


@pytest.mark.parametrize(
    ("status", "text", "ours", "code"),
    [
        (400, '{"error": {"message": "No such model."}}', 400, "audio_refused"),
        (413, "too long", 413, "audio_refused"),
        (401, f"The key {KEY} is wrong.", 502, "audio_unauthorized"),
        (429, "slow down", 429, "audio_rate_limited"),
        (500, "oops", 502, "audio_failed"),
        (503, "busy", 503, "audio_overloaded"),
        (302, "", 502, "audio_redirected"),
    ],
)
def test_refusals_keep_their_sense_and_tell_no_key(
    client: openai.OpenAI, planted: Planted, status: int, text: str, ours: int, code: str
) -> None:
    planted.does(lambda reply: reply.refuse(status, text, **({"retry_after": "7"} if status == 429 else {})))
    with pytest.raises(openai.APIStatusError) as refused:
        sent(client)
    assert refused.value.status_code == ours and refused.value.code == code
    assert KEY not in refused.value.response.text
    assert refused.value.response.headers.get("retry-after") == ("7" if status == 429 else None)


def test_a_server_that_is_silent_or_gone_is_said_so(
    server: Server, client: openai.OpenAI, planted: Planted, model: Path, tmp_path: Path
) -> None:
    go = threading.Event()
    planted.does(lambda reply: _waits(go))
    with pytest.raises(openai.APIStatusError) as refused:
        sent(client)
    assert refused.value.status_code == 504 and refused.value.code == "audio_timeout"
    go.set()

    def stops(reply: Reply) -> None:
        reply.begin(200, content_type="audio/wav")
        reply.send(SOUND)
        threading.Event().wait(2)

    planted.does(stops)
    with pytest.raises((httpx.RemoteProtocolError, openai.APIConnectionError)):
        client.audio.speech.create(model="tts-1", voice="alloy", input="a").read()
    with serving(model, tmp_path, GatedEmbedder(), audio={"url": "http://127.0.0.1:9/v1"}) as lonely:
        error(httpx.post(f"{lonely.url}/v1/audio/speech", json=SPEECH), 503, "audio_unavailable")


def _waits(go: threading.Event) -> None:
    go.wait(5)


SPEECH = {"model": "m", "input": "a", "voice": "v"}


def test_a_recording_has_a_limit_and_a_form(server: Server, planted: Planted) -> None:
    planted.does(says("{}"))
    with client_of(server, key_of(server, "ana")) as http:
        large = http.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"x" * MAX)})
        assert "accepted: at most" in error(large, 413, "body_too_large")
        error(http.post("/v1/audio/transcriptions", json={}), 400, "invalid_value", "file")
        error(http.post("/v1/audio/speech", json={**SPEECH, "loud": True}), 400, "unknown_parameter", "loud")
        error(http.post("/v1/audio/speech", json={**SPEECH, "speed": 9.0}), 400, "invalid_value", "speed")
        assert planted.requests == []


def test_it_counts_towards_limits_and_wants_the_scope_of_v1(server: Server, planted: Planted) -> None:
    planted.does(says('{"text": "Hi."}'))
    key_of(server, "ana")
    key = beside(server, lambda accounts: accounts.create_key("ana", "", None, ["chat"])[1])
    with client_of(server, key) as http:
        assert http.post("/v1/audio/speech", json=SPEECH).status_code == 403
    error(httpx.post(f"{server.url}/v1/audio/speech", json=SPEECH), 401, "invalid_api_key")


def test_without_an_audio_server_it_says_what_to_set(http: httpx.Client) -> None:
    for path in ("transcriptions", "translations"):
        refused = http.post(f"/v1/audio/{path}", files={"file": ("a.wav", b"x")}, data={"model": "whisper-1"})
        assert "--audio-url" in error(refused, 404, "audio_off")
    error(http.post("/v1/audio/speech", json=SPEECH), 404, "audio_off")
    assert http.get("/api/server").json()["audio"] is None


def test_the_page_is_told_what_to_ask_for_and_no_address(server: Server) -> None:
    with client_of(server, key_of(server, "ana")) as http:
        told = http.get("/api/server").json()["audio"]
    assert told == {"transcription_model": "whisper-1", "speech_model": "tts-1", "voice": "echo"}


def test_settings_are_an_address_or_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ponder.toml"
    file.write_text('[audio]\nurl = "https://host/v1/"\nmax_audio = "1MiB"\nkey_env = "NOT_THERE"\n')
    settings = load_settings(file)
    assert settings.audio is not None
    assert settings.audio.url == "https://host/v1" and settings.audio.max_audio == 1 << 20
    with pytest.raises(BadSetting, match="The audio server takes its key from NOT_THERE, which is not set"):
        settings.check_remotes()
    by_flag = load_settings(file, audio="http://127.0.0.1:9000/v1").audio
    assert by_flag is not None and by_flag.url == "http://127.0.0.1:9000/v1" and by_flag.key_env is None
    for bad in ('url = "host"', 'url = "https://host"\napi_key = "sk"', 'url = "http://host"\nkey_env = "K"'):
        file.write_text(f"[audio]\n{bad}\n")
        with pytest.raises(BadSetting, match="audio"):
            load_settings(file)
