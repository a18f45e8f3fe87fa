"""Routes of documents and pictures of their pages.

An upload goes to disk as it arrives and becomes a job; the response waits a little for the job's end. No file is ever
sent for a browser to display, as a document may be made to harm the person who opens it. A page's picture is rendered
in a process of its own and is nothing but pixels, so nothing in the file runs in the browser or the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse
from pebble import ProcessFuture
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from app.api.jobs import job_shown
from app.api.multipart import BadForm, Form, plain_path
from app.api.response_models import DocumentShown, DocumentsShown, Ingested, JobShown
from app.connections import while_connected
from app.current_user import AppState, User
from app.errors import ApiError, invalid
from app.query_params import ONLY_KNOWN, QueryParams, WholeNumber, number_in_path, whole_number
from app.request_body import JsonBody, json_value, pieces
from app.state import State
from retrieval import Document, Given, Job, Library, NotFound
from retrieval.document_store import BadCursor
from retrieval.parsing import safe_open
from retrieval.parsing.parsed import Unreadable
from retrieval.parsing.sniff import PDF
from retrieval.records import Metadata

router = APIRouter(prefix="/api", tags=["Documents"], dependencies=[ONLY_KNOWN])

P = ParamSpec("P")
T = TypeVar("T")

WAIT_S, MAX_WAIT_S = 10.0, 60.0
MAX_TEXT = 1_000_000  # characters in one answer
MAX_METADATA = 100
MAX_SOURCE_LENGTH = 1000  # characters
_AT_ONCE = 1 << 20  # bytes of an upload that are parsed and written in one go
_LISTED, _MAX_LISTED = 100, 500
FIELDS = ("file", "source", "collection", "folder", "metadata", "replace", "wait")


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of an upload, beside its files."""

    sources: list[str]
    collection: int | None
    folder: int | None
    metadata: Metadata
    replace: bool
    wait_s: float


async def document_of(user: User, state: AppState, document_id: str) -> Document:
    """The document of an address, if the user may read it."""
    number = number_in_path(document_id, "document")
    return await asyncio.to_thread(state.library.store.document, user, number)


Readable = Annotated[Document, Depends(document_of)]
_WHOLE = "one whole number of 0 or more"


class DocumentsQuery(BaseModel):
    """The parameters of `GET /api/documents`."""

    collection: WholeNumber | None = Field(None, description=_WHOLE)
    folder: WholeNumber | None = Field(None, description=_WHOLE)
    limit: WholeNumber = Field(_LISTED, ge=1, le=_MAX_LISTED, description=f"a whole number from 1 to {_MAX_LISTED}")
    before: str | None = Field(None, description="what `next` of the page before says")


DocumentsParams = Annotated[DocumentsQuery, Depends(QueryParams(DocumentsQuery))]


_SOURCE = f"a name of 1 to {MAX_SOURCE_LENGTH} characters"


class SourceRequest(BaseModel):
    """The body of `PATCH /api/documents/{id}`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    source: str = Field(min_length=1, max_length=MAX_SOURCE_LENGTH, description=_SOURCE)


SourceBody = Annotated[SourceRequest, Depends(JsonBody(SourceRequest))]


class SpanQuery(BaseModel):
    """The parameters of `GET /api/documents/{id}/text` and `…/boxes`: a part of the document's text, in characters."""

    start: WholeNumber = Field(0, description=_WHOLE)
    end: WholeNumber | None = Field(None, description=_WHOLE)

    def within(self, characters: int, most: int | None = None) -> tuple[int, int]:
        """Returns `start` and `end`, cut to a document of so many characters.

        Raises:
            ApiError: 400: the part is not in it, or longer than `most`.
        """
        start = self.start
        end = (characters if most is None else min(characters, start + most)) if self.end is None else self.end
        if start > characters:
            raise invalid("start", f"start is {start}; accepted: 0 to {characters}, the document's length.")
        if end < start:
            raise invalid("end", f"end is {end}; accepted: {start}, which is start, or more.")
        end = min(end, characters)
        if most is not None and end - start > most:
            raise invalid("end", f"end is {end}; accepted: at most {start + most}, {most} characters after start.")
        return start, end


