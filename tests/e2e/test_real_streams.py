"""An answer on its way from the real server to the page: cut wires, reloads, restarts, crashes, and many tabs.

The model is a real checkpoint whose words are known (`scripted_model`), on the real engine in a server process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.real_server import RealServer, running
from tests.e2e.support.scripted_model import write_scripted

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, expect

from tests.e2e.support.real_pages import (
    ask,
    box,
    elapsed,
    opened,
    reply,
    settled,
    shown,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TALE = " ".join(f"Sentence {i} of the tale." for i in range(240))
THOUGHT = " ".join(f"Thought {i} is that." for i in range(120))
LONG = "\n\n".join(f"Paragraph {i} of many." for i in range(160))
TEXTS = {"tale": TALE, "think": f"<think>{THOUGHT}</think>So it is.", "long": LONG}
LOST = "The connection was lost."


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("streams")
    model = write_scripted(folder / "model", TEXTS)
    with running(folder, "--model", str(model), "--dtype", "float32") as server:
        yield server


@pytest.fixture
def server(lively: RealServer) -> Iterator[RealServer]:
    yield lively
    lively.as_new()


@pytest.fixture
def page(new_page: NewPage, server: RealServer) -> Page:
    return new_page()


def until_it_says(page: Page, words: str) -> None:
    expect(reply(page)).to_contain_text(words, timeout=20_000)


def same_as_stored(page: Page, server: RealServer, run: str, whole: str = TALE) -> None:
    settled(page)
    assert server.snapshot(run)["answer"] == whole
    assert shown(page) == " ".join(whole.split())


def test_the_first_words_come_at_once_and_thinking_is_timed(page: Page, server: RealServer) -> None:
    server.turn(hold=True)
    page.goto(server.url)
    ask(page, "think hard")
    expect(reply(page)).to_contain_text(re.compile(r"Thinking…\s+\d+\.\d s"))
    server.turn(step_s=0.02)
    trace = page.get_by_role("region", name="What the model thought")
    expect(trace).to_contain_text("Thought 3 is that.")
    expect(reply(page)).to_contain_text(re.compile(r"Thinking…\s+\d+\.\d s"))
    server.turn()
    expect(reply(page)).to_contain_text(re.compile(r"Thought for \d+\.\d s · \d+ tokens"))
    until_it_says(page, "So it is.")
    expect(trace).to_be_hidden()


def test_the_time_of_thinking_goes_on_across_a_reload(page: Page, server: RealServer) -> None:
    server.turn(step_s=0.02)
    chat, _ = server.ask("think hard")
    opened(page, server, chat)
    until_it_says(page, "Thought 2")
    server.turn(hold=True)
    expect(reply(page).locator("time")).to_have_text(re.compile(r"[3-9]\.\d s"))
    before = elapsed(page)
    page.reload()
    expect(reply(page).locator("time")).to_be_visible()
    assert elapsed(page) >= before


def test_a_long_prompt_shows_how_far_it_is_read(page: Page, server: RealServer) -> None:
    server.turn(step_s=0.3)
    chat, run = server.ask("tale " + "x" * 5000)
    opened(page, server, chat)
    bar = page.get_by_role("progressbar", name="Read of what was asked")
    expect(bar).to_be_visible()
    expect(reply(page)).to_contain_text(re.compile(r"[\d,]+ of 5,\d\d\d tokens"))
    assert 0 < float(bar.evaluate("bar => bar.position")) < 1
    server.turn()
    same_as_stored(page, server, run)
    expect(bar).to_have_count(0)


def test_a_cut_during_thinking_loses_nothing(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()
    server.turn(step_s=0.01)
    chat, run = server.ask("think hard")
    opened(page, server, chat)
    until_it_says(page, "Thought 5")
    server.wire.cut()
    expect(reply(page)).to_contain_text(LOST)
    expect(reply(page)).to_contain_text(re.compile(r"Trying again in \d+ s"))
    server.turn()
    while server.snapshot(run)["status"] == "running":
        page.wait_for_timeout(20)
    expect(reply(page)).not_to_contain_text("So it is.")
    expect(reply(page)).to_contain_text(re.compile(r"Trying again in ([4-9]|1\d) s"), timeout=30_000)
    server.wire.mend()  # long before it tries by itself
    page.get_by_role("button", name="Try now").click()
    same_as_stored(page, server, run, "So it is.")
    expect(reply(page)).not_to_contain_text(LOST)
    page.get_by_role("button", name="Thought for").click()
    trace = page.get_by_role("region", name="What the model thought").inner_text()
    assert " ".join(trace.split()) == THOUGHT == server.snapshot(run)["thinking"]


def test_a_wire_that_is_cut_and_whole_again_is_taken_up_by_itself(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()
    server.turn(step_s=0.005)
    chat, run = server.ask("tale of it")
    opened(page, server, chat)
    for sentence in (3, 9, 20):
        until_it_says(page, f"Sentence {sentence} of")
        server.wire.drop()
    server.turn()
    same_as_stored(page, server, run)


def test_a_question_whose_answer_got_lost_is_asked_once(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()
    page.goto(server.url)
    ask(page, "think once")
    settled(page)
    server.wire.mute()
    ask(page, "tale of it")
    until_it_says(page, "The server cannot be reached.")
    chat = f"/api/chats/{page.url.rsplit('/', 1)[-1]}"
    while server.http.get(chat).json()["active_run_id"] is not None:  # it was asked, and is answered unheard
        page.wait_for_timeout(20)
    server.wire.mend()
    page.get_by_role("button", name="Retry").last.click()
    settled(page)
    assert shown(page) == TALE
    messages = server.http.get(chat).json()["messages"]
    assert [each["content"] for each in messages] == ["think once", "So it is.", "tale of it", TALE]
    assert [len(each["siblings"]) for each in messages] == [1, 1, 1, 1]  # nor is it asked in another branch


def test_a_reload_in_mid_stream_loses_and_doubles_nothing(page: Page, server: RealServer) -> None:
    server.turn(step_s=0.005)
    chat, run = server.ask("tale of it")
    opened(page, server, chat)
    until_it_says(page, "Sentence 9 of")
    page.reload()
    until_it_says(page, "Sentence 12 of")
    server.turn()
    same_as_stored(page, server, run)


def test_a_second_tab_stops_the_run_of_the_first(page: Page, server: RealServer, new_page: NewPage) -> None:
    server.turn(step_s=0.02)
    page.goto(server.url)
    ask(page, "tale of it")
    until_it_says(page, "Sentence 1 of")
    second = new_page()
    second.goto(page.url)
    until_it_says(second, "Sentence 2 of")
    second.get_by_role("button", name="Stop", exact=True).click()
    for tab in (page, second):
        expect(reply(tab)).to_contain_text("You stopped this answer.")
    assert shown(page) == shown(second)
    assert "ponder_requests_running 0.0" in httpx.get(f"{server.direct}/metrics").text


def test_eight_tabs_watch_one_run_and_a_ninth_page_loads(page: Page, server: RealServer, watch: Watch) -> None:
    server.turn(step_s=0.1)
    chat, run = server.ask("tale of it")
    tabs = [
        page,
        *(watch.over(page.context.new_page()) for _ in range(7)),
    ]  # in one browser: its connections are shared
    for tab in tabs:
        opened(tab, server, chat)
        until_it_says(tab, "Sentence 0 of")
    ninth = watch.over(page.context.new_page())
    ninth.goto(server.url)
    expect(ninth.get_by_role("button", name="tale", exact=True)).to_be_visible()  # a starter: the server has answered
    seen = server.snapshot(run)["answer"]
    assert server.snapshot(run)["status"] == "running"
    for tab in tabs:
        until_it_says(tab, seen[: seen.rindex(".")][-24:])
    server.turn()
    for tab in tabs:
        same_as_stored(tab, server, run)


def test_tabs_with_runs_of_their_own_leave_connections_for_the_rest(
    page: Page, server: RealServer, watch: Watch
) -> None:
    server.turn(step_s=0.05)
    runs = [server.ask("tale of it") for _ in range(7)]
    tabs = [page, *(watch.over(page.context.new_page()) for _ in range(6))]
    for tab, (chat, _) in zip(tabs, runs, strict=True):
        opened(tab, server, chat)
    for tab in tabs:
        until_it_says(tab, "Sentence 3 of")
    tabs[-1].get_by_role("button", name="Stop", exact=True).click()
    expect(reply(tabs[-1])).to_contain_text("You stopped this answer.")
    server.turn()
    for tab, (_, run) in zip(tabs[:-1], runs, strict=False):
        same_as_stored(tab, server, run)


def test_a_tab_that_is_hidden_lets_its_stream_go_and_catches_up(page: Page, server: RealServer) -> None:
    server.turn(step_s=0.02)
    chat, run = server.ask("tale of it")
    # Headless Chromium shows every page, so the page is told otherwise.
    page.add_init_script(
        "let hidden = false; Object.defineProperty(Document.prototype, 'hidden', { get: () => hidden });"
        "window.hide = (it) => { hidden = it; document.dispatchEvent(new Event('visibilitychange')); };"
    )
    opened(page, server, chat)
    until_it_says(page, "Sentence 2 of")
    with page.expect_event("requestfailed", lambda request: f"/runs/{run}/events" in request.url):
        page.evaluate("hide(true)")
    server.turn()
    while server.snapshot(run)["status"] == "running":
        page.wait_for_timeout(20)
    expect(reply(page)).to_have_attribute("aria-busy", "true")
    page.evaluate("hide(false)")
    same_as_stored(page, server, run)


def test_a_server_killed_in_mid_answer_is_told_with_what_was_kept(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()
    server.turn(step_s=0.01)
    page.goto(server.url)
    ask(page, "tale of it")
    until_it_says(page, "Sentence 5 of")
    server.kill()
    expect(reply(page)).to_contain_text(LOST)
    written = shown(page)
    server.turn()
    server.start()
    until_it_says(page, "The server restarted while this answer was being written. What is there was kept.")
    assert shown(page).startswith(written) and TALE.startswith(shown(page))
    page.reload()
    until_it_says(page, "The server restarted while this answer was being written.")
    assert shown(page).startswith(written)
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("article", name="You").last).to_be_visible()
    until_it_says(page, TALE.split(". ")[-1])  # the one before it was settled, too
    settled(page)
    assert shown(page) == TALE


def test_a_chat_that_was_open_goes_on_after_a_restart(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()
    page.goto(server.url)
    ask(page, "think once")
    until_it_says(page, "So it is.")
    settled(page)
    server.stop()
    ask(page, "tale of it")
    until_it_says(page, "The server cannot be reached.")
    server.start()
    page.get_by_role("button", name="Retry").last.click()
    settled(page)
    assert shown(page) == TALE
    expect(page.get_by_role("article", name="You")).to_have_text(["think once", "tale of it"])


def test_an_engine_that_breaks_in_mid_answer_is_told_with_what_was_kept(
    page: Page, server: RealServer, watch: Watch
) -> None:
    watch.expect_errors()
    server.turn(step_s=0.01)
    page.goto(server.url)
    ask(page, "tale of it")
    until_it_says(page, "Sentence 5 of")
    server.turn(crash=True)
    until_it_says(page, "The engine failed while this answer was being written. What is there was kept.")
    settled(page)
    assert shown(page).startswith("Sentence 0 of") and TALE.startswith(shown(page))
    page.get_by_role("button", name="Retry").click()
    expect(reply(page).get_by_role("button", name="Retry")).to_be_visible()  # told again, and nothing hangs


def test_the_page_follows_until_the_reader_scrolls_up(page: Page, server: RealServer) -> None:
    server.turn(step_s=0.004)
    chat, _ = server.ask("long one")
    opened(page, server, chat)
    until_it_says(page, "Paragraph 40 of")
    page.mouse.move(640, 300)
    page.mouse.wheel(0, -700)
    latest = page.get_by_role("button", name="Jump to the latest")
    expect(latest).to_be_visible()
    before = page.evaluate("scrollY")
    until_it_says(page, "Paragraph 80 of")
    assert page.evaluate("scrollY") == before
    latest.click()
    settled(page)
    expect(page.get_by_text("Paragraph 159 of many.", exact=True)).to_be_in_viewport()
    assert page.evaluate("(e => e.scrollHeight - e.clientHeight - e.scrollTop)(document.documentElement)") < 2


def test_a_limit_within_thinking_closes_it_and_says_so(page: Page, server: RealServer) -> None:
    chat, run = server.ask("think hard", max_tokens=20)
    opened(page, server, chat)
    settled(page)
    expect(page.get_by_role("button", name=re.compile(r"Thought for \d+\.\d s"))).to_have_attribute(
        "aria-expanded", "false"
    )
    until_it_says(page, "The answer ends here because it reached its limit of 20 tokens.")
    assert server.snapshot(run)["answer"] == ""
    expect(box(page)).to_be_enabled()
