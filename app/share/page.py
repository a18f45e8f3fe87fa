"""A chat as one HTML file that needs nothing else: no script, no request, light and dark as the reader's system is.

All text is escaped; Markdown becomes HTML with what HTML it has in it shown, and with pictures as links, so that
opening the file tells nobody. Knows nothing of HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict

from app.runs.events import SourceShown
from app.share.markdown import NAMES
from app.share.style import STYLE
from app.share.told import Told, Turn

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_SAFE_LINK = re.compile(r"(https?:|mailto:|#)", re.IGNORECASE)
_LABEL = re.compile(r"\s*\[(S\d+|unsupported)\]")


def page(chat: Told) -> str:
    title = escape(chat.title)
    turns = "\n".join(_turn(turn, f"t{at}") for at, turn in enumerate(chat.turns, 1))
    empty = "" if chat.turns else "<p class=remark>Nothing was said in this chat.</p>"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="Ponder">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1 dir="auto">{title}</h1>
<p><time datetime="{chat.begun.isoformat()}">{chat.begun:%d %B %Y}</time></p>
</header>
<main>
{turns}{empty}
</main>
<footer>Made with Ponder</footer>
</body>
</html>
"""


def _turn(turn: Turn, id: str) -> str:
    inside = "\n".join(_parts(turn, id))
    kind = "question" if turn.role == "user" else "answer"
    return f'<article class="{kind}" aria-label="{NAMES[turn.role]}"><h2>{NAMES[turn.role]}</h2>\n{inside}\n</article>'


def _parts(turn: Turn, id: str) -> Iterator[str]:
    if turn.role == "user":
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