SpanParams = Annotated[SpanQuery, Depends(QueryParams(SpanQuery))]


@router.post("/documents", status_code=201, responses={202: {"model": Ingested}})
async def upload(request: Request, response: Response, user: User, state: AppState) -> Ingested:
    library = state.library
    form = await received(request, state)
    try:
        options = _options(form)
        given = [
            Given(source, file.path, options.metadata, owned=True, folder=options.folder)
            for source, file in zip(options.sources, form.files, strict=True)
        ]

        def submit() -> Job:
            number = library.collection(user).id if options.collection is None else options.collection
            return form.hand_over(lambda: library.ingest.submit(user, number, given, options.replace))

        job = await asyncio.to_thread(submit)
    finally:
        await asyncio.to_thread(form.discard)
    return await ingested(state, user, job.id, options.wait_s, response)


async def ingested(state: State, user: str, job: str, wait_s: float, response: Response) -> Ingested:
    """Returns what has come of a job by its end, or by `wait_s`: the response is a 201 or a 202.

    Raises:
        ApiError: 400: none of its files could be read.
    """
    shown = await followed(state, user, job, wait_s)
    if wait_s and shown.status == "done" and shown.counts["failed"] == len(shown.files):
        reasons = " ".join(f"{file.source}: {file.error}" for file in shown.files)
        raise invalid("file", reasons, "unreadable_document")
    numbers = dict.fromkeys(file.document for file in shown.files if file.document is not None)
    documents = await asyncio.to_thread(_those_left, state.library, user, list(numbers))
    response.status_code = 201 if shown.status == "done" else 202
    return Ingested(job=shown, documents=[DocumentShown.of(document) for document in documents])


@router.get("/documents")
async def documents(user: User, state: AppState, given: DocumentsParams) -> DocumentsShown:
    page = state.library.store.page
    try:
        found, more = await asyncio.to_thread(page, user, given.collection, given.folder, given.limit, given.before)
    except BadCursor as error:
        message = f"before is {str(error)!r:.60}; accepted: what `next` of the page before says."
        raise invalid("before", message) from None
    return DocumentsShown(documents=[DocumentShown.of(document) for document in found], next=more)


@router.get("/documents/{document_id}")
async def document(found: Readable) -> DocumentShown:
    return DocumentShown.of(found)


@router.patch("/documents/{document_id}")
async def rename(user: User, state: AppState, found: Readable, wanted: SourceBody) -> DocumentShown:
    source = plain_path(wanted.source)
    if not source:
        raise invalid("source", f"source is {wanted.source!r:.60}; accepted: {_SOURCE}.")
    await asyncio.to_thread(state.library.rename, user, found.id, source)
    return DocumentShown.of(await asyncio.to_thread(state.library.store.document, user, found.id))


@router.delete("/documents/{document_id}", status_code=204)
async def delete(user: User, state: AppState, document_id: str) -> None:
    number = number_in_path(document_id, "document")
    await asyncio.to_thread(state.library.delete, user, number)


@router.get("/documents/{document_id}/text")
async def text(user: User, state: AppState, found: Readable, given: SpanParams) -> dict[str, Any]:
    start, end = given.within(found.characters, MAX_TEXT)
    part = await asyncio.to_thread(state.library.store.text, user, found.id, start, end)
    return {
        "document": found.id, "start": start, "end": start + len(part), "characters": found.characters, "text": part,
    }  # fmt: skip


@router.get("/documents/{document_id}/boxes")
async def boxes(request: Request, user: User, state: AppState, found: Readable, given: SpanParams) -> dict[str, Any]:
    start, end = given.within(found.characters)
    if found.media_type != PDF:
        raise ApiError(404, f"{found.source} is no PDF: it has no pages to mark.", code="no_pages")
    library = state.library
    try:
        made = await viewed(request, user, library.boxes, found.id, start, end)
        return {"document": found.id, "start": start, "end": end, "boxes": [asdict(box) for box in made]}
    except (Unreadable, NotFound):
        raise gone(found) from None


