"""Renders a chat as an HTML page or as Markdown, to be shared.

Both have the chat's current branch, with the sources that each answer rests on. The page is one file that needs nothing
else: no script and no request, light or dark as the reader's system is, in the page's colours and the reader's own
fonts. All text is escaped: HTML inside Markdown is shown as text and pictures become links, so opening the file
contacts no server. In Markdown, questions and answers stay as they were written, and the rest is in quotations and
lists.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict

from app.db.answer_steps import AnswerStep
from app.db.chat_store import Tree
from app.db.run_store import LoggedEvent
from app.db.sqlite import Row
from app.runs.events import SourceShown

if TYPE_CHECKING:
    from app.db.store import Store


@dataclass(frozen=True, slots=True)
class SharedTurn:
    """A question, or an answer. `remark` notes how it ended, unless it is complete."""

    role: str
    content: str
    thinking: str = ""
    thinking_s: float | None = None
    steps: Sequence[AnswerStep] = ()
    sources: Sequence[SourceShown] = field(default=())
    remark: str = ""
    images: Sequence[str] = ()  # of a question, data: URLs
    files: Sequence[str] = ()  # names of those that a question was sent with

    @property
    def thought(self) -> str:
        """Time that it thought, in words."""
        return "Thought" if self.thinking_s is None else f"Thought for {self.thinking_s:.1f} s"


@dataclass(frozen=True, slots=True)
class SharedChat:
    title: str
    begun: datetime
    turns: list[SharedTurn]


async def shared_chat(store: Store, user: str, chat_id: str) -> SharedChat:
    """
    Raises:
        NotThere: the user has no such chat.
    """
    chat, messages = await store.chats.whole(user, chat_id)
    shown = await asyncio.to_thread(lambda: Tree(messages).branch(chat["leaf_id"]))  # of thousands, perhaps
    events = {each["run_id"]: await store.runs.events(each["run_id"]) for each in shown if each["run_id"] is not None}
    turns = await asyncio.to_thread(lambda: [_turn_of(each, events.get(each["run_id"], ())) for each in shown])
    return SharedChat(chat["title"] or "Untitled chat", datetime.fromtimestamp(chat["created_at"], UTC), turns)


def _turn_of(message: Row, events: Sequence[LoggedEvent]) -> SharedTurn:
    remarks = {
        "running": "This answer was still being written.", "cancelled": "This answer was stopped.",
        "failed": f"This answer failed. {message['error'] or ''}".strip(),
    }  # fmt: skip
    return SharedTurn(
        message["role"], message["content"], message["thinking"], message["thinking_s"], message["steps"],
        _sources(events), remarks.get(message["status"], ""), message["images"],
        [each["name"] for each in message["files"]],
    )  # fmt: skip


def _sources(events: Sequence[LoggedEvent]) -> list[SourceShown]:
    """Those that the answer names; all that were found where it names none."""
    found = [json.loads(event.data) for event in events if event.type == "citation.sources"]
    refs = [json.loads(event.data) for event in events if event.type == "citation.ref"]
    sources = [SourceShown(**source) for each in found if each["verdict"] != "none" for source in each["sources"]]
    named = {citation["label"] for ref in refs for citation in ref["citations"]}
    return [source for source in sources if source.label in named] or sources


NAMES = {"user": "You", "assistant": "Ponder"}


def markdown(chat: SharedChat) -> str:
    parts = [f"# {_line(chat.title)}", f"*{chat.begun:%Y-%m-%d %H:%M} UTC*"]
    for turn in chat.turns:
        parts += [f"## {NAMES[turn.role]}", *_markdown_parts(turn)]
    return "\n\n".join(parts) + "\n"


def _markdown_parts(turn: SharedTurn) -> Iterator[str]:
    if turn.thinking:
        yield _quote(f"*{turn.thought}*\n\n{turn.thinking.strip()}")
    for step in turn.steps:
        for call, result in zip(step.calls, step.results, strict=False):
            yield f"Called {_code(f'{call.name}({call.arguments})')}:\n\n{_fenced(result.text)}"
    for at, url in enumerate(turn.images, 1):
        yield f"![Image {at} of the question]({url})"
    if turn.files:
        yield f"Files: {', '.join(map(_line, turn.files))}"
    if turn.content:
        yield turn.content.strip()
    if turn.remark:
        yield f"*{turn.remark}*"
    if turn.sources:
        yield "Sources:\n\n" + "\n".join(map(_markdown_source, turn.sources))


def _markdown_source(source: SourceShown) -> str:
    page = "" if source.page is None else f", page {source.page}"
    return f"- [{source.label}] {_line(source.title)}{page}: “{_line(source.text)}”"


def _line(text: str) -> str:
    """Text that is Markdown of one line, and nothing but text."""
    return re.sub(r"([\\`*_{}\[\]<>#|!])", r"\\\1", " ".join(text.split()))


def _quote(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def _longest(text: str) -> int:
    """Of the runs of backticks in it."""
    return max(map(len, re.findall(r"`+", text)), default=0)


def _code(text: str) -> str:
    ticks = "`" * (_longest(text) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{space}{' '.join(text.split())}{space}{ticks}"


def _fenced(text: str) -> str:
    fence = "`" * max(3, _longest(text) + 1)
    return f"{fence}\n{text}\n{fence}"


STYLE = """
:root{color-scheme:light dark;--paper:light-dark(#fafcfc,#14191c);--tint:light-dark(#e3efee,#222f33);
--line:light-dark(#dde3e4,#2c3438);--ink:light-dark(#1b2628,#e5eaeb);--muted:light-dark(#566568,#9fadb0);
--accent:light-dark(#11655f,#7fd0c6);--sunk:light-dark(#f2f6f6,#101416)}
*{box-sizing:border-box}
body{margin:0;padding:0 1rem;background:var(--paper);color:var(--ink);font:1rem/1.65 system-ui,sans-serif}
header,main,footer{max-width:44rem;margin-inline:auto}
header{padding:3rem 0 1rem;border-bottom:1px solid var(--line)}
h1{margin:0;font:400 2rem/1.15 ui-serif,Georgia,serif;overflow-wrap:anywhere;text-wrap:balance}
header p,footer,.remark{color:var(--muted);font-size:.875rem}
header p{margin:.5rem 0 0}
footer{padding:3rem 0 2rem}
article{margin:2rem 0}
article>h2{margin:0 0 .4rem;color:var(--muted);font-size:.8rem;font-weight:600}
.question{display:flex;flex-direction:column;align-items:flex-end}
.asked{max-width:min(85%,34rem);margin:0;padding:.65rem 1rem;border-radius:1.1rem 1.1rem .3rem 1.1rem;
background:var(--tint);white-space:pre-wrap;overflow-wrap:anywhere}
.files{display:flex;flex-wrap:wrap;justify-content:flex-end;gap:.4rem;max-width:min(85%,34rem);margin:0 0 .4rem;
padding:0;list-style:none;font-size:.875rem}
.files li{padding:.2rem .7rem;border:1px solid var(--line);border-radius:.6rem;overflow-wrap:anywhere}
.prose{overflow-wrap:anywhere}
.prose>*{margin-block:.9rem}
.prose :is(h3,h4,h5,h6){line-height:1.3}
table{display:block;overflow-x:auto;border-collapse:collapse}
:is(th,td){padding:.4rem 1.25rem .4rem 0;border-bottom:1px solid var(--line);text-align:start;vertical-align:top}
pre{margin:.5rem 0;padding:.75rem .9rem;overflow-x:auto;border:1px solid var(--line);border-radius:.6rem;
background:var(--sunk);font:.85rem/1.55 ui-monospace,monospace;white-space:pre-wrap}
code{font:.88em ui-monospace,monospace}
pre code{font:inherit}
blockquote{margin:.3rem 0;padding-inline-start:1rem;border-inline-start:3px solid var(--line);color:var(--muted)}
a{color:var(--accent);text-underline-offset:.18em}
a:focus-visible,summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
details{margin:.5rem 0;color:var(--muted);font-size:.9rem}
summary{cursor:pointer}
.thinking{white-space:pre-line;overflow-wrap:anywhere;
padding-inline-start:1rem;border-inline-start:2px solid var(--line)}
.cite{margin-inline-start:.25em;padding:0 .3em;border:1px solid var(--line);border-radius:.4em;background:var(--tint);
font-size:.72em;font-weight:600;text-decoration:none;vertical-align:.2em}
.cite.none{background:none;border-style:dotted;color:var(--muted);font-weight:400}
.sources{font-size:.9rem}
.sources h3{margin:1rem 0 .3rem;font-size:.9rem}
.sources ol{list-style:none;margin:0;padding:0}
.sources li{padding:.4rem 0;overflow-wrap:anywhere}
.sources li:target{background:var(--tint)}
@media print{details{display:none}}
"""


POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_SAFE_LINK = re.compile(r"(https?:|mailto:|#)", re.IGNORECASE)
_LABEL = re.compile(r"\s*\[(S\d+|unsupported)\]")


def page(chat: SharedChat) -> str:
    title = escape(chat.title)
    turns = "\n".join(_turn(turn, f"t{at}") for at, turn in enumerate(chat.turns, 1))
    empty = "" if chat.turns else "<p class=remark>Nothing was said in this chat.</p>"
    return document(
        title,
        f"""<header>
<h1 dir="auto">{title}</h1>
<p><time datetime="{chat.begun.isoformat()}">{chat.begun:%d %B %Y}</time></p>
</header>
<main>
{turns}{empty}
</main>
<footer>Made with Ponder</footer>""",
    )


def document(title: str, body: str, language: str = "en") -> str:
    """Returns a whole page of this look. `title` and `body` are HTML."""
    return f"""<!doctype html>
<html lang="{language}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="robots" content="noindex, nofollow">
<meta name="generator" content="Ponder">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _turn(turn: SharedTurn, id: str) -> str:
    inside = "\n".join(_parts(turn, id))
    kind = "question" if turn.role == "user" else "answer"
    return f'<article class="{kind}" aria-label="{NAMES[turn.role]}"><h2>{NAMES[turn.role]}</h2>\n{inside}\n</article>'


def _parts(turn: SharedTurn, id: str) -> Iterator[str]:
    if turn.role == "user":
        for at, url in enumerate(turn.images, 1):
            yield f'<img class="asked" src="{escape(url)}" alt="Image {at} of the question">'
        if turn.files:
            items = "".join(f'<li dir="auto">{escape(name)}</li>' for name in turn.files)
            yield f'<ul class="files" aria-label="Files">{items}</ul>'
        yield f'<p class="asked" dir="auto">{escape(turn.content)}</p>'
        return
    if turn.thinking:
        yield _details(turn.thought, f'<p class="thinking" dir="auto">{escape(turn.thinking.strip())}</p>')
    for step in turn.steps:
        for call, result in zip(step.calls, step.results, strict=False):
            yield _details(
                f"<code>{escape(call.name)}</code>",
                f"<pre>{escape(call.arguments)}</pre><pre>{escape(result.text)}</pre>",
            )
    if turn.content:
        yield f'<div class="prose" dir="auto">{_prose(turn.content, turn.sources, id)}</div>'
    if turn.remark:
        yield f'<p class="remark">{escape(turn.remark)}</p>'
    if turn.sources:
        items = "".join(_source(source, id) for source in turn.sources)
        yield f'<section class="sources"><h3>Sources</h3><ol>{items}</ol></section>'


def _details(summary: str, inside: str) -> str:
    return f"<details><summary>{summary}</summary>{inside}</details>"


def _source(source: SourceShown, id: str) -> str:
    place = "" if source.page is None else f", page {source.page}"
    return (
        f'<li id="{id}-{escape(source.label)}" dir="auto"><b>{_number(source.label)}</b> '
        f"{escape(source.title)}{place}<blockquote>{escape(source.text)}</blockquote></li>"
    )


def _number(label: str) -> str:
    return escape(label.removeprefix("S"))


class _Markdown(MarkdownIt):
    def validateLink(self, url: str) -> bool:
        return _SAFE_LINK.match(url) is not None


def _prose(text: str, sources: Sequence[SourceShown], id: str) -> str:
    markdown = _Markdown("commonmark", {"html": False}).enable(["table", "strikethrough"])
    labels = {source.label for source in sources}

    def words(self: RendererHTML, tokens: Sequence[Token], at: int, options: OptionsDict, env: Any) -> str:
        def mark(found: re.Match[str]) -> str:
            label = found[1]
            if label == "unsupported":
                return ' <span class="cite none">no source</span>'
            return f'<a class="cite" href="#{id}-{label}">{_number(label)}</a>' if label in labels else found[0]

        return _LABEL.sub(mark, escape(tokens[at].content)) if sources else escape(tokens[at].content)

    def picture(self: RendererHTML, tokens: Sequence[Token], at: int, options: OptionsDict, env: Any) -> str:
        address = str(tokens[at].attrs.get("src", ""))
        return f'<a href="{escape(address)}" rel="noreferrer">{escape(tokens[at].content or address)}</a>'

    def link(self: RendererHTML, tokens: Sequence[Token], at: int, options: OptionsDict, env: Any) -> str:
        tokens[at].attrs["rel"] = "noreferrer"
        return self.renderToken(tokens, at, options, env)

    for name, rule in (("text", words), ("image", picture), ("link_open", link)):
        markdown.add_render_rule(name, rule)
    parsed = markdown.parse(text)
    for token in parsed:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 2)}"  # the first two levels are the file's own
    return str(markdown.renderer.render(parsed, markdown.options, {}))
