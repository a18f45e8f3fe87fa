"""Routes of files that questions are sent with: uploaded before, shown with the message, kept as long as the chat.

Each is a document in no collection of the user's. Its text and its pages are shown by the routes of documents.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.documents import gone, ingested, received, seconds_to_wait
from app.api.response_models import AttachedShown, Ingested
from app.current_user import AppState, User
from app.db.file_store import SentFile, TooManyFiles
from app.errors import ApiError, invalid
from app.query_params import ONLY_KNOWN
from app.request_body import JsonBody
from app.state import State
from retrieval import Given, Job, Library
from retrieval.durable import sync_folder

router = APIRouter(prefix="/api", tags=["Files"], dependencies=[ONLY_KNOWN])

FIELDS = ("file", "wait")
_PAUSE_S, _MAX_PAUSE_S = 0.01, 0.25


class KeepRequest(BaseModel):
    """The body of `POST /api/files/{id}/keep`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    collection: int | None = Field(None, description="the number of a collection; the one named Documents if left out")


KeepBody = Annotated[KeepRequest, Depends(JsonBody(KeepRequest))]


@router.post("/files", status_code=201, responses={202: {"model": AttachedShown}})
async def upload(request: Request, response: Response, user: User, state: AppState) -> AttachedShown:
    form = await received(request, state)
    try:
        for name, values in form.fields.items():
            if name not in FIELDS:
                message = f"{name!r:.60} is not a field of this form; accepted: {', '.join(FIELDS)}."
                raise invalid(name, message, "unknown_parameter")
            if len(values) > 1:
                raise invalid(name, f"{name} is given {len(values)} times; accepted: once.")
        if len(form.files) != 1:
            code = "invalid_value" if form.files else "missing_required_parameter"
            raise invalid("file", f"The form has {len(form.files)} files; accepted: one, in the field file.", code)
        wait_s = seconds_to_wait(next(iter(form.fields.get("wait", [])), None))
        (file,) = form.files
        size = (await asyncio.to_thread(file.path.stat)).st_size
        try:
            made = await state.store.files.add(user, file.name, size)
        except TooManyFiles as error:
            raise ApiError(409, str(error), param="file", code="too_many_files") from None
        try:
            library = state.library
            await asyncio.to_thread(form.hand_over, lambda: library.attach(user, made["id"], file.name, file.path))
        except BaseException:
            await state.store.files.delete(user, [made["id"]])
            raise
    finally:
        await asyncio.to_thread(form.discard)
    sent = SentFile(id=made["id"], name=file.name, bytes=size)
    shown = await _followed(state, user, sent, wait_s)
    response.status_code = 202 if shown.status == "reading" else 201
    return shown


@router.get("/files/{file_id}")
async def file(user: User, state: AppState, file_id: str) -> AttachedShown:
    return (await attached(state.library, user, [await _sent(state, user, file_id)]))[0]


@router.delete("/files/{file_id}", status_code=204)
async def delete(user: User, state: AppState, file_id: str) -> None:
    found = await state.store.files.get(user, file_id)
    if found["chat_id"] is not None:
        message = (
            f"{found['name']!r:.60} was sent with a question and goes with its chat; accepted: a file not sent yet."
        )
        raise ApiError(409, message, code="file_sent")
    await state.store.files.delete(user, [file_id])
    await asyncio.to_thread(state.library.detach, user, [file_id])


@router.post("/files/{file_id}/keep", status_code=201, responses={202: {"model": Ingested}})
async def keep(response: Response, user: User, state: AppState, file_id: str, wanted: KeepBody) -> Ingested:
    """Adds a copy to a collection, where it stays when the chat goes."""
    sent = await _sent(state, user, file_id)
    (shown,) = await attached(state.library, user, [sent])
    check_ready([shown])
    library = state.library

    def submit() -> Job:
        number = library.collection(user).id if wanted.collection is None else wanted.collection
        return _copied(library, user, shown, number)

    job = await asyncio.to_thread(submit)
    return await ingested(state, user, job.id, seconds_to_wait(None), response)


def _copied(library: Library, user: str, shown: AttachedShown, collection: int) -> Job:
    document = library.store.document(user, shown.document or 0)
    path, _ = library.store.file(user, document.id)
    copy = library.new_file()
    try:
        try:
            os.link(path, copy)
        except PermissionError:  # a file system without links
            shutil.copyfile(path, copy)
    except FileNotFoundError:
        raise gone(document) from None
    try:
        sync_folder(copy.parent)
        return library.ingest.submit(user, collection, [Given(document.source, copy, owned=True)])
    except BaseException:
        copy.unlink(missing_ok=True)
        raise


async def _sent(state: State, user: str, id: str) -> SentFile:
    found = await state.store.files.get(user, id)
    return SentFile(id=id, name=found["name"], bytes=found["bytes"])


async def attached(library: Library, user: str, sent: Sequence[SentFile]) -> list[AttachedShown]:
    """Returns files as they are now, in their order."""
    names = [each.id for each in sent if each.id is not None]
    found = await asyncio.to_thread(library.attached, user, names) if names else {}
    return [AttachedShown.of(each, found.get(each.id or "")) for each in sent]


async def files_to_send(state: State, user: str, chat_id: str, ids: Sequence[str]) -> list[SentFile]:
    """Returns the files that a question of a chat is sent with, as its message is to keep them.

    Raises:
        NotThere: there is no such file, or it is another chat's.
        ApiError: one is given twice, is still being read, or could not be read.
    """
    if twice := next((id for at, id in enumerate(ids) if id in ids[:at]), None):
        raise invalid("files", f"files has {twice!r:.60} twice; accepted: each once.")
    sent = await state.store.files.for_chat(user, chat_id, ids)
    check_ready(await attached(state.library, user, sent))
    return sent


def check_ready(files: Iterable[AttachedShown]) -> None:
    """
    Raises:
        ApiError: 409: one is still being read. 400: one could not be read, or is not there any more.
    """
    for each in files:
        if each.status == "reading":
            message = (
                f"{each.name!r:.60} is still being read; accepted: files whose status is ready. Ask again shortly."
            )
            raise ApiError(409, message, param="files", code="file_not_ready", headers={"Retry-After": "1"})
        if each.status != "ready":
            why = each.error or "Its document was deleted."
            message = f"{each.name!r:.60} cannot be answered from: {why} Accepted: files whose status is ready."
            raise invalid("files", message, "file_unreadable")


async def _followed(state: State, user: str, sent: SentFile, seconds: float) -> AttachedShown:
    """The file once it is read, or as it is after that time or when the server stops."""
    deadline, pause = time.monotonic() + seconds, _PAUSE_S
    while True:
        (shown,) = await attached(state.library, user, [sent])
        if shown.status != "reading" or time.monotonic() >= deadline or state.ending.is_set():
            return shown
        await asyncio.sleep(pause)
        pause = min(1.5 * pause, _MAX_PAUSE_S)
