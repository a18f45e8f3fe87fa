"""Reading pages of the public web, and finding them."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field

from ponder import Context, Source, ToolError, Toolset, tool
from tools.web import Fetcher, FetchError
from tools.web.search import SearchBackend

_PART = 8000  # characters of a page in one call


class Pages(Toolset):
    """Fetching pages."""

    def __init__(self, fetcher: Fetcher | None = None) -> None:
        self._fetcher = fetcher or Fetcher()

    async def close(self) -> None:
        await asyncio.to_thread(self._fetcher.close)

    @tool(permission="network", approval="never", timeout=30, rate="30/min", idempotent=True, cache=300, max_chars=9000)
    async def http_fetch(
        self,
        ctx: Context,
        url: Annotated[str, Field(max_length=2048)],
        start: Annotated[int, Field(ge=0)] = 0,
    ) -> str:
        """Read a page of the public web as text.

        Args:
            url: its address, with http or https.
            start: the character to read on from, for a page that is longer than one answer.
        """
        try:
            page = await self._fetcher.fetch(url)
        except FetchError as error:
            raise ToolError(str(error)) from None
        part = page.text[start : start + _PART]
        title = page.title or page.url
        ctx.cite(Source(title, url=page.url, text=part, start=start, end=start + len(part)))
        head = [f"{title} ({page.url}, status {page.status})"]
        if start >= len(page.text) > 0:
            head.append(f"The text ends at character {len(page.text)}.")
        left = len(page.text) - start - len(part)
        tail = [f"[{left:,} more characters: read on with start={start + len(part)}]"] if left > 0 else []
        if left <= 0 and page.truncated:
            tail = ["[The page is longer than is read.]"]
        return "\n\n".join([*head, part, *tail])


class Web(Toolset):
    """Web search by the operator's engine."""

    def __init__(self, backend: SearchBackend) -> None:
        self._backend = backend

    @tool(permission="network", approval="never", timeout=20, rate="20/min", idempotent=True, cache=300)
    async def web_search(
        self,
        ctx: Context,
        query: Annotated[str, Field(min_length=1, max_length=400)],
        count: Annotated[int, Field(ge=1, le=20)] = 5,
    ) -> str:
        """Search the web.

        Args:
            query: what to look for.
            count: how many results at most.
        """
        try:
            found = await self._backend.search(query, count)
        except FetchError as error:
            raise ToolError(str(error)) from None
        lines = list[str]()
        for each in found:
            number = ctx.cite(Source(each.title, url=each.url, text=each.text))
            lines.append(f"{number}. {each.title}\n{each.url}\n{each.text}")
        return "\n\n".join(lines) or "Nothing was found."
