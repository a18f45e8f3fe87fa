"""Documents for the command line: the files that `ponder index` picks, and a local or remote library.

The documents of a data directory are opened here, or used through the server that has them open; both speak the shapes
of the API. Of a folder, everything below it is picked in sorted order, except hidden files, files that programs make
for themselves, and files that cannot be read anyway. A name begins with that of the folder which was given, and
folders of one collection have names of their own, so files of different folders stay apart.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from app.api.multipart import plain_path
from app.api.response_models import CollectionShown, DocumentShown, DocumentsShown, FolderShown, FoundShown, JobShown
from app.config import LOCAL_USER, BadSetting, Settings, server_file
from app.db.account_store import Accounts
from app.document_library import open_library
from retrieval import BadQuery, Given, InUse, Library, NotAllowed, NotFound, Query, SourceTaken
from retrieval.library import DEFAULT_COLLECTION
from retrieval.parsing import safe_open, sniff
from retrieval.parsing.parsed import Unreadable
from retrieval.records import among_of

MACHINE_MADE = frozenset({"node_modules", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Picked:
    """A file, and the name that it is kept under. `folder` is the number of the folder that it came with."""

    source: str
    path: Path
    bytes: int
    root: Path  # the folder from which on no link to it is followed
    walked: bool = False  # it was found in a folder that was given, which is its root
    folder: int | None = None


@dataclass(slots=True)
class Picks:
    files: list[Picked] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)  # that were given
    unlisted: list[Path] = field(default_factory=list)  # files and folders that could not be looked at
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    links: list[tuple[str, str]] = field(default_factory=list)  # name and reason: those that lead out of the folder
    failed: list[tuple[str, str]] = field(default_factory=list)  # name and reason


def pick(paths: Sequence[Path]) -> Picks:
    """
    Raises:
        BadSetting: a path is not there, or two files that were given would have one name.
    """
    picks = Picks()
    taken: dict[tuple[Path | None, str], Path] = {}
    for given in paths:
        path = given.resolve()
        found: Iterator[tuple[Path, str]]
        folder = path if path.is_dir() else None
        if folder in picks.folders:
            continue
        if folder is not None:
            picks.folders.append(folder)
            found = ((file, file.relative_to(path.parent).as_posix()) for file in _below(path, path, picks))
        elif path.is_file():
            found = iter([(path, path.name)])
        else:
            raise BadSetting(f"There is no file or folder {given}.")
        for file, source in found:
            if taken.get((folder, source)) == file:
                continue
            if (folder, source) in taken:
                raise BadSetting(
                    f"{taken[folder, source]} and {file} would both be called {source!r}; index them in different "
                    "collections, or the folder that both are in."
                )
            taken[folder, source] = file
            _take(picks, file, source, folder)
    return picks


def _below(folder: Path, root: Path, picks: Picks) -> Iterator[Path]:
    """The files below a folder of `root`. No link is followed: it may lead out, in circles, or to a file twice."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        picks.failed.append((str(folder), error.strerror or str(error)))
        picks.unlisted.append(folder)
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in MACHINE_MADE:
            continue
        if entry.is_symlink():
            _note_link(Path(entry.path), root, picks)
        elif entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path), root, picks)
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def _note_link(link: Path, root: Path, picks: Picks) -> None:
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: Python's own for a link that leads to itself, up to 3.12
        picks.skipped["a link that leads nowhere"] += 1
        return
    if target.is_relative_to(root):
        picks.skipped["a link within the folder"] += 1
    else:
        shown = link.relative_to(root.parent).as_posix().encode("utf-8", "replace").decode()
        picks.links.append((shown, f"it is a link that leads out of the folder, to {target}"))


