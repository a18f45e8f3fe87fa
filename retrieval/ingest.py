"""From files to searchable documents, one job after the other, in a thread of its own.

Files are parsed ahead in another process while chunks are embedded here. Documents become visible in groups, each whole
or not at all, and only after everything of theirs is embedded. Whatever a kill interrupts is done again at the next
start: a document that is stored already is found unchanged, a chunk that is embedded already is not embedded again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pebble import ProcessFuture

from retrieval.chunking import Cut, Shape, cut
from retrieval.embedding import Embedder
from retrieval.jobs import File, Given, Job, JobStore
from retrieval.parsing.parsed import Parsed, Unreadable
from retrieval.parsing.worker import Parser
from retrieval.records import New, NotAllowed, NotFound
from retrieval.store import DocumentStore
from retrieval.views import Views, embedded_text

log = logging.getLogger("ponder.retrieval")

FORMAT = 1  # of parsing and cutting: when it goes up, files are read anew though their bytes are the same
GROUP_CHUNKS = 256  # that become visible together
GROUP_S = 0.5  # a document waits no longer than that for others
BATCH = 64  # chunks embedded at once, and then kept
AHEAD = 2  # files that are parsed before they are needed
SAVED_AT = 0.05  # of the dense index that changed: then it is written to disk


@dataclass(frozen=True, slots=True)
class _Ready:
    """A file that is read and cut."""

    file: File
    version: str
    parsed: Parsed
    cut: Cut
    texts: Sequence[str]  # as they are embedded
    hashes: Sequence[bytes]


class _Cancelled(Exception):
    pass


class Ingest:
    """Takes jobs and works them off. Safe in threads."""

    def __init__(
        self,
        store: DocumentStore,
        views: Views,
        embedder: Embedder,
        *,
        parser: Parser | None = None,
        shape: Shape | None = None,
    ) -> None:
        self._store, self._views, self._embedder = store, views, embedder
        self._parser = parser or Parser()
        self._shape = shape or Shape()
        self.jobs = JobStore(store.database, store.rights)
        self._condition = threading.Condition()
        self._queue: deque[str] = deque()
        self._cancelled = set[str]()
        self._stalled: dict[str, str] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="ingest", daemon=True)

    def start(self) -> None:
        """Begin with what an earlier process left undone."""
        self._queue.extend(self.jobs.resume())
        self._thread.start()

    def stop(self) -> None:
        """End after the batch at hand; the rest goes on at the next start."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._parser.close()

    def submit(self, user: str, collection: int, given: Sequence[Given]) -> Job:
        """Queue files as one job.

        Raises:
            NotFound: there is no such collection.
            NotAllowed: the user may only read it.
        """
        job = self.jobs.create(user, collection, given)
        with self._condition:
            self._queue.append(job.id)
            self._condition.notify_all()
        return job

    def cancel(self, user: str, job: str) -> None:
        """What is done stays; what is not is left out.

        Raises:
            NotFound: the user has no such job.
        """
        self.jobs.get(job, user)
        with self._condition:
            self._cancelled.add(job)
            if job in self._queue and self._queue[0] != job:  # not begun: nobody else will end it
                self._queue.remove(job)
                self._finish(job)
            self._condition.notify_all()

    def stalled(self, job: str) -> str | None:
        """Why a job cannot go on, where not even that can be written down."""
        return self._stalled.get(job)

    def wait(self, job: str, timeout_s: float | None = None) -> Job:
        """The job once it is over, or as it is after `timeout_s`."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._stopping or job in self._stalled or self.jobs.get(job).status != "running", timeout_s
            )
        return self.jobs.get(job)

    # In the thread

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._stopping)
                if self._stopping:
                    return
                job = self._queue[0]
            try:
                self._carry_out(self.jobs.get(job))
            except (sqlite3.Error, OSError) as error:
                log.error("The ingest job %s cannot go on: %s", job, error)
                self._stalled[job] = said(error)
            except Exception as error:  # a defect of ours: the job waits for the next start, the thread goes on
                log.exception("The ingest job %s failed", job)
                self._stalled[job] = f"An internal error ({type(error).__name__}); the server's log has the details."
            with self._condition:
                if self._stopping:
                    return
                self._queue.popleft()
                self._condition.notify_all()

    def _carry_out(self, job: Job) -> None:
        files = [file for file in job.files if file.status == "queued"]
        try:
            group, since = list[_Ready](), time.monotonic()
            for ready in self._ready(job, files):
                if not group:
                    since = time.monotonic()
                group.append(ready)
                if sum(len(each.hashes) for each in group) >= GROUP_CHUNKS or time.monotonic() - since > GROUP_S:
                    self._publish(job, group)
                    group = []
            self._publish(job, group)
        except _Cancelled:
            if self._stopping:
                return
        self._finish(job.id)
        self._views.spread()
        self._views.save(at_least=SAVED_AT)

    def _finish(self, job: str) -> None:
        self.jobs.end(job, "cancelled" if job in self._cancelled else "done")
        for file in self.jobs.get(job).files:
            if file.owned and file.status != "done":
                file.path.unlink(missing_ok=True)
        with self._condition:
            self._cancelled.discard(job)
            self._condition.notify_all()

    def _check(self, job: Job) -> None:
        if self._stopping or job.id in self._cancelled:
            raise _Cancelled

    def _ready(self, job: Job, files: Sequence[File]) -> Iterator[_Ready]:
        """The files that could be read and are new, in order, while the next ones are being read."""
        ahead: deque[tuple[File, str, ProcessFuture[Parsed]]] = deque()
        waiting = iter(files)
        while True:
            while len(ahead) < AHEAD and (file := next(waiting, None)) is not None:
                if begun := self._begin(job, file):
                    ahead.append((file, *begun))
            if not ahead:
                return
            self._check(job)
            file, version, future = ahead.popleft()
            try:
                parsed = self._parser.result(future)
                made = cut(parsed, self._embedder.pieces, self._shape)
            except Unreadable as error:
                self.jobs.update(job.id, {file.number: {"status": "failed", "error": str(error)}})
                continue
            title = parsed.title or file.source
            texts = [embedded_text(title, c.context, parsed.text[c.start : c.end]) for c in made.chunks]
            hashes = [hashlib.sha256(text.encode()).digest()[:16] for text in texts]
            faults = json.dumps([(fault.message, fault.page) for fault in parsed.faults])
            come = {"status": "embedding", "pages": len(parsed.pages), "chunks": len(hashes), "faults": faults}
            self.jobs.update(job.id, {file.number: come})
            yield _Ready(file, version, parsed, made, texts, hashes)

    def _begin(self, job: Job, file: File) -> tuple[str, ProcessFuture[Parsed]] | None:
        """Its version and what will be its text; None where there is nothing to do or nothing to read."""
        try:
            version = f"{FORMAT}:{_digest(file.path)}"
        except OSError as error:
            self.jobs.update(job.id, {file.number: {"status": "failed", "error": said(error)}})
            return None
        stored = self._store.stored(job.collection, file.source)
        if stored is not None and stored.version == version and dict(stored.metadata) == dict(file.metadata):
            same = {"status": "unchanged", "document": stored.id, "chunks": stored.chunks}
            self.jobs.update(job.id, {file.number: same})
            return None
        self.jobs.update(job.id, {file.number: {"status": "reading"}})
        return version, self._parser.submit(file.path, file.source)

    def _publish(self, job: Job, group: Sequence[_Ready]) -> None:
        """Embed what is new in the group, then show all of it at once."""
        if not group:
            return
        self._embed(job, group)
        documents = [
            New(
                each.file.source, each.version, each.parsed, each.cut, each.hashes, each.file.bytes, each.file.metadata,
                each.file.path, each.file.owned,
            )
            for each in group
        ]  # fmt: skip
        try:
            with self._views.changing():
                numbers, replaced = self._store.put(job.user, job.collection, documents)
        except (NotFound, NotAllowed) as error:  # the collection went, or the right to write to it
            self.jobs.update(job.id, {each.file.number: {"status": "failed", "error": str(error)} for each in group})
            return
        for file in replaced:
            file.unlink(missing_ok=True)
        self.jobs.update(
            job.id,
            {
                each.file.number: {"status": "done", "document": number, "embedded": len(each.hashes)}
                for each, number in zip(group, numbers, strict=True)
            },
        )
        with self._condition:
            self._condition.notify_all()

    def _embed(self, job: Job, group: Sequence[_Ready]) -> None:
        texts = {digest: text for each in group for digest, text in zip(each.hashes, each.texts, strict=True)}
        known = self._store.chunks.known(self._embedder.name, list(texts))
        missing = [digest for digest in texts if digest not in known]
        missing.sort(key=lambda digest: len(texts[digest]))  # of like length: little padding
        for at in range(0, len(missing), BATCH):
            self._check(job)
            some = missing[at : at + BATCH]
            vectors = self._embedder.embed([texts[digest] for digest in some])
            self._store.chunks.put_vectors(self._embedder.name, some, vectors)
            known |= set(some)
            come = {each.file.number: {"embedded": sum(map(known.__contains__, each.hashes))} for each in group}
            self.jobs.update(job.id, come)


def said(error: BaseException) -> str:
    """An error of the disk or the database in words that say what to do."""
    text = str(error)
    if "full" in text.lower() or getattr(error, "errno", None) == 28:
        return "The disk is full. Free some space; the job goes on at the next start."
    if "readonly" in text.lower() or "read-only" in text.lower() or getattr(error, "errno", None) == 30:
        return "The data directory cannot be written to. Make it writable; the job goes on at the next start."
    if isinstance(error, FileNotFoundError):
        return f"The file is not there: {error.filename}"
    if isinstance(error, PermissionError):
        return f"The file may not be read: {error.filename}"
    return text or type(error).__name__


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
