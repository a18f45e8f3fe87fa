"""The page in a real browser: against a scripted server, and once against the real one."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.runs.events import AnswerDelta, RunFailed, ThinkingDelta
from tests.e2e.support.fake_server import ABOUT, FakeServer, Gate, answer, thinking
from tests.tiny import write_checkpoint

if TYPE_CHECKING:
    from tests.e2e.conftest import NewPage, Watch

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Locator, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
TALE = [f"Sentence {i} of the answer. " for i in range(12)]


def box(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message")


def reply(page: Page) -> Locator:
    return page.get_by_role("article", name="Ponder").last


def questions(page: Page) -> Locator:
    return page.get_by_role("article", name="You")


def ask(page: Page, words: str) -> None:
    box(page).fill(words)
    box(page).press("Enter")


def scrolls_sideways(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


def from_end(page: Page) -> float:
    return float(page.evaluate("(e => e.scrollHeight - e.clientHeight - e.scrollTop)(document.documentElement)"))


def test_a_message_is_thought_about_then_answered_as_it_streams(page: Page, fake: FakeServer) -> None:
    fake.play(
        [Gate("think"), *thinking("A tall ", "order.")[:2], Gate("more"), ThinkingDelta(text="order.")],
        [Gate("answer"), thinking()[-1]],
        answer(*TALE[:4], Gate("middle"), *TALE[4:]),
    )
    ask(page, "Tell me a tale")
    expect(box(page)).to_have_value("")
    expect(questions(page)).to_have_text("Tell me a tale")
    expect(reply(page)).to_contain_text(re.compile(r"Thinking…\s+\d+\.\d s"))  # before the server has said a thing
    expect(page).to_have_url(re.compile(r"/c/chat1$"))

    fake.open("think")
    trace = page.get_by_role("region", name="What the model thought")
    expect(trace).to_have_text("A tall ")
    fake.open("more")
    expect(trace).to_have_text("A tall order.")

    fake.open("answer")
    expect(reply(page)).to_contain_text("Thought for 1.2 s · 43 tokens")
    expect(trace).to_be_hidden()
    expect(reply(page)).to_contain_text(TALE[3].strip())
    expect(reply(page)).not_to_contain_text(TALE[4].strip())
    expect(page.locator("[aria-live=polite]")).not_to_contain_text("Sentence")  # the half is not read out

    fake.open("middle")
    expect(reply(page)).to_contain_text("".join(TALE).strip())
    expect(reply(page)).not_to_contain_text("tokens/s")
    reply(page).get_by_role("button", name="Speed and size").click()
    for fact in ("38 tokens/s", "first token in 210 ms", "20 tokens out", "31 tokens in (16 from cache)"):
        expect(reply(page)).to_contain_text(fact)
    expect(page.locator("[aria-live=polite]")).to_contain_text(TALE[11].strip())

    page.get_by_role("button", name="Thought for").click()
    expect(trace).to_have_text("A tall order.")


def test_code_has_a_language_colours_and_a_copy_button(page: Page, fake: FakeServer) -> None:
    code = "def f(x):\n    return x + 1"
    fake.play(answer("Here:\n\n```python\n", code, "\n```\n\nDone, `inline` too."))
    ask(page, "Code, please")
    figure = reply(page).get_by_role("figure")
    expect(figure).to_contain_text("python")
    expect(figure.locator(".hljs-keyword").first).to_have_text("def")
    figure.get_by_role("button", name="Copy").click()
    expect(figure.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == code


def test_copying_works_without_a_secure_origin(page: Page, fake: FakeServer) -> None:
    page.add_init_script("Object.defineProperty(Navigator.prototype, 'clipboard', { get: () => undefined })")
    page.reload()
    fake.play(answer("Words to keep."))
    ask(page, "Words, please")
    page.get_by_role("button", name="Copy the answer").click()
    expect(page.get_by_role("button", name="Copied")).to_be_focused()
    box(page).focus()
    page.keyboard.press("Control+V")
    expect(box(page)).to_have_value("Words to keep.")


@pytest.mark.parametrize("way", ["button", "escape"])
def test_an_answer_can_be_stopped(page: Page, fake: FakeServer, way: str) -> None:
    fake.play(answer("The beginning", Gate("never"), " and the end"))
    ask(page, "Go on for ever")
    expect(reply(page)).to_contain_text("The beginning")
    if way == "button":
        page.get_by_role("button", name="Stop", exact=True).click()
    else:
        page.keyboard.press("Escape")
    expect(reply(page)).to_contain_text("You stopped this answer.")
    expect(reply(page)).to_contain_text("The beginning")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert fake.world.cancels == 1


def test_everything_can_be_done_from_the_keyboard(page: Page, fake: FakeServer) -> None:
    fake.play(thinking("Hm."), answer("First.", Gate("on"), " Last."))
    expect(box(page)).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(box(page)).to_have_value("one\ntwo")
    page.keyboard.press("Enter")
    expect(questions(page)).to_have_text("one\ntwo")
    expect(reply(page)).to_contain_text("First.")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(reply(page)).to_contain_text("You stopped this answer.")
    expect(page.get_by_role("button", name="Send")).to_be_focused()  # the focus was not lost with the button

    order = []
    page.evaluate("document.activeElement.blur(); getSelection().removeAllRanges()")
    page.reload()
    expect(box(page)).to_be_focused()
    expect(page.get_by_role("link", name="one two")).to_be_visible()
    page.get_by_role("link", name="Skip to the message box").focus()
    for _ in range(26):
        shown = page.evaluate("getComputedStyle(document.activeElement).outlineStyle !== 'none'")
        name = page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")
        assert shown or name == "Message", f"{name} does not show its focus"  # the box's frame shows it instead
        order.append(name.strip().replace("\n", " "))
        if name == "Message":
            break
        page.keyboard.press("Tab")
    title = "one two"
    assert order[:3] == ["Skip to the message box", "Ponder", "New chat"]
    assert order[3:8] == ["More for all chats", "Documents", "Assistants", "Memory", "Search chats"]
    assert order[8:10] == [title, f"More for “{title}”"]
    rest = [name.split()[0].rstrip(":") for name in order[10:]]
    expected = ["Keys", "Theme", "Edit", "Thought"]
    assert [name for name in rest if name in expected] == expected
    assert order[-1] == "Message"

    page.get_by_role("link", name="Skip to the message box").focus()
    page.keyboard.press("Enter")
    expect(box(page)).to_be_focused()


def test_a_reload_in_the_middle_loses_and_doubles_nothing(page: Page, fake: FakeServer) -> None:
    fake.play(thinking("Long ", "thoughts."), answer(*TALE[:5], Gate("reloaded"), *TALE[5:]))
    ask(page, "Tell me a tale")
    expect(reply(page)).to_contain_text(TALE[4].strip())
    page.reload()
    expect(reply(page)).to_contain_text(TALE[4].strip())
    expect(reply(page)).to_contain_text("Thought for 1.2 s · 43 tokens")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
    fake.open("reloaded")
    expect(reply(page).locator(".prose")).to_have_text("".join(TALE).strip())
    page.reload()  # and once more, now from what the chat keeps
    expect(reply(page).locator(".prose")).to_have_text("".join(TALE).strip())
    expect(reply(page)).to_contain_text("Thought for 1.2 s")
    expect(questions(page)).to_have_count(1)


def test_elapsed_thinking_survives_a_reload(page: Page, fake: FakeServer) -> None:
    started = thinking()[0].model_copy(update={"started_at": thinking()[0].started_at - 75})  # type: ignore[union-attr]
    fake.play([started, ThinkingDelta(text="Still at it."), Gate("never")])
    ask(page, "A hard one")
    expect(reply(page)).to_contain_text(re.compile(r"Thinking…\s+1 min 1[5-9] s"))
    page.reload()
    expect(reply(page)).to_contain_text(re.compile(r"Thinking…\s+1 min (1[5-9]|2\d) s"))


def test_a_lost_connection_is_shown_and_resumed(page: Page, fake: FakeServer, watch: Watch) -> None:
    watch.expect_errors()
    fake.play(answer(*TALE[:5], Gate("back"), *TALE[5:]))
    ask(page, "Tell me a tale")
    expect(reply(page)).to_contain_text(TALE[4].strip())
    fake.refuse_streams(True)
    fake.drop_streams()
    expect(reply(page)).to_contain_text("The connection was lost.")
    expect(reply(page)).to_contain_text(re.compile(r"Trying again in \d+ s"))
    expect(reply(page).get_by_role("button", name="Try now")).to_be_visible()
    fake.open("back")  # the server writes on without a reader
    fake.refuse_streams(False)
    expect(reply(page).locator(".prose")).to_have_text("".join(TALE).strip())
    expect(reply(page)).not_to_contain_text("connection was lost")


def test_a_restart_of_the_server_is_told(page: Page, fake: FakeServer, watch: Watch) -> None:
    watch.expect_errors()
    fake.play(answer("The beginning", Gate("never")))
    ask(page, "Tell me a tale")
    expect(reply(page)).to_contain_text("The beginning")
    fake.lose_runs()
    expect(reply(page)).to_contain_text("The server restarted while this answer was being written.")
    expect(reply(page)).to_contain_text("The beginning")
    expect(page.get_by_role("button", name="Retry")).to_be_visible()


def test_a_failed_run_says_why_in_place_and_can_be_retried(page: Page, fake: FakeServer) -> None:
    fake.play([AnswerDelta(text="Half an"), RunFailed(code="oom", message="Out of memory.", retryable=True)])
    ask(page, "Try this")
    expect(reply(page)).to_contain_text("Out of memory.")
    expect(reply(page)).to_contain_text("Half an")
    fake.play(answer("A whole answer."))
    page.get_by_role("button", name="Retry").click()
    expect(reply(page)).to_contain_text("A whole answer.")
    expect(questions(page)).to_have_count(1)
    assert fake.questions() == ["Try this"]


def test_a_failure_that_would_fail_again_offers_no_retry(page: Page, fake: FakeServer) -> None:
    fake.play([RunFailed(code="too_long", message="The chat is longer than the model's context.", retryable=False)])
    ask(page, "Try this")
    expect(reply(page)).to_contain_text("longer than the model's context")
    expect(page.get_by_role("button", name="Retry")).to_have_count(0)


def test_a_message_that_was_not_taken_is_sent_again_not_doubled(page: Page, fake: FakeServer, watch: Watch) -> None:
    watch.expect_errors()
    fake.refuse_runs(True)
    fake.play(answer("Here I am."))
    ask(page, "Are you there?")
    expect(reply(page)).to_contain_text("The server is starting.")
    fake.refuse_runs(False)
    page.get_by_role("button", name="Retry").click()
    expect(reply(page)).to_contain_text("Here I am.")
    expect(questions(page)).to_have_count(1)
    assert fake.questions() == ["Are you there?"]


def test_a_second_tab_sees_the_same_run_and_cannot_start_another(
    page: Page, fake: FakeServer, new_page: NewPage, watch: Watch
) -> None:
    watch.expect_errors()
    page.goto(fake.url)
    fake.play(answer("One."))
    ask(page, "First")
    expect(reply(page)).to_contain_text("One.")
    second = new_page()
    second.goto(page.url)
    expect(reply(second)).to_contain_text("One.")
    fake.play(answer("Two", Gate("go"), " and more."))
    ask(page, "Second")
    expect(reply(page)).to_contain_text("Two")
    ask(second, "Third")  # this tab has not heard of the run: the server refuses, the words are kept
    expect(second.get_by_text("already being answered")).to_be_visible()
    expect(box(second)).to_have_value("Third")
    fake.open("go")
    for tab in (page, second):
        expect(reply(tab)).to_contain_text("Two and more.")
    fake.play(answer("Three."))
    ask(page, "Another")
    expect(reply(page)).to_contain_text("Three.")
    second.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # what coming back to a tab does
    expect(reply(second)).to_contain_text("Three.")


def test_chats_are_listed_opened_and_deleted(page: Page, fake: FakeServer) -> None:
    fake.play(answer("Red."))
    ask(page, "A colour")
    expect(reply(page)).to_contain_text("Red.")
    page.get_by_role("link", name="New chat").click()
    expect(page.get_by_text(ABOUT)).to_be_visible()
    fake.play(answer("Seven."))
    ask(page, "A number")
    expect(reply(page)).to_contain_text("Seven.")
    expect(page.get_by_role("link", name="A number")).to_be_visible()  # above the other, which moves down for it
    page.get_by_role("link", name="A colour").click()
    expect(reply(page)).to_contain_text("Red.")
    expect(page).to_have_title("A colour · Ponder")
    page.go_back()
    expect(reply(page)).to_contain_text("Seven.")
    page.get_by_role("button", name="More for “A number”").click()
    page.get_by_role("menuitem", name="Delete").click()
    expect(page.get_by_text(ABOUT)).to_be_visible()
    expect(page.get_by_role("link", name="A number")).to_have_count(0)


def test_a_chat_is_erased_with_its_notes(page: Page, fake: FakeServer) -> None:
    fake.play(answer("Red."))
    ask(page, "A colour")
    expect(reply(page)).to_contain_text("Red.")
    page.get_by_role("button", name="More for “A colour”").click()
    with page.expect_request(lambda sent: sent.method == "DELETE") as erased:
        page.get_by_role("menuitem", name="Erase, with its notes").click()
    assert erased.value.url.endswith("?notes=erase")
    expect(page.get_by_role("link", name="A colour")).to_have_count(0)


def test_a_chat_that_is_not_there_is_said_so(page: Page, fake: FakeServer, watch: Watch) -> None:
    watch.expect_errors()
    page.goto(f"{fake.url}/c/nowhere")
    expect(page.get_by_text("There is no such chat.")).to_be_visible()
    page.get_by_role("main").get_by_role("button", name="New chat").click()
    expect(page.get_by_text(ABOUT)).to_be_visible()


def test_the_page_follows_the_answer_until_the_reader_scrolls_up(page: Page, fake: FakeServer) -> None:
    fake.play(answer(*(f"Paragraph {i}.\n\n" for i in range(60)), Gate("up"), *("More.\n\n" for _ in range(20))))
    ask(page, "Something long")
    expect(page.get_by_text("Paragraph 59.")).to_be_in_viewport()
    page.mouse.move(640, 300)
    page.mouse.wheel(0, -600)
    page.wait_for_function("document.documentElement.scrollTop < 3000 && window.scrollY > 0")
    expect(page.get_by_role("button", name="Jump to the latest")).to_be_visible()
    fake.open("up")
    expect(reply(page)).to_contain_text("More.")
    expect(reply(page).get_by_role("button", name="Speed and size")).to_be_visible()
    assert from_end(page) > 400
    page.get_by_role("button", name="Jump to the latest").click()
    expect(page.get_by_role("button", name="Speed and size")).to_be_in_viewport()


def test_what_the_model_writes_cannot_run_or_call_out(page: Page, fake: FakeServer, watch: Watch) -> None:
    hostile = (
        "<script>window.owned = 1</script>\n\n<img src=x onerror='window.owned = 1'>\n\n"
        "![beacon](https://example.org/beacon.png) [go](javascript:window.owned=1)\n\n"
        '```"><img src=x onerror=window.owned=1>\nx\n```\n\n<style>body { display: none }</style>\n\nThe end.'
    )
    fake.play(answer(*(hostile[i : i + 5] for i in range(0, len(hostile), 5))))
    ask(page, "Be wicked")
    expect(reply(page)).to_contain_text("The end.")
    expect(reply(page).get_by_role("button", name="Speed and size")).to_be_visible()
    assert page.evaluate("window.owned") is None
    assert reply(page).locator("img, script, style, [onerror]").count() == 0
    assert watch.hosts == {fake.url.removeprefix("http://")}


def test_light_and_dark_follow_the_system_and_the_toggle_is_kept(fake: FakeServer, new_page: NewPage) -> None:
    def paper(page: Page) -> float:
        """Lightness of the background, 0 to 1, as it is painted."""
        return float(
            page.evaluate("""() => {
                const pen = new OffscreenCanvas(1, 1).getContext("2d");
                pen.fillStyle = getComputedStyle(document.documentElement).backgroundColor;
                pen.fillRect(0, 0, 1, 1);
                const [red, green, blue] = pen.getImageData(0, 0, 1, 1).data;
                return (red + green + blue) / 765;
            }""")
        )

    light, dark = new_page(color_scheme="light"), new_page(color_scheme="dark")
    for page in (light, dark):
        page.goto(fake.url)
        expect(page.get_by_text(ABOUT)).to_be_visible()
    assert paper(light) > 0.9
    assert paper(dark) < 0.3
    dark.get_by_role("button", name="Theme: as the system").click()
    expect(dark.get_by_role("button", name="Theme: light")).to_be_focused()
    assert paper(dark) > 0.9
    dark.reload()
    expect(dark.get_by_role("button", name="Theme: light")).to_be_visible()
    assert paper(dark) > 0.9


def test_a_phone_shows_all_without_scrolling_sideways(fake: FakeServer, new_page: NewPage) -> None:
    page = new_page(viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    page.goto(fake.url)
    expect(page.get_by_text(ABOUT)).to_be_visible()
    assert not scrolls_sideways(page)
    wide = "x" * 300
    fake.play(
        thinking(wide),
        answer(f"{wide}\n\n```\n{wide}\n```\n\n| {wide} | b |\n|---|---|\n| `{wide}` | d |\n\n- {wide}\n\nThe end."),
    )
    ask(page, wide)
    expect(reply(page)).to_contain_text("The end.")
    page.get_by_role("button", name="Thought for").click()
    assert not scrolls_sideways(page)
    page.get_by_role("button", name="Open the list of chats").click()
    drawer = page.get_by_role("dialog", name="Chats")
    expect(drawer.get_by_role("link", name=wide[:60])).to_be_visible()
    page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()


def test_reduced_motion_is_respected(fake: FakeServer, new_page: NewPage) -> None:
    page = new_page(reduced_motion="reduce")
    page.goto(fake.url)
    fake.play([Gate("never")])
    ask(page, "Think")
    expect(reply(page)).to_contain_text("Thinking…")
    assert page.evaluate("document.getAnimations().length") == 0


def test_a_server_that_is_away_at_first_can_be_tried_again(page: Page, fake: FakeServer, watch: Watch) -> None:
    watch.expect_errors()
    page.route("**/api/**", lambda route: route.abort())
    page.reload()
    expect(page.get_by_text("The server cannot be reached.")).to_be_visible()
    page.unroute("**/api/**")
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_text(ABOUT)).to_be_visible()
    expect(page.get_by_text("The server cannot be reached.")).to_have_count(0)


@pytest.fixture(params=["tiny", "pebble"])
def ponder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The address of a real server, with a model of a few tokens and with the bundled one."""
    if request.param == "tiny":
        model = write_checkpoint(tmp_path / "tiny")
    else:
        model = REPOSITORY / "models" / "pebble"
        if not (model / "config.json").exists():
            pytest.skip("models/pebble is not there yet (make train)")
    flags = ["--port", "0", "--model", str(model), "--data-dir", str(tmp_path / "data"), "--threads", "1"]
    command = [sys.executable, "-m", "app.cli", "serve", *flags]
    server: subprocess.Popen[str] = subprocess.Popen(
        command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said: list[str] = []
    try:
        assert server.stdout is not None
        for line in server.stdout:
            said.append(line)
            if ready := re.search(r"Ponder is ready at (http://[\w.:\[\]]+)", line):
                yield ready[1]
                break
        else:
            pytest.fail("the server ended before it was ready:\n" + "".join(said))
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.communicate()


def test_the_real_server_answers_and_keeps_the_chat(ponder: str, new_page: NewPage) -> None:
    page = new_page()
    page.goto(ponder)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    ask(page, "What is 12 × 34?")
    expect(reply(page)).to_have_attribute("aria-busy", "false", timeout=60_000)
    reply(page).get_by_role("button", name="Speed and size").click()
    expect(reply(page)).to_contain_text(re.compile(r"[1-9]\d* tokens? out"))
    written = reply(page).locator(".prose").inner_text()
    assert written.strip()
    page.reload()
    expect(reply(page).locator(".prose")).to_have_text(written)
    expect(page.get_by_role("link", name="What is 12 × 34?")).to_be_visible()