def _take(picks: Picks, file: Path, source: str, folder: Path | None) -> None:
    """`folder` is the one that was given, None where the file itself was."""
    try:
        source.encode()
        with safe_open.opened(file, root := folder or file.parent) as opened:
            size = opened.stat().st_size
            reason = _unreadable(opened, file.name, size) if folder else None
        if reason:
            picks.skipped[reason] += 1
            return
    except UnicodeEncodeError:
        shown = source.encode("utf-8", "replace").decode()
        picks.failed.append((shown, "Its name is not valid UTF-8. Rename it."))
    except OSError as error:
        picks.failed.append((source, error.strerror or str(error)))
        picks.unlisted.append(file)
    else:
        picks.files.append(Picked(source, file, size, root, walked=folder is not None))


def _unreadable(file: Path, name: str, size: int) -> str | None:
    """Returns why a file is not even tried; None for one that is, be it that it then fails."""
    if not size:
        return "empty"
    try:
        sniff.media_type(file, name)
    except Unreadable as error:
        return "of a kind that is not read" if sniff.ACCEPTED in str(error) else None
    return None


GROUP_FILES, GROUP_BYTES = 100, 8 << 20  # of one upload
PAGE = 500  # documents that are listed at once
_PASSING_S = 24 * 3600.0  # of a key that is taken back at the end, should there be none
_TIMEOUT = httpx.Timeout(30, read=600)


class RefusedFile(Exception):
    """Files that are not accepted; the message says why."""


class DocumentSource(Protocol):
    """A place that keeps documents."""

    def groups(self, files: Sequence[Picked]) -> Iterator[Sequence[Picked]]:
        """The files in parts that `submit` takes at once."""

    def submit(self, files: Sequence[Picked], collection: str | None) -> str:
        """Queue files for the collection of that name, which is made if there is none. The job's id.

        Raises:
            Refused: they are not accepted.
        """

    def job(self, id: str) -> JobShown: ...
    def cancel(self, id: str) -> None: ...

    def named(self, source: str) -> str:
        """The name that a document of that source is kept under."""

    def enter(self, path: Path, collection: str | None) -> FolderShown:
        """The folder at that path in the collection of that name; each is made if there is none."""

    def collections(self) -> list[CollectionShown]: ...
    def folders(self, collection: int) -> list[FolderShown]: ...

    def documents(self, collection: int | None = None, folder: int | None = None) -> Iterator[DocumentShown]:
        """The documents of a collection, of a folder, or all, the newest first."""

    # Of these each raises BadSetting where it is refused.
    def rename(self, document: int, source: str) -> None: ...
    def delete(self, document: int) -> None: ...
    def delete_folder(self, folder: FolderShown) -> None: ...

    def search(self, query: str, limit: int, collection: str | None, rerank: bool) -> FoundShown:
        """
        Raises:
            BadSetting: there is no such collection, or the query cannot be searched for.
        """

    def close(self) -> None: ...


def open_documents(settings: Settings) -> DocumentSource:
    """
    Raises:
        BadSetting: the documents cannot be used, or another process has them and no server answers for it.
    """
    try:
        return LocalDocuments(open_library(settings))
    except InUse as in_use:
        try:
            return RemoteDocuments(server_file(settings).read_text(encoding="utf-8").strip(), settings)
        except (OSError, httpx.HTTPError, httpx.InvalidURL):
            raise BadSetting(
                f"{in_use} If it is a server, it is not ready; otherwise wait until it is done, or give another "
                "--data-dir."
            ) from None


