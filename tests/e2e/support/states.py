"""The main states of the page on the fake server, each one way to bring it there. A new state is one line in `STATES`.

What looks at all states (accessibility, pictures) takes them from here. Knows nothing of what is looked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from playwright.sync_api import expect

from app.runs.events import (
    AnswerDelta,
    AnswerDone,
    PrefillProgress,
    RemoteSent,
    RouteAnswering,
    RouteTried,
    RunCompleted,
    RunFailed,
    RunQueued,
    StrategyEvent,
    ThinkingDelta,
    ThinkingProgress,
    ThinkingStarted,
    ThinkingWait,
    ToolProgress,
)
from tests.e2e.support.fake_artifacts import SHOWN, keep, with_files
from tests.e2e.support.fake_server import ABOUT, USAGE, FakeServer, Gate, Script, answer, thinking
from tests.e2e.support.hostile_apps import app_page
from tests.e2e.support.told import (
    agent,
    agent_done,
    approval,
    call,
    candidates,
    dam,
    found,
    question,
    result,
    searched,
    support,
)

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

Bring = Callable[["Page", FakeServer], None]

WORDS = (
    "# A heading\n\nSome *words*, a [link](https://example.org/a) and `code`.\n\n```python\ndef f(x):\n    return x + 1"
    "\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n1. one\n2. two\n\n> A quotation.\n\nThe end."
)
FORMULAS = "$e^{i\\pi} + 1 = 0$\n\n$$\n\\sum_{i=1}^n i = \\frac{n(n+1)}{2}\n$$\n\nThe end."
NUMBERS = (
    '{"columns": ["city", "people", "area"], "rows": [["Bonn", 331, 141], ["Ulm", 128, 118], ["Köln", 1087, 405]]}'
)
HOLD: Script = [Gate("hold")]
WRITE = call("write_file", '{"path": "plan.md"}')
FIRST, SECOND = "The dam was finished in **1931**, two years late. [S1]", "It cost more than planned. [unsupported]"


def reply(page: Page) -> Locator:
    return page.get_by_role("article", name="Ponder").last


def asked(says: str, *script: Script, then: Bring | None = None) -> Bring:
    """A question whose answer goes as the script says, once the page says `says`."""

    def bring(page: Page, fake: FakeServer) -> None:
        fake.play(*script)
        box = page.get_by_role("textbox", name="Message")
        box.fill("What goes on?")
        box.press("Enter")
        expect(reply(page)).to_contain_text(says)
        if then is not None:
            then(page, fake)

    return bring


def asks_first(then: Bring | None = None) -> Bring:
    """Asks for approval; the time to decide begins here, not when this file is imported."""

    def bring(page: Page, fake: FakeServer) -> None:
        asks: Script = [WRITE, approval('write_file(\n  path = "plan.md"\n)'), *HOLD]
        asked("medium risk", asks, then=then)(page, fake)

    return bring


def asks_where(page: Page, fake: FakeServer) -> None:
    asks: Script = [call("book_table", "{}"), question("Where?", ["Inside", "Outside"]), *HOLD]
    asked("Where?", asks)(page, fake)


def pressed(name: str, appears: str = "") -> Bring:
    """A button pressed, after which `appears`, a selector, is there."""

    def bring(page: Page, _: FakeServer) -> None:
        page.get_by_role("button", name=name).last.click()
        if appears:
            expect(page.locator(appears).last).to_be_visible()

    return bring


def control(name: str, checks: str = "") -> Bring:
    """A control opened, and what is ticked in it."""

    def bring(page: Page, _: FakeServer) -> None:
        page.get_by_role("group", name="How to answer").get_by_role("button", name=name).click()
        expect(page.get_by_role("dialog")).to_be_visible()
        if checks:
            page.get_by_role("checkbox", name=checks).check()

    return bring


def grounded() -> Script:
    sources, passage = dam()
    text = f"{FIRST} {SECOND}"
    return [
        found("answer", sources),
        AnswerDelta(text=text),
        support(1, text, FIRST, "supported", [passage]),
        support(2, text, SECOND, "unsupported", []),
        AnswerDone(text=text, finish_reason="stop"),
        RunCompleted(usage=USAGE),
    ]


def welcome(page: Page, _: FakeServer) -> None:
    expect(page.get_by_text(ABOUT)).to_be_visible()


def missing(page: Page, fake: FakeServer) -> None:
    page.goto(f"{fake.url}/c/nowhere")
    expect(page.get_by_text("There is no such chat.")).to_be_visible()


def cut_off(page: Page, fake: FakeServer) -> None:
    fake.refuse_streams(True)
    fake.drop_streams()
    expect(page.get_by_role("button", name="Try now")).to_be_visible()


def drawer(page: Page, fake: FakeServer) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    asked("The end.", answer("The end."))(page, fake)
    page.get_by_role("button", name="Open the list of chats").click()
    expect(page.get_by_role("dialog", name="Chats")).to_be_visible()


def set_formulas(page: Page, _: FakeServer) -> None:
    expect(page.locator(".formula.set math")).to_have_count(2)


def keys(page: Page, _: FakeServer) -> None:
    page.keyboard.press("Control+/")
    expect(page.get_by_role("dialog", name="Keys and language")).to_be_visible()


def row_menu(*items: str) -> Bring:
    """The menu of a chat, or what its items lead to."""

    def bring(page: Page, _: FakeServer) -> None:
        page.get_by_role("button", name="More for “What goes on?”").click()
        expect(page.get_by_role("menu")).to_be_visible()
        for item in items:
            page.get_by_role("menuitem", name=item).click()

    return bring


def deleted(page: Page, fake: FakeServer) -> None:
    row_menu("Delete")(page, fake)
    expect(page.get_by_role("button", name="Undo")).to_be_visible()


def editing(page: Page, _: FakeServer) -> None:
    page.get_by_role("button", name="Edit the question").click()
    expect(page.get_by_role("textbox", name="Your question")).to_be_focused()


def versions(page: Page, _: FakeServer) -> None:
    page.get_by_role("button", name="Answer again").click()
    expect(page.get_by_text("2 / 2")).to_be_visible()
    expect(reply(page).get_by_role("button", name="Speed and size")).to_be_visible()


def searched_for(words: str) -> Bring:
    def bring(page: Page, _: FakeServer) -> None:
        page.get_by_role("searchbox").fill(words)
        expect(page.get_by_role("navigation", name="Chats").get_by_role("status")).to_be_visible()

    return bring


def new_folder(page: Page, _: FakeServer) -> None:
    page.get_by_role("button", name="More for all chats").click()
    page.get_by_role("menuitem", name="New folder").click()
    expect(page.get_by_role("textbox", name="Name of the folder")).to_be_focused()


def with_an_app(script: str) -> Bring:
    """An MCP app that is open, asks for the network, and runs a script."""

    def bring(page: Page, fake: FakeServer) -> None:
        style = "<style>body { font: 16px sans-serif; background: #eef }</style>"
        content = app_page(f"await greet(); {script}", f"{style}<main><h1>Noon in Ulm</h1></main>")
        app = keep(fake.world.artifacts, "clock.html", content, replace(SHOWN, domains=("https://time.example.org",)))
        made = with_files("clock", "12:00 in Ulm", app, call_id="c")
        asked("The end.", [call("clock", '{"zone": "Ulm"}', "c"), made, *answer("The end.")])(page, fake)
        page.get_by_role("button", name="Open app").click()
        expect(page.get_by_role("region", name="App clock.html").get_by_role("listitem").or_(
            page.get_by_role("button", name="Put them there")).first).to_be_visible()  # fmt: skip

    return bring


def with_a_file(name: str, content: str, then: Bring = lambda page, fake: None) -> Bring:
    """A call that made a file, whose panel is opened."""

    def bring(page: Page, fake: FakeServer) -> None:
        keep(fake.world.artifacts, name, "an earlier version")
        file = keep(fake.world.artifacts, name, content)
        made = with_files("python", "It ran.", file, call_id="c")
        asked("The end.", [call("python", "{}", "c"), made, *answer("The end.")])(page, fake)
        page.get_by_role("button", name=f"{name} version 2").click()
        expect(page.get_by_role("dialog").get_by_role("combobox")).to_be_visible()
        then(page, fake)

    return bring


def charted(page: Page, _: FakeServer) -> None:
    page.get_by_role("button", name="sql_query").click()
    page.get_by_role("button", name="Chart", exact=True).click()
    expect(page.get_by_role("img", name="Bar chart")).to_be_visible()


def delegating(page: Page, _: FakeServer) -> None:
    """The tree of a call's sub-agents, with the first two of them open."""
    for name in ("Sub-agents 2 of 3", "1. Find how high", "2. Find what"):
        page.get_by_role("button", name=name).click()
    page.get_by_role("button", name="search_documents").click()
    expect(page.get_by_role("list", name="Sub-agents")).to_contain_text("96 metres")


