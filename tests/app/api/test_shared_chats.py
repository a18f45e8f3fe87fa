"""A chat as a file to read: all of it is there, and nothing in it runs, asks anybody or breaks out."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from urllib.parse import unquote

import httpx
import pytest
from markdown_it import MarkdownIt

from app.api.chat_export import SharedChat, SharedTurn, markdown, page
from app.db.answer_steps import AnswerStep, StepCall, StepResult
from app.runs.events import SourceShown
from tests.app import postgres
from tests.app.chatting import ask, change, file, imported, message, new_chat
from tests.app.library import error

DATABASES = postgres.DATABASES_SLOW

HOSTILE = (
    "</style></p></title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>\n\n"
    "![p](https://example.org/beacon.png) [j](javascript:alert(1)) [d](data:text/html,x) [f](file:///etc/passwd)\n\n"
    "<style>body{display:none}</style>\n\n```\n</code></pre><script>x</script>\n```\n"
)
SOURCE = SourceShown(label="S1", document=7, title="Dams <b>", page=3, start=0, end=5, text="Built in 1931.", score=0.5)


def chat(*turns: SharedTurn, title: str = "Dams") -> SharedChat:
    return SharedChat(title, datetime(2026, 11, 22, tzinfo=UTC), list(turns))


class Reader(HTMLParser):
    """The tags and the words of a file."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.tags if tag == name]


@pytest.mark.parametrize("place", ["title", "question", "answer", "thinking", "call", "source", "remark"])
def test_nothing_hostile_becomes_a_tag(place: str) -> None:
    step = AnswerStep(
        content="", calls=[StepCall(id="1", name="n" + HOSTILE * (place == "call"), arguments=HOSTILE)],
        results=[StepResult(call_id="1", text=HOSTILE, untrusted=True)],
    )  # fmt: skip
    told = chat(
        SharedTurn("user", HOSTILE if place == "question" else "q"),
        SharedTurn(
            "assistant", HOSTILE if place == "answer" else "a", thinking=HOSTILE if place == "thinking" else "",
            steps=[step, AnswerStep(content="a")] if place == "call" else (),
            sources=[SOURCE.model_copy(update={"title": HOSTILE, "text": HOSTILE})] if place == "source" else (),
            remark=HOSTILE if place == "remark" else "",
        ),
        title=HOSTILE if place == "title" else "t",
    )  # fmt: skip
    read = Reader(page(told))
    names = {tag for tag, _ in read.tags}
    assert (
        not names & {"script", "img", "iframe", "object", "link", "base", "form", "svg"}
        and len(read.named("style")) == 1
    )
    for _, attrs in read.tags:
        assert not any(name.startswith("on") or name in ("src", "style") for name in attrs)
        assert re.match(r"https?:|mailto:|#", attrs.get("href") or "#")
    assert "alert(1)" in read.words
    # As Markdown what was written stays as it is, but what stands around it is no Markdown of somebody else's.
    outside = "" if place in ("question", "answer", "thinking", "call", "remark") else markdown(told)
    assert "<script" not in MarkdownIt("commonmark").render(outside)


def test_a_file_has_all_that_was_shown() -> None:
    step = AnswerStep(
        content="", calls=[StepCall(id="1", name="calculate", arguments='{"expression": "6*7"}')],
        results=[StepResult(call_id="1", text="42", untrusted=False)],
    )  # fmt: skip
    answer = SharedTurn(
        "assistant", "It is **42**. [S1] See [S2]. It sings. [unsupported]\n\n| a | b |\n|---|---|\n| 1 | 2 |",
        thinking="Hm.", thinking_s=1.25, steps=[step, AnswerStep(content="It is")], sources=[SOURCE], remark="Stopped.",
    )  # fmt: skip
    told = chat(SharedTurn("user", "When?\nTell."), answer)
    html = page(told)
    for part in (
        "When?\nTell.", "Thought for 1.2 s", "Hm.", "<code>calculate</code>", "<pre>42</pre>", "<strong>42</strong>",
        '<a class="cite" href="#t2-S1">1</a>', "See [S2]", "no source", "<td>2</td>", "Stopped.", 'id="t2-S1"',
        "Dams &lt;b&gt;, page 3", "Built in 1931.", "22 November 2026", "light-dark(",
    ):  # fmt: skip
        assert part in html, part
    text = markdown(told)
    for part in (
        "# Dams",
        "## You",
        "> Hm.",
        "`calculate(",
        "```\n42\n```",
        "| 1 | 2 |",
        r"Dams \<b\>, page 3",
        "[S1]",
    ):
        assert part in text, part


def test_the_branch_that_is_shown_is_what_is_shared(ana: httpx.Client) -> None:
    chat = new_chat(ana)
    first = ask(ana, chat, "one")
    second = ask(ana, chat, regenerate=first["parent_id"])
    change(ana, chat, leaf_id=first["id"], title='أهلا / 世界: "x"')
    reply = ana.get(f"/api/chats/{chat}/export?format=html")
    assert (
        reply.headers["content-type"].startswith("text/html") and "sandbox" in reply.headers["content-security-policy"]
    )
    name = reply.headers["content-disposition"]
    assert name.startswith("attachment") and "أهلا 世界 x.html" in unquote(name)
    assert 'filename="chat.html"' in name
    text = ana.get(f"/api/chats/{chat}/export?format=markdown").text
    _, *answers = text.split("## Ponder\n")
    assert second["content"] and [each.strip() for each in answers] == [first["content"].strip()]
    assert ana.get(f"/api/chats/{chat}/export?format=json").json() == ana.get(f"/api/chats/{chat}/export").json()


def test_an_empty_and_an_imported_chat_can_be_shared(ana: httpx.Client) -> None:
    empty = new_chat(ana)
    (whole,) = imported(
        ana, file(message("a", None, "user", "x\n" * 5000), message("b", "a", "assistant", "*" * 20000))
    )
    for each in (empty, whole):
        for form in ("html", "markdown"):
            assert ana.get(f"/api/chats/{each}/export?format={form}").status_code == 200


def test_a_bad_form_and_anothers_chat_are_refused(ana: httpx.Client, bob: httpx.Client) -> None:
    chat = new_chat(ana)
    error(ana.get(f"/api/chats/{chat}/export?format=pdf"), 400, "invalid_value", "format")
    error(bob.get(f"/api/chats/{chat}/export?format=html"), 404, "chat_not_found")