@router.get("/documents/{document_id}/file")
async def file(user: User, state: AppState, found: Readable) -> Response:
    path, root = await asyncio.to_thread(state.library.store.file, user, found.id)
    try:
        opened = await asyncio.to_thread(safe_open.descriptor, path, root or path.parent)
    except OSError:
        raise gone(found) from None
    return _Opened(
        opened,
        media_type="application/octet-stream",
        filename=PurePosixPath(found.source).name,
        content_disposition_type="attachment",
        headers={
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": "sandbox; default-src 'none'",
            "Cache-Control": "private, no-cache",
        },
    )


class _Opened(FileResponse):
    """Sends a file that is open already, and closes it."""

    def __init__(self, descriptor: int, **options: Any) -> None:  # Any: FileResponse's own
        super().__init__(f"/dev/fd/{descriptor}", **options)
        self._descriptor = descriptor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._descriptor)


async def received(request: Request, state: State) -> Form:
    """The form, its files on disk. If anything is wrong with it, nothing stays there."""
    form: Form | None = None
    try:
        form = Form(request.headers.get("content-type", ""), state.library.new_file)
        waiting, size = list[bytes](), 0
        async for piece in pieces(request, int(state.settings.max_upload)):
            waiting.append(piece)
            size += len(piece)
            if size >= _AT_ONCE:
                await asyncio.to_thread(form.feed, b"".join(waiting))
                waiting, size = [], 0
        await asyncio.to_thread(form.feed, b"".join(waiting))
        form.finish()
    except BaseException as error:
        if form is not None:
            await asyncio.to_thread(form.discard)
        if isinstance(error, BadForm):
            raise invalid(error.field, str(error), "invalid_form" if error.field is None else "invalid_value") from None
        raise
    return form


def _options(form: Form) -> _Options:
    """
    Raises:
        ApiError: 400, naming the field.
    """
    for name, values in form.fields.items():
        if name not in FIELDS:
            message = f"{name!r:.60} is not a field of this form; accepted: {', '.join(FIELDS)}."
            raise invalid(name, message, "unknown_parameter")
        if len(values) > 1 and name != "source":
            raise invalid(name, f"{name} is given {len(values)} times; accepted: once.")
    if not form.files:
        raise invalid("file", "file is missing; accepted: one file or more.", "missing_required_parameter")
    given = {name: values[0] for name, values in form.fields.items() if name != "source" and values[0].strip()}
    return _Options(
        _sources(form), _number("collection", given.get("collection")), _number("folder", given.get("folder")),
        _metadata(given.get("metadata", "{}")), _replace(given.get("replace", "false")),
        seconds_to_wait(given.get("wait")),
    )  # fmt: skip


def _sources(form: Form) -> list[str]:
    names = form.fields.get("source")
    if names is None:
        return [file.name for file in form.files]
    if len(names) != len(form.files):
        message = f"source is given {len(names)} times for {len(form.files)} files; accepted: once for each, or never."
        raise invalid("source", message)
    sources = [plain_path(name) for name in names]
    for name, source in zip(names, sources, strict=True):
        if not source or len(source) > MAX_SOURCE_LENGTH:
            raise invalid("source", f"source is {name!r:.60}; accepted: {_SOURCE}.")
    return sources


def _number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if (number := whole_number(text)) is None:
        raise invalid(name, f"{name} is {text!r:.60}; accepted: the number of a {name}.")
    return number


def _metadata(text: str) -> Metadata:
    accepted = f"a JSON object of at most {MAX_METADATA} strings, numbers, true and false"
    try:
        value = json_value(text)
    except ValueError as error:
        raise invalid("metadata", f"metadata is not valid JSON: {error}; accepted: {accepted}.") from None
    if not isinstance(value, Mapping) or len(value) > MAX_METADATA:
        raise invalid("metadata", f"metadata is {text!r:.60}; accepted: {accepted}.")
    for name, part in value.items():
        if not isinstance(part, str | int | float | bool):
            raise invalid("metadata", f"metadata.{name:.60} is {json.dumps(part):.60}; accepted: {accepted}.")
        if isinstance(part, int) and not -(2**63) <= part < 2**63:
            raise invalid("metadata", f"metadata.{name:.60} is too large; accepted: 64-bit integers.")
    return dict(value)


