"""A search engine, as a plugin: any object with `search` is one. SearXNG, run by an operator, is the one that is here.

The engine's own address is the operator's and may be private. Its hits are not trusted: addresses that a fetch would
refuse are left out, and texts are cut. Knows nothing of models.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from html import unescape
from typing import Any, Protocol

import httpx

from tools.web.target import AddressRefused, FetchFailed, target

MAX_QUERY_LENGTH = 400  # characters
_TAGS = re.compile(r"<[^<>]{0,200}>")
_EVERY_PORT = range(1, 65536)


@dataclass(frozen=True, slots=True)
class WebHit:
    """One result. `text`: the engine's excerpt."""

    title: str
    url: str
    text: str


class SearchBackend(Protocol):
    async def search(self, query: str, count: int) -> list[WebHit]:
        """At most `count` results, best first.

        Raises:
            FetchError: the engine could not be asked.
        """
        ...


class SearXNG:
    """A SearXNG server that answers in JSON (`search.formats` in its settings has to name it)."""

    def __init__(self, url: str, *, timeout_s: float = 10.0, max_bytes: int = 2_000_000) -> None:
        """`url`: where the server is, such as http://searxng.internal:8080.

        Raises:
            ValueError: it is no http or https URL.
        """
        read = httpx.URL(url)
        if read.scheme not in ("http", "https") or not read.host:
            raise ValueError(f"The search engine's address {url!r} is no URL; accepted: http://host:port.")
        self._url = f"{url.rstrip('/')}/search"
        self._timeout_s, self._max_bytes = timeout_s, max_bytes

    async def search(self, query: str, count: int) -> list[WebHit]:
        """
        Raises:
            Failed: the server did not answer, or not in JSON.
            Refused: the query is empty or too long.
        """
        query = " ".join(query.split())
        if not 0 < len(query) <= MAX_QUERY_LENGTH:
            raise AddressRefused(f"The query has {len(query):,} characters; accepted: 1 to {MAX_QUERY_LENGTH}.")
        try:
            data = json.loads(await self._asked(query))
            results = data["results"]
            return _distinct([found for each in results[:100] if (found := _found(each))], count)
        except httpx.HTTPError as error:
            raise FetchFailed(f"The search engine could not be asked: {error or type(error).__name__}.") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise FetchFailed("The search engine did not answer with results in JSON.") from None

    async def _asked(self, query: str) -> bytes:
        # The operator's own server: no proxy of the environment, and no redirect to anywhere else.
        client = httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=self._timeout_s)
        parameters = {"q": query, "format": "json", "safesearch": "1"}
        async with client, client.stream("GET", self._url, params=parameters) as response:
            if response.status_code == 403:
                raise FetchFailed("The search engine refuses JSON; add json to search.formats in its settings.yml.")
            if response.status_code != 200:
                raise FetchFailed(f"The search engine answered with status {response.status_code}.")
            body = bytearray()
            async for piece in response.aiter_bytes(65536):
                body += piece
                if len(body) > self._max_bytes:
                    raise FetchFailed(f"The search engine's answer is beyond the limit of {self._max_bytes:,} bytes.")
            return bytes(body)


def _found(result: Any) -> WebHit | None:  # any JSON from the server
    if not isinstance(result, dict) or not isinstance(result.get("url"), str):
        return None
    try:
        url = target(result["url"], _EVERY_PORT).url
    except AddressRefused:
        return None
    return WebHit(_plain(result.get("title"), 200) or url, url, _plain(result.get("content"), 600))


def _plain(text: object, most: int) -> str:
    return " ".join(unescape(_TAGS.sub("", text[: 10 * most])).split())[:most] if isinstance(text, str) else ""


def _distinct(found: list[WebHit], count: int) -> list[WebHit]:
    return list({each.url: each for each in reversed(found)}.values())[::-1][:count]
