"""Documents for the command line: the files that `ponder index` picks, and a local or remote library.

The documents of a data directory are opened here, or used through the server that has them open; both speak the shapes
of the API. Of a folder, everything below it is picked in sorted order, except hidden files, files that programs make
for themselves, and files that cannot be read anyway. A name begins with the folder that was given, so files of
different folders stay apart.
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

from app.api.response_models import CollectionShown, FoundShown, JobShown
from app.config import LOCAL_USER, BadSetting, Settings, server_file
from app.db.account_store import Accounts
from app.document_library import open_library
from retrieval import BadQuery, Given, InUse, Library, Query
from retrieval.library import DEFAULT_COLLECTION
from retrieval.parsing import sniff
from retrieval.parsing.parsed import Unreadable
from retrieval.records import among_of

MACHINE_MADE = frozenset({"node_modules", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Picked:
    """A file, and the name that it is kept under."""

    source: str
    path: Path
    bytes: int


@dataclass(slots=True)
class Picks:
    files: list[Picked] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    failed: list[tuple[str, str]] = field(default_factory=list)  # name and reason


def pick(paths: Sequence[Path]) -> Picks:
    """
    Raises:
        BadSetting: a path is not there, or two files would have one name.
    """
    picks = Picks()
    taken: dict[str, Path] = {}
    for given in paths:
        path = given.resolve()
        found: Iterator[tuple[Path, str]]
        if path.is_dir():
            found = ((file, file.relative_to(path.parent).as_posix()) for file in _below(path, picks))
        elif path.is_file():
            found = iter([(path, path.name)])
        else:
            raise BadSetting(f"There is no file or folder {given}.")
        for file, source in found:
            if taken.get(source) == file:
                continue
            if source in taken:
                raise BadSetting(
                    f"{taken[source]} and {file} would both be called {source!r}; index them in different collections, "
                    "or the folder that both are in."
                )
            taken[source] = file
            _take(picks, file, source, walked=path.is_dir())
    return picks


def _below(folder: Path, picks: Picks) -> Iterator[Path]:
    """The files below a folder. Links to folders are not followed: they may lead round in circles."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        picks.failed.append((str(folder), error.strerror or str(error)))
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in MACHINE_MADE:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path), picks)
        elif entry.is_file():
            yield Path(entry.path)


def _take(picks: Picks, file: Path, source: str, *, walked: bool) -> None:
    try:
        source.encode()
        size = file.stat().st_size
        if walked and (reason := _unreadable(file, size)):
            picks.skipped[reason] += 1
            return
    except UnicodeEncodeError:
        shown = source.encode("utf-8", "replace").decode()
        picks.failed.append((shown, "Its name is not valid UTF-8. Rename it."))
    except OSError as error:
        picks.failed.append((source, error.strerror or str(error)))
    else:
        picks.files.append(Picked(source, file, size))


def _unreadable(file: Path, size: int) -> str | None:
    """Returns why a file is not even tried; None for one that is, be it that it then fails."""
    if not size:
        return "empty"
    try:
        sniff.media_type(file, file.name)
    except Unreadable as error:
        return "of a kind that is not read" if sniff.ACCEPTED in str(error) else None
    return None


GROUP_FILES, GROUP_BYTES = 100, 8 << 20  # of one upload
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
        try:
            number = self._library.collection(LOCAL_USER, collection or DEFAULT_COLLECTION).id
        except ValueError as error:
            raise BadSetting(str(error)) from None
        given = [Given(file.source, file.path) for file in files]
        return self._library.ingest.submit(LOCAL_USER, number, given).id

    def job(self, id: str) -> JobShown:
        return JobShown.of(self._library.ingest.jobs.get(id), self._library.ingest.stalled(id))

    def cancel(self, id: str) -> None:
        self._library.ingest.cancel(LOCAL_USER, id)

    def search(self, query: str, limit: int, collection: str | None, rerank: bool) -> FoundShown:
        known = [CollectionShown.of(each) for each in self._library.rights.collections(LOCAL_USER)]
        among = among_of(None if collection is None else [_named(known, collection)])
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
            if group and (len(group) == GROUP_FILES or size + file.bytes > GROUP_BYTES):
                yield group
                group, size = [], 0
            group.append(file)
            size += file.bytes
        if group:
            yield group

    def submit(self, files: Sequence[Picked], collection: str | None) -> str:
        data: dict[str, Any] = {"source": [file.source for file in files], "wait": "0"}
        if collection is not None:
            data["collection"] = str(self._ask("POST", "/api/collections", json={"name": collection})["id"])
        with ExitStack() as opened:
            try:
                parts = [("file", ("file", opened.enter_context(file.path.open("rb")))) for file in files]
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

    def search(self, query: str, limit: int, collection: str | None, rerank: bool) -> FoundShown:
        body: dict[str, Any] = {"query": query, "limit": limit, "rerank": rerank}
        if collection is not None:
            known = [CollectionShown(**each) for each in self._ask("GET", "/api/collections")["collections"]]
            body["collections"] = [_named(known, collection)]
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
            return reply.json()
        message = f"The server at {self._client.base_url} answers {reply.status_code}."
        with contextlib.suppress(ValueError, LookupError, TypeError):
            message = str(reply.json()["error"]["message"])
        raise BadSetting(message)


@contextlib.contextmanager
def _passing_key(settings: Settings) -> Iterator[str]:
    accounts = Accounts.open(settings.resolved_data_dir)
    try:
        key, text = accounts.create_key(LOCAL_USER, "the command line", _PASSING_S)
        try:
            yield text
        finally:
            accounts.forget_key(key.id)
    finally:
        accounts.close()


def _named(collections: Sequence[CollectionShown], name: str) -> int:
    """The user's own collection of that name, or else one that is shared with the user."""
    for each in collections:
        if each.name == name.strip():
            return each.id
    known = ", ".join(repr(each.name) for each in collections) or "none yet; `ponder index PATH` makes one"
    raise BadSetting(f"There is no collection {name!r}; accepted: {known}.")