def _replace(text: str) -> bool:
    if text not in ("true", "false"):
        raise invalid("replace", f"replace is {text!r:.60}; accepted: true or false.")
    return text == "true"


def seconds_to_wait(text: str | None) -> float:
    """Reads a form's field `wait`.

    Raises:
        ApiError: 400: it is no number of seconds in range.
    """
    if text is None:
        return WAIT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_WAIT_S:
        raise invalid("wait", f"wait is {text!r:.60}; accepted: 0 to {MAX_WAIT_S:.0f} seconds.")
    return seconds


async def followed(state: State, user: str, job: str, seconds: float) -> JobShown:
    """The job once nothing more is to be waited for, or as it is after that time or when the server stops.

    It is asked now and then: a thread that waited for each upload would soon leave none for anything else.
    """
    deadline = time.monotonic() + seconds
    pause = 0.01
    while True:
        shown = await asyncio.to_thread(job_shown, state.library, user, job)
        if shown.over or (left := deadline - time.monotonic()) <= 0 or state.ending.is_set():
            return shown
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(pause, left)):
                await state.ending.wait()
        pause = min(1.5 * pause, 0.25)


def _those_left(library: Library, user: str, numbers: list[int]) -> list[Document]:
    """The documents of a job, but for those that are gone already."""
    made = []
    for number in numbers:
        try:
            made.append(library.store.document(user, number))
        except NotFound:
            continue
    return made


async def viewed(
    request: Request, user: str, begin: Callable[Concatenate[str, P], ProcessFuture[T]], *args: P.args, **more: P.kwargs
) -> T:
    """Returns the result of a separate process on a PDF, one request of each user at a time: nobody's file keeps those
    of others waiting.

    Raises:
        NotFound, Unreadable: there is no such file, or not any more, or it cannot be read in time.
        ApiError: the client left.
    """
    state = State.of(request)

    async def waited() -> T:
        async with state.views.of(user):
            future = await asyncio.to_thread(begin, user, *args, **more)
            await _ended(future)
            return state.library.viewed(future)

    return await while_connected(request, waited())


async def _ended(future: ProcessFuture[T]) -> None:
    """Wait for it without a thread. When nobody waits any more, a job that has not begun is left out."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
    try:
        await ended.wait()
    except asyncio.CancelledError:
        if not future.running():
            future.cancel()
        raise


def gone(found: Document) -> ApiError:
    """The refusal where a document's file is needed and is not there."""
    message = f"The file that {found.source} was read from is not there any more, or not as it was."
    return ApiError(404, message, code="file_gone")


pages_router = APIRouter(prefix="/api", tags=["Documents"], dependencies=[ONLY_KNOWN])

WIDTH, MAX_WIDTH = 1200, 3000  # pixels
_HEADERS = {
    "Cache-Control": "private, no-cache",  # asked for each time: a user who lost the right to it sees it no more
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'",
}


class PictureQuery(BaseModel):
    """The parameters of `GET /api/documents/{id}/pages/{page}`."""

    width: WholeNumber = Field(WIDTH, ge=1, le=MAX_WIDTH, description=f"a whole number from 1 to {MAX_WIDTH}")


PictureParams = Annotated[PictureQuery, Depends(QueryParams(PictureQuery))]


@pages_router.get("/documents/{document_id}/pages")
async def pages(request: Request, user: User, state: AppState, found: Readable) -> dict[str, Any]:
    library = state.library

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


@pages_router.get("/documents/{document_id}/pages/{page}")
async def picture(
    request: Request, user: User, state: AppState, found: Readable, page: str, given: PictureParams
) -> Response:
    number = _page(found, page)
    headers = {**_HEADERS, "ETag": f'"{found.version}-{number}-{given.width}"'}
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    library = state.library
    try:
        content = await viewed(request, user, library.draw, found.id, number, given.width)
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