def private_chat(page: Page, fake: FakeServer) -> None:
    """A chat that is private now, with an answer of another server's model from before."""
    fake.world.offer.models = [*fake.world.offer.models, {"id": "big", "thinks": False, "tools": True, "remote": True}]
    page.reload()
    asked("big answered", [SENT, *answer("The end.")])(page, fake)
    page.get_by_text("big answered").click()
    page.get_by_role("group", name="How to answer").get_by_role("button", name="Private").click()
    expect(page.get_by_text("Private: nothing of this chat").first).to_be_visible()


def comparing(page: Page, fake: FakeServer) -> None:
    """The next question, asked of three: their answers side by side."""
    page.get_by_role("group", name="How to answer").get_by_role("button", name="Compare").click()
    page.get_by_role("checkbox", name="Ask the next question of several").check()
    page.get_by_role("button", name="One more").click()
    page.keyboard.press("Escape")
    box = page.get_by_role("textbox", name="Message")
    box.fill("And now?")
    box.press("Enter")
    expect(page.get_by_role("button", name="Go on with this one")).to_have_count(3)
    expect(reply(page)).to_contain_text("The end.")


def shelved(then: Bring) -> Bring:
    """With an assistant of one's own, another's, and two prompts."""

    def bring(page: Page, fake: FakeServer) -> None:
        shelf = fake.world.shelf
        settings = {"system": "Arr.", "temperature": 0.5}
        about = {"icon": "P", "description": "Speaks like one.", "members": ["ana"]}
        shelf.add("presets", name="Pirate", settings=settings, **about)
        shelf.add("presets", name="Editor", owner="bob", role="reader", everybody=True)
        for name in ("sum-up", "translate"):
            shelf.add("prompts", name=name, text="Put {{text}} in other words.")
        page.reload()
        then(page, fake)

    return bring


