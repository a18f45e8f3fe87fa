"""A browser that neither hears nor speaks: the page does both by the audio server, where there is one."""

from __future__ import annotations

import io
import re
import shutil
import wave
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.conftest import ARGS, PATIENCE_MS, NewPage, Watch
from tests.e2e.support.fake_server import FakeServer, answer

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, Route, expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.slow]

AUDIO = {"transcription_model": "ear", "speech_model": "mouth", "voice": "sky"}
MUTE = "delete window.SpeechRecognition; delete window.webkitSpeechRecognition; delete window.speechSynthesis;"
MICROPHONE = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium with a microphone that beeps."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    sync_api.expect.set_options(timeout=PATIENCE_MS)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=[*ARGS.split(), *MICROPHONE])
        yield browser
        browser.close()


def silence() -> bytes:
    """A tenth of a second."""
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(1600))
    return made.getvalue()


def opened(new_page: NewPage, fake: FakeServer, audio: dict[str, str] | None) -> Page:
    page = new_page()
    page.add_init_script(MUTE)

    def server(route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), "audio": audio})

    page.route("**/api/server", server)
    page.goto(fake.url)
    return page


def asked(page: Page, fake: FakeServer, text: str) -> None:
    fake.play(answer(text))
    page.get_by_role("textbox", name="Message").fill("Speak")
    page.get_by_role("textbox", name="Message").press("Enter")
    expect(page.get_by_role("button", name="Copy the answer")).to_be_visible()


def test_without_an_audio_server_there_is_neither_button(new_page: NewPage, fake: FakeServer) -> None:
    page = opened(new_page, fake, None)
    asked(page, fake, "The end.")
    expect(page.get_by_role("button", name="Dictate")).to_have_count(0)
    expect(page.get_by_role("button", name="Read aloud")).to_have_count(0)


def test_what_is_said_is_recorded_and_comes_back_as_words(new_page: NewPage, fake: FakeServer) -> None:
    page = opened(new_page, fake, AUDIO)
    forms: list[bytes] = []

    def hear(route: Route) -> None:
        forms.append(route.request.post_data_buffer or b"")
        route.fulfill(json={"text": " Hello there. "})

    page.route("**/v1/audio/transcriptions", hear)
    button = page.get_by_role("button", name="Dictate")
    expect(button).to_have_attribute("title", re.compile("audio server"))
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    page.wait_for_timeout(300)  # something to be recorded
    button.click()
    expect(page.get_by_role("textbox", name="Message")).to_have_value("Hello there.")
    expect(button).to_have_attribute("aria-pressed", "false")
    assert b"ear" in forms[0] and b'filename="recording.webm"' in forms[0] and len(forms[0]) > 500


def test_an_answer_is_spoken_in_parts_and_what_fails_is_said(new_page: NewPage, fake: FakeServer, watch: Watch) -> None:
    watch.expect_errors()
    page = opened(new_page, fake, AUDIO)
    bodies: list[Any] = []

    def speak(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(body=silence(), content_type="audio/wav")

    page.route("**/v1/audio/speech", speak)
    asked(page, fake, "One sentence of it. " * 300)
    page.get_by_role("button", name="Read aloud").click()
    expect(page.get_by_role("button", name="Stop reading")).to_be_visible()
    expect(page.get_by_role("button", name="Read aloud")).to_be_visible()  # it is over
    assert [(each["model"], each["voice"]) for each in bodies] == [("mouth", "sky")] * 2
    assert all(each["input"].endswith("of it.") and len(each["input"]) <= 4096 for each in bodies)

    def refuse(route: Route) -> None:
        refusal = {
            "message": "The audio server is tired.",
            "type": "server_error",
            "param": None,
            "code": "audio_failed",
        }
        route.fulfill(status=502, json={"error": refusal})

    page.route("**/v1/audio/speech", refuse)
    page.get_by_role("button", name="Read aloud").click()
    expect(page.get_by_text("The audio server is tired.")).to_be_visible()
    expect(page.get_by_role("button", name="Read aloud")).to_be_visible()