class LocalDocuments:
    """Documents opened by this process."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def groups(self, files: Sequence[Picked]) -> Iterator[Sequence[Picked]]:
        yield files

    def submit(self, files: Sequence[Picked], collection: str | None) -> str:
        given = [Given(file.source, file.path, root=file.root, folder=file.folder) for file in files]
        try:
            return self._library.ingest.submit(LOCAL_USER, self._collection(collection), given).id
        except SourceTaken as error:
            raise RefusedFile(str(error)) from None

    def _collection(self, name: str | None) -> int:
        try:
            return self._library.collection(LOCAL_USER, name or DEFAULT_COLLECTION).id
        except ValueError as error:
            raise BadSetting(str(error)) from None

    def job(self, id: str) -> JobShown:
        return JobShown.of(self._library.ingest.jobs.get(id), self._library.ingest.stalled(id))

    def cancel(self, id: str) -> None:
        self._library.ingest.cancel(LOCAL_USER, id)

    def named(self, source: str) -> str:
        return source

    def enter(self, path: Path, collection: str | None) -> FolderShown:
        number = self._collection(collection)
        return FolderShown.of(self._library.store.folders.enter(LOCAL_USER, number, label(path)))

    def collections(self) -> list[CollectionShown]:
        return [CollectionShown.of(each) for each in self._library.rights.collections(LOCAL_USER)]

    def folders(self, collection: int) -> list[FolderShown]:
        return [FolderShown.of(each) for each in self._library.store.folders.of(LOCAL_USER, collection)]

    def documents(self, collection: int | None = None, folder: int | None = None) -> Iterator[DocumentShown]:
        before: str | None = None
        while True:
            page, before = self._library.store.page(LOCAL_USER, collection, folder, PAGE, before)
            yield from (DocumentShown.of(document) for document in page)
            if before is None:
                return

    def rename(self, document: int, source: str) -> None:
        with _refused():
            self._library.rename(LOCAL_USER, document, source)

    def delete(self, document: int) -> None:
        with _refused():
            self._library.delete(LOCAL_USER, document)

    def delete_folder(self, folder: FolderShown) -> None:
        with _refused():
            self._library.delete_folder(LOCAL_USER, folder.collection, folder.id)

    def search(self, query: str, limit: int, collection: str | None, rerank: bool) -> FoundShown:
        among = among_of(None if collection is None else [collection_named(self.collections(), collection)])
        try:
            return FoundShown.of(self._library.search(Query(LOCAL_USER, query, limit, among, rerank=rerank)))
        except BadQuery as error:
            raise BadSetting(str(error)) from None

    def close(self) -> None:
        self._library.close()


class RemoteDocuments:
    """Documents that a server of this data directory has open.

    Where it asks for a key, one is made for as long as this lasts: anyone with write access to the directory may do
    that.
    """

    def __init__(self, url: str, settings: Settings) -> None:
        """
        Raises:
            httpx.HTTPError, httpx.InvalidURL: nobody answers there.
            BadSetting: it asks for a key, and none can be made.
        """
        with ExitStack() as closing:
            self._client = closing.enter_context(httpx.Client(base_url=url, timeout=_TIMEOUT, trust_env=False))
            asked = self._client.get("/api/session", timeout=5).raise_for_status().json()
            if asked["auth"] != "off":
                self._client.headers["Authorization"] = f"Bearer {closing.enter_context(_passing_key(settings))}"
            self._closing = closing.pop_all()

    def groups(self, files: Sequence[Picked]) -> Iterator[Sequence[Picked]]:
        group, size = list[Picked](), 0
        for file in files:
            full = len(group) == GROUP_FILES or size + file.bytes > GROUP_BYTES
            if group and (full or file.folder != group[0].folder):
                yield group
                group, size = [], 0
            group.append(file)
            size += file.bytes
        if group:
            yield group

    def submit(self, files: Sequence[Picked], collection: str | None) -> str:
        data: dict[str, Any] = {"source": [file.source for file in files], "wait": "0"}
        if collection is not None:
            data["collection"] = str(self._collection(collection))
        if files[0].folder is not None:
            data["folder"] = str(files[0].folder)
        with ExitStack() as opened:
            try:
                descriptors = (safe_open.descriptor(file.path, file.root) for file in files)
                parts = [("file", ("file", opened.enter_context(os.fdopen(each, "rb")))) for each in descriptors]
            except OSError as error:
                raise RefusedFile(f"It cannot be read: {error.strerror or error}.") from None
            try:
                return str(self._ask("POST", "/api/documents", files=parts, data=data)["job"]["id"])
            except BadSetting as error:
                raise RefusedFile(str(error)) from None

    def job(self, id: str) -> JobShown:
        return JobShown.model_validate(self._ask("GET", f"/api/jobs/{id}"))

    def cancel(self, id: str) -> None:
        self._ask("POST", f"/api/jobs/{id}/cancel")

    def _collection(self, name: str) -> int:
        return int(self._ask("POST", "/api/collections", json={"name": name})["id"])

    def named(self, source: str) -> str:
        return plain_path(source)

    def enter(self, path: Path, collection: str | None) -> FolderShown:
        address = f"/api/collections/{self._collection(collection or DEFAULT_COLLECTION)}/folders"
        return FolderShown(**self._ask("POST", address, json={"path": label(path)}))

    def collections(self) -> list[CollectionShown]:
        return [CollectionShown(**each) for each in self._ask("GET", "/api/collections")["collections"]]

    def folders(self, collection: int) -> list[FolderShown]:
        return [FolderShown(**each) for each in self._ask("GET", f"/api/collections/{collection}/folders")["folders"]]

    def documents(self, collection: int | None = None, folder: int | None = None) -> Iterator[DocumentShown]:
        asked: dict[str, int | str | None] = {"limit": PAGE, "collection": collection, "folder": folder}
        while True:
            params = {name: value for name, value in asked.items() if value is not None}
            page = DocumentsShown.model_validate(self._ask("GET", "/api/documents", params=params))
            yield from page.documents
            if page.next is None:
                return
            asked["before"] = page.next

    def rename(self, document: int, source: str) -> None:
        self._ask("PATCH", f"/api/documents/{document}", json={"source": source})

    def delete(self, document: int) -> None:
        self._ask("DELETE", f"/api/documents/{document}")

    def delete_folder(self, folder: FolderShown) -> None:
        self._ask("DELETE", f"/api/collections/{folder.collection}/folders/{folder.id}")

    def search(self, query: str, limit: int, collection: str | None, rerank: bool) -> FoundShown:
        body: dict[str, Any] = {"query": query, "limit": limit, "rerank": rerank}
        if collection is not None:
            body["collections"] = [collection_named(self.collections(), collection)]
        return FoundShown.model_validate(self._ask("POST", "/api/search", json=body))

    def close(self) -> None:
        self._closing.close()

    def _ask(self, method: str, path: str, **what: Any) -> Any:  # Any: httpx's arguments and JSON
        try:
            reply = self._client.request(method, path, **what)
        except httpx.HTTPError as error:
            message = f"The server at {self._client.base_url} does not answer ({error or type(error).__name__})."
            raise BadSetting(message) from None
        if reply.is_success:
            return reply.json() if reply.content else None
        message = f"The server at {self._client.base_url} answers {reply.status_code}."
        with contextlib.suppress(ValueError, LookupError, TypeError):
            message = str(reply.json()["error"]["message"])
        raise BadSetting(message)


@contextlib.contextmanager
def _passing_key(settings: Settings) -> Iterator[str]:
    accounts = Accounts.open(settings.resolved_data_dir, settings.database_address)
    try:
        key, text = accounts.create_key(LOCAL_USER, "the command line", _PASSING_S)
        try:
            yield text
        finally:
            accounts.forget_key(key.id)
    finally:
        accounts.close()


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    try:
        yield
    except (NotFound, NotAllowed, SourceTaken) as error:
        raise BadSetting(str(error)) from None


def label(path: Path) -> str:
    """A path as text; bytes of it that are not UTF-8 become question marks."""
    return os.fsencode(path).decode("utf-8", "replace")


def collection_named(collections: Sequence[CollectionShown], name: str) -> int:
    """Returns the user's own collection of that name, or else one that is shared with the user."""
    for each in collections:
        if each.name == name.strip():
            return each.id
    known = ", ".join(repr(each.name) for each in collections) or "none yet; `ponder index PATH` makes one"
    raise BadSetting(f"There is no collection {name!r}; accepted: {known}.")