def picked(page: Page, _: FakeServer) -> None:
    page.get_by_role("button", name="Pirate").click()
    page.get_by_role("textbox", name="Message").fill("/")
    expect(page.get_by_role("option")).to_have_count(2)


def presets(*buttons: str) -> Bring:
    """The assistants' page, and what buttons of it lead to."""

    def bring(page: Page, fake: FakeServer) -> None:
        page.goto(f"{fake.url}/presets")
        expect(page.get_by_role("heading", name="Editor")).to_be_visible()
        for button in buttons:
            page.get_by_role("button", name=button).click()
            expect(page.get_by_role("textbox").last).to_be_visible()

    return bring


SENT = RemoteSent(
    model="big", why="the request names it", messages=3, characters=1234, images=0, passages=1,
    tool_results=0,
)  # fmt: skip
STARTED = ThinkingStarted(started_at=time.time(), max_tokens=1000, waits=2)
THOUGHTS: Script = [STARTED, ThinkingDelta(text="Hm. "), ThinkingWait(number=1, of=2), ThinkingDelta(text="Or else."),
                    ThinkingProgress(tokens=250)]  # fmt: skip
TRIED = RouteTried(model="small", passed=False, why="confidence 0.42 of 0.97", tokens=9, cost=2.5, seconds=0.2)
ROUTED: Script = [TRIED, RouteAnswering(model="large"), StrategyEvent(name="Looked", fields={"at": 3})]
PROGRESS = ToolProgress.model_validate({"call_id": "c", "name": "fetch", "text": "page 3", "done": 3, "total": 4})
CALLED: Script = [call("calculator", '{"expression": "27+58"}'), result("calculator", "85")]
DELEGATED: Script = [
    call("delegate", '{"tasks": [{"instructions": "Find the height."}, {"instructions": "Find the cost."}]}'),
    agent(1, "Find how high the dam of Orsk is, and say where it says so.", "calculator", "search_documents"),
    agent(2, "Find what the dam of Orsk has cost."), agent(3, "Find who built it."),
    call("search_documents", '{"query": "height of the dam"}', "c1", "agent_1"),
    result("search_documents", "It is 96 metres high.", "c1"),
    agent_done(1, "It is **96 metres** high."), agent_done(2, "It ended without an answer.", failed=True), *HOLD,
]  # fmt: skip
BROKE: Script = [AnswerDelta(text="Half an"), RunFailed(code="engine_stopped", message="It broke.", retryable=True)]
LIMITED = AnswerDone(text="As far as", finish_reason="length")
CUT_SHORT: Script = [AnswerDelta(text="As far as"), LIMITED, RunCompleted(usage=USAGE)]
NOTHING_FOUND: Script = [found("none", dam()[0], dam()[1:]), *answer("The sources do not say.")]

