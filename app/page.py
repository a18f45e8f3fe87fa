"""Serves the built page: its files, and `index.html` for every address that the page routes itself.

Knows nothing of chats or runs. It answers only paths that no other route does, and never under an address of the API's,
so a mistyped one gets the API's own 404 instead of a page.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

HERE = Path(__file__).parent
PLACES = (HERE / "page", HERE.parent / "web" / "dist")  # in a wheel; in a checkout
RESERVED = frozenset({"api", "v1", "mcp", "metrics", "health", "openapi.json"})

POLICY = "Content-Security-Policy"
SECURITY = {
    POLICY: "; ".join(
        (
            "default-src 'self'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data:",
            "media-src 'self' blob:",
            "object-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
REVALIDATE = {"Cache-Control": "no-cache"}
FOREVER = {"Cache-Control": "public, max-age=31536000, immutable"}  # for names that carry a hash of their content

MAX_PART_LENGTH = 255  # bytes of a file's name

TEXTS = frozenset({".html", ".js", ".css", ".svg", ".md"})  # fonts are compressed already

NOT_BUILT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Ponder: the page is not built</title></head>
<body><h1>The page is not built</h1>
<p>The server runs and its API works, but the chat page has not been built in this checkout. Build it with</p>
<pre>make setup</pre>
<p>and load this address again.</p></body></html>
"""


ABOUT = '<p class="about"></p>'  # of index.html
LAST = 24  # messages of a chat that its page asks for first, in web/src/lib/api.ts
CHAT_PART = "src/components/chat/Message.svelte"  # shows messages; the first screen is made without it


def mount_page(
    app: Starlette, known: Callable[[Request], bool] = lambda request: False, about: Callable[[], str] = str
) -> None:
    """Serve the page at `/`. To be called after all other routes: their paths are theirs.

    `known` tells whether a request's sender may likely read chats: the page of a chat then names it for preloading.
    `about` says what the model is, which the first screen shows before its program is loaded.
    """
    app.router.routes.append(PageFiles(PLACES, known, about))


def is_pages(method: str, path: str) -> bool:
    """Returns whether a request can be for a file or a place of the page."""
    return method in {"GET", "HEAD"} and not RESERVED.intersection(PurePosixPath(path).parts[1:2])


