"""The routes of a PDF's pages: their sizes and what text they have, and a page as a picture.

A picture is drawn in a process of its own and is nothing but pixels, so whatever the file holds runs nowhere. Knows
nothing of passages: their boxes are a document's.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from app.api.documents import document_of, gone, viewed
from app.api.query import bounded, number_in_path, parameters, texts
from app.errors import ApiError
from app.state import State
from app.users import User
from retrieval import Document, NotFound
from retrieval.parsing.parsed import Unreadable
from retrieval.parsing.sniff import PDF

router = APIRouter(prefix="/api", tags=["Documents"])

WIDTH, MOST_WIDTH = 1200, 3000  # pixels
_HEADERS = {
    "Cache-Control": "private, no-cache",  # asked for each time: whoever lost the right to it sees it no more
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'",
}


@router.get("/documents/{document_id}/pages")
async def pages(request: Request, user: User, document_id: str) -> dict[str, Any]:
    parameters(request)
    found = await document_of(request, user, document_id)
    library = State.of(request).library

    try:
        stored = await asyncio.to_thread(library.store.pages, user, found.id)
        sizes = list[tuple[float | None, float | None]]([(None, None)] * len(stored))
        if found.media_type == PDF:
            sizes = [*await viewed(request, user, library.sizes, found.id)]
        if len(sizes) != len(stored):
            raise Unreadable("The PDF is not the one that was read.")
    except (Unreadable, NotFound):
        raise gone(found) from None
    shown = [
        {"number": page.number, "start": page.start, "end": page.end, "width": width, "height": height}
        for page, (width, height) in zip(stored, sizes, strict=True)
    ]
    return {"document": found.id, "pages": shown}


@router.get("/documents/{document_id}/pages/{page}")
async def picture(request: Request, user: User, document_id: str, page: str) -> Response:
    width = bounded("width", texts(request, "width").get("width"), WIDTH, MOST_WIDTH)
    found = await document_of(request, user, document_id)
    number = _page(found, page)
    headers = {**_HEADERS, "ETag": f'"{found.version}-{number}-{width}"'}
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    library = State.of(request).library
    try:
        content = await viewed(request, user, library.draw, found.id, number, width)
    except NotFound:
        raise gone(found) from None
    except Unreadable as error:
        raise ApiError(422, str(error), code="unreadable_page") from None
    return Response(content, media_type="image/png", headers=headers)


def _page(found: Document, text: str) -> int:
    """
    Raises:
        ApiError: 404, there is no such page to be drawn.
    """
    if found.media_type != PDF:
        raise ApiError(404, f"{found.source} is no PDF: it has no pages to show.", code="no_pages")
    number = number_in_path(text, "page")
    if not 1 <= number <= found.pages:
        raise ApiError(404, f"There is no page {number}; {found.source} has pages 1 to {found.pages}.", code="no_pages")
    return number