STATES: dict[str, Bring] = {
    "welcome": welcome,
    "no such chat": missing,
    "queued": asked("ahead", [RunQueued(position=2), *HOLD]),
    "reading": asked("Reading…", [PrefillProgress(processed=2000, total=8000, cached=512), *HOLD]),
    "thinking": asked("250 of 1,000 tokens", THOUGHTS, HOLD),
    "answering": asked("A quotation.", thinking("Hm."), [AnswerDelta(text=WORDS[:-8]), *HOLD]),
    "answered": asked("The end.", thinking("Hm."), answer(WORDS), then=pressed("Thought for", ".trace")),
    "called": asked("The end.", CALLED, answer("The end."), then=pressed("calculator", "[aria-label=Result]")),
    "calling": asked("page 3", [call("fetch", "{}", "c"), PROGRESS, *HOLD]),
    "sub-agents": asked("2 of 3 done", DELEGATED, then=delegating),
    "approval": asks_first(),
    "chart of a result": asked(
        "The end.", [call("sql_query", "{}", "c"), result("sql_query", NUMBERS, "c")], answer("The end."), then=charted
    ),
    "table of a file": with_a_file("cities.csv", "city,people\nBonn,331885\nKöln,=1+1\n"),
    "page of a file": with_a_file("page.html", "<!doctype html><html lang=en><title>t</title><main><h1>Hi</h1></main>"),
    "app": with_an_app("await ask('tools/call', { name: 'tick' })"),
    "app that wants to write": with_an_app(
        "void ask('ui/message', { role: 'user', content: { type: 'text', text: 'Hi' } })"
    ),
    "app that asks for a call": with_an_app("void ask('tools/call', { name: 'wind', arguments: { turns: 3 } })"),
    "denied": asks_first(then=pressed("Deny")),
    "question of a tool": asks_where,
    "failed": asked("The engine failed", BROKE),
    "cut short": asked("reached its limit", CUT_SHORT),
    "connection lost": asked("Half", [AnswerDelta(text="Half"), *HOLD], then=cut_off),
    "stopped": asked("Half", [AnswerDelta(text="Half"), *HOLD], then=pressed("Stop", ".remark")),
    "citations": asked("two years late", grounded()),
    "passage": asked("two years late", grounded(), then=pressed("Source 1:", "dialog[open], [role=dialog]")),
    "no evidence": asked("do not say", NOTHING_FOUND),
    "tree": asked("states", searched(12), HOLD),
    "tree as a list": asked("states", searched(12), HOLD, then=pressed("List", "li li")),
    "candidates": asked("2 answers", candidates("It is 42.", "It is 408.", chosen=1), answer("408"),
                        then=pressed("2 answers written", "li")),
    "routed": asked("large answer", ROUTED, answer("408")),
    "private chat": private_chat,
    "choice of answers to compare": control("Compare", "Ask the next question of several"),
    "answers side by side": asked("The end.", thinking("Hm."), answer(WORDS), then=comparing),
    "model": control("Model"),
    "thinking control": control("Thinking"),
    "strategy": control("Strategy"),
    "tools": control("Tools"),
    "documents": control("Documents"),
    "sampling": control("Sampling"),
    "system prompt": control("System prompt"),
    "formulas": asked("The end.", answer(FORMULAS), then=set_formulas),
    "menu of a chat": asked("The end.", answer("The end."), then=row_menu()),
    "menu within a menu": asked("The end.", answer("The end."), then=row_menu("Move to a folder")),
    "renaming": asked("The end.", answer("The end."), then=row_menu("Rename")),
    "new folder": new_folder,
    "deleted": asked("The end.", answer("The end."), then=deleted),
    "found": asked("The end.", answer("The end."), then=searched_for("What")),
    "not found": searched_for("nothing"),
    "editing": asked("The end.", answer("The end."), then=editing),
    "versions": asked("The end.", answer("The end."), then=versions),
    "keys and language": keys,
    "drawer on a phone": drawer,
    "assistant and prompts at hand": shelved(picked),
    "assistants": shelved(presets()),
    "assistant": shelved(presets("Edit “Pirate”")),
    "prompt": shelved(presets("Edit “sum-up”")),
    "assistant shared": shelved(presets("Share “Pirate”")),
}  # fmt: skip