class PageFiles(BaseRoute):
    """A route for every address that is left over, except the API's."""

    def __init__(
        self, places: Iterable[Path], known: Callable[[Request], bool] = lambda request: False,
        about: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        self.places, self.known, self.about = tuple(places), known, about

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http" or not is_pages(scope["method"], scope["path"]):
            return Match.NONE, {}
        return Match.FULL, {"endpoint": self.respond}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = self.respond(Request(scope))
        await response(scope, receive, send)

    def respond(self, request: Request) -> Response:
        # Looked for at each request: a page that is built while the server runs is there on the next load.
        if any(len(part.encode("utf-8", "replace")) > MAX_PART_LENGTH for part in request.scope["path"].split("/")):
            raise HTTPException(404)  # no file system has such a name, and the page no such place
        root = next((place for place in self.places if (place / "index.html").is_file()), None)
        if root is None:
            return HTMLResponse(NOT_BUILT, status_code=503, headers=SECURITY | REVALIDATE)
        name = request.scope["path"].lstrip("/").replace("\0", "")
        try:
            file = (root / name).resolve()
            found = name != "" and file.is_relative_to(root.resolve()) and file.is_file()
        except OSError:  # all of it is longer than a file's path may be
            raise HTTPException(404) from None
        if found:
            hashed = name.startswith("assets/")
            return self.send(file, request, FOREVER if hashed else REVALIDATE)
        if PurePosixPath(name).suffix or name.startswith("assets/"):
            raise HTTPException(404)  # a file that is not there is no place in the page
        return self.send_index(root / "index.html", request, REVALIDATE | self.preloads(root, request))

    def preloads(self, root: Path, request: Request) -> dict[str, str]:
        """A `Link` header (RFC 8288) with what a chat's page will ask for, so that a browser asks for it at once."""
        path = PurePosixPath(request.scope["path"])
        if path.parts[1:2] != ("c",) or len(path.parts) != 3:
            return {}
        links = ["</api/session>; rel=preload; as=fetch; crossorigin"]
        if self.known(request):
            links.append(f"</api/chats/{quote(path.name, safe='')}?last={LAST}>; rel=preload; as=fetch; crossorigin")
        chunks = root / "chunks.json"  # after those above, which take longer to answer: six are asked for at a time
        if chunks.is_file():
            links += _chat_parts(chunks, chunks.stat().st_mtime_ns)
        return {"Link": ", ".join(links)}

    def send_index(self, file: Path, request: Request, caching: dict[str, str]) -> Response:
        """`index.html` with what the model is, gzipped where that is taken, or 304 when the browser has it already."""
        small = "gzip" in request.headers.get("accept-encoding", "")
        content, tag, policy = _filled(file, file.stat().st_mtime_ns, self.about(), small)
        headers = {"Vary": "Accept-Encoding", "ETag": tag} | SECURITY | {POLICY: policy} | caching
        if tag in _known_tags(request):
            return Response(status_code=304, headers=headers)
        if small:
            headers["Content-Encoding"] = "gzip"
        return HTMLResponse(content, headers=headers)

    def send(self, file: Path, request: Request, caching: dict[str, str]) -> Response:
        """The file, gzipped where that helps, or 304 when the browser has it already."""
        stat = file.stat()
        response = StaticFiles(directory=file.parent).file_response(file, stat, request.scope)
        if file.suffix in TEXTS:
            response.headers["Vary"] = "Accept-Encoding"
            if "gzip" in request.headers.get("accept-encoding", "") and "range" not in request.headers:
                response = _small(file, stat.st_mtime_ns, request, response)
        response.headers.update(SECURITY | caching)
        return response


def _small(file: Path, changed_ns: int, request: Request, whole: Response) -> Response:
    """The same, gzipped. It has a tag of its own: it is other bytes."""
    headers = {"Vary": "Accept-Encoding", "ETag": f'{whole.headers["etag"][:-1]}-gzip"'}
    if headers["ETag"] in _known_tags(request):
        return Response(status_code=304, headers=headers)
    headers["Content-Encoding"] = "gzip"
    return Response(_gzipped(file, changed_ns), media_type=whole.headers["content-type"], headers=headers)


def _known_tags(request: Request) -> list[str]:
    """Returns the tags of what the browser has (RFC 9110, section 13.1.2)."""
    return [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]


@lru_cache(maxsize=8)
def _filled(index: Path, changed_ns: int, about: str, small: bool) -> tuple[bytes, str, str]:
    """Returns the page with what the model is, gzipped if `small`, its tag, and the policy that allows what it has
    inside: a script and styles, by their hashes (CSP level 3)."""
    page = index.read_text("utf-8")
    policy = SECURITY[POLICY]
    for kind in ("script", "style"):
        for inside in re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL):
            found = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
            policy = policy.replace(f"{kind}-src 'self'", f"{kind}-src 'self' 'sha256-{found}'")
    content = page.replace(ABOUT, f"{ABOUT[:-4]}{html.escape(about)}</p>").encode()
    if small:
        content = gzip.compress(content, 9, mtime=0)
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"', policy


@lru_cache(maxsize=8)
def _chat_parts(chunks: Path, changed_ns: int) -> tuple[str, ...]:
    """Links to the files that make a chat's page, those of every page first, by Vite's list of the build's chunks."""
    found, page = json.loads(chunks.read_bytes()), (chunks.parent / "index.html").read_text("utf-8")
    first = re.findall(r'(?:src|href)="(/assets/[^"]+\.(?:js|css))"', page)
    wanted, links = [CHAT_PART], {_preload(file): None for file in first}
    for name in wanted:
        chunk = found.get(name, {})
        files = [_preload(f"/{file}") for file in (chunk["file"], *chunk.get("css", ()))] if chunk else []
        if not files or files[0] in links:
            continue
        links.update(dict.fromkeys(files))
        wanted += chunk.get("imports", ())
    return tuple(links)


def _preload(file: str) -> str:
    return f"<{file}>; rel=modulepreload" if file.endswith(".js") else f"<{file}>; rel=preload; as=style; crossorigin"


@lru_cache(maxsize=256)
def _gzipped(file: Path, changed_ns: int) -> bytes:
    return gzip.compress(file.read_bytes(), 9, mtime=0)
