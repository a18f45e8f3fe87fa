"""Ingests files as searchable documents, in a thread of its own in which users take turns.

A turn is a while of one of the user's jobs, the oldest first: when it is over and others wait, the rest of the job
waits for the user's next turn. Files are parsed ahead in another process while chunks are embedded here. Documents
become visible in groups, each whole or not at all, and only after everything of theirs is embedded. Work that a kill
interrupts is done again at the next start: a document that is stored already is found unchanged, a chunk that is
embedded already is not embedded again.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError

from pebble import ProcessFuture

from retrieval.document_database import StoreError
from retrieval.document_store import DocumentStore
from retrieval.index.publish import GROUP_CHUNKS, Prepared, Publisher
from retrieval.index.search_index import SearchIndex
from retrieval.jobs import File, Given, Job, JobStore, LeaseLost
from retrieval.parsing import safe_open
from retrieval.parsing.parsed import Parsed, Unreadable
from retrieval.parsing.parser import Parser
from retrieval.records import NotAllowed, NotFound, SourceTaken

log = logging.getLogger("ponder.retrieval")

FORMAT = 1  # of parsing and cutting: when it goes up, files are read anew though their bytes are the same
GROUP_S = 0.5  # a document waits no longer than that for others
AHEAD = 2  # files that are parsed before they are needed
TURN_S = 2.0  # of one user, after which no further file is begun while others wait
POLL_S = 0.5  # between two looks at a job that may be another server's
SAVED_AT = 0.05  # of the dense index that changed: then it is written to disk


_Ready = tuple[File, Prepared]  # a file that is read and cut


class _Cancelled(Exception):
    pass


class Ingest:
    """Takes jobs and works them off. Safe in threads."""

    def __init__(
        self,
        store: DocumentStore,
        views: SearchIndex,
        publisher: Publisher,
        parser: Parser | None = None,
        quota_bytes: int | None = None,
        jobs: JobStore | None = None,
    ) -> None:
        """`jobs`: those of the store, where several processes share them."""
        self._store, self._views, self._publisher = store, views, publisher
        self._parser = parser or Parser()
        self.jobs = jobs or JobStore(store.database, store.rights, quota_bytes)
        self._condition = threading.Condition()
        self._waiting: dict[str, deque[str]] = {}  # jobs by user; the first user is next
        self._current: str | None = None  # the job at hand
        self._cancelled = set[str]()
        self._stalled: dict[str, str] = {}
        self._stopping = False
        self._ahead: deque[tuple[File, str, ProcessFuture[Parsed]]] = deque()  # files being read
        self._at_hand: ProcessFuture[Parsed] | None = None  # the future being waited for
        self._thread = threading.Thread(target=self._work, name="ingest", daemon=True)
        self._renewing = threading.Thread(target=self._renew, name="leases", daemon=True)

    def start(self) -> None:
        """Begin with the jobs an earlier process left undone."""
        self._take_up(self.jobs.resume())
        self._thread.start()
        if self.jobs.lease_s is not None:
            self._renewing.start()

    def stop(self) -> None:
        """End after the batch at hand; the rest goes on at the next start."""
        with self._condition:
            self._stopping = True
            self._let_go()
            self._condition.notify_all()
        for thread in (self._thread, self._renewing):
            if thread.is_alive():
                thread.join()
        try:
            self.jobs.release()
        except StoreError as error:  # the leases end by themselves
            log.warning("The ingest jobs could not be released: %s", error)
        self._parser.close()

    def submit(
        self, user: str, collection: int, given: Sequence[Given], replace: bool = False, *, attached: bool = False
    ) -> Job:
        """Queue files as one job. `replace`: documents that other users added may be replaced. `attached`: the
        collection may be an attached one.

        Raises:
            NotFound: there is no such collection.
            NotAllowed: the user may only read it.
            SourceTaken: a document of another user has the source of a file, and `replace` is false.
            OverQuota: the collection's owner may not keep that much.
        """
        job = self.jobs.create(user, collection, given, replace, attached=attached)
        with self._condition:
            self._waiting.setdefault(user, deque()).append(job.id)
            self._condition.notify_all()
        return job

    def cancel(self, user: str, job: str) -> None:
        """Ingested files stay; the rest is left out.

        Raises:
            NotFound: the user has no such job.
        """
        self.jobs.get(job, user)
        with self._condition:
            self._cancelled.add(job)
            if job in self._waiting.get(user, ()):  # nobody else will end it
                self._waiting[user].remove(job)
                if not self._waiting[user]:
                    del self._waiting[user]
                try:
                    self._finish(job)
                except LeaseLost:
                    self._cancelled.discard(job)
                    self.jobs.ask_to_cancel(job)
            elif job == self._current or self.jobs.lease_s is None:
                self._let_go()
            else:
                self._cancelled.discard(job)
                self.jobs.ask_to_cancel(job)
            self._condition.notify_all()

    def _let_go(self) -> None:
        """Do not wait for a file that is being read; its process is replaced."""
        if self._at_hand is not None:
            self._at_hand.cancel()

    def stalled(self, job: str) -> str | None:
        """Returns why a job cannot go on, where not even that can be written down."""
        return self._stalled.get(job)

    def wait(self, job: str, timeout_s: float | None = None) -> Job:
        """The job once it is over, or as it is after `timeout_s`."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._condition:
            while not (self._stopping or job in self._stalled or self.jobs.get(job).status != "running"):
                left = until - time.monotonic()
                if left <= 0:
                    break
                # Nobody tells of the end of a job that is another server's.
                self._condition.wait(min(left, POLL_S) if self.jobs.lease_s else None if left == math.inf else left)
        return self.jobs.get(job)

    def _take_up(self, jobs: Sequence[str]) -> None:
        for job in jobs:
            self._stalled.pop(job, None)
            self._waiting.setdefault(self.jobs.get(job).user, deque()).append(job)

    # In the thread that renews leases

    def _renew(self) -> None:
        assert self.jobs.lease_s is not None
        while True:
            with self._condition:
                if self._condition.wait_for(lambda: self._stopping, self.jobs.lease_s / 3):
                    return
                mine = {job for jobs in self._waiting.values() for job in jobs} | {self._current or ""} - {""}
            try:
                renewed = self.jobs.renew(mine)
                with self._condition:
                    self._take_up(renewed.taken)
                    for user in list(self._waiting):
                        left = [job for job in self._waiting[user] if job not in mine or job in renewed.held]
                        self._waiting[user] = deque(left)
                        if not left:
                            del self._waiting[user]
                    self._condition.notify_all()
                for job in renewed.cancelled:
                    self.cancel(self.jobs.get(job).user, job)
            except (StoreError, NotFound) as error:
                log.warning("The leases of ingest jobs could not be renewed: %s", error)

    # In the thread

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                user, job = self._next()
            over = True
            try:
                over = self._carry_out(self.jobs.get(job))
            except LeaseLost as error:
                log.warning("%s", error)
            except (sqlite3.Error, OSError, StoreError) as error:
                log.error("The ingest job %s cannot go on: %s", job, error)
                self._stalled[job] = said(error)
            except Exception as error:  # a defect of ours: the job waits for the next start, the thread goes on
                log.exception("The ingest job %s failed", job)
                self._stalled[job] = f"An internal error ({type(error).__name__}); the server's log has the details."
            with self._condition:
                if self._stopping:
                    return
                self._current = None
                if not over:
                    self._waiting.setdefault(user, deque()).appendleft(job)
                self._condition.notify_all()

    def _next(self) -> tuple[str, str]:
        """Pops the next user, who then goes to the back, and their oldest job."""
        user = next(iter(self._waiting))
        jobs = self._waiting.pop(user)
        self._current = jobs.popleft()
        if jobs:
            self._waiting[user] = jobs
        return user, self._current

    def _carry_out(self, job: Job) -> bool:
        """A turn of the job; whether it is over."""
        files = [file for file in job.files if file.status == "queued"]
        try:
            group, since = list[_Ready](), time.monotonic()
            for ready in self._ready(job, files):
                if not group:
                    since = time.monotonic()
                group.append(ready)
                if sum(len(made.texts) for _, made in group) >= GROUP_CHUNKS or time.monotonic() - since > GROUP_S:
                    self._publish(job, group)
                    group = []
            self._publish(job, group)
        except _Cancelled:
            if self._stopping:
                return True
        else:
            if any(file.status == "queued" for file in self.jobs.get(job.id).files):
                return False
        self._finish(job.id)
        self._views.spread()
        self._views.save(at_least=SAVED_AT)
        return True

    def _finish(self, job: str) -> None:
        self.jobs.hold(job)
        # First the copies: a job that is over has left none that nothing needs. A process that ended between storing a
        # document and noting it left one that is found unchanged by its own copy.
        needed = self._store.files()
        for file in self.jobs.get(job).files:
            if file.owned and file.status != "done" and file.path not in needed:
                file.path.unlink(missing_ok=True)
        self.jobs.end(job, "cancelled" if job in self._cancelled else "done")
        with self._condition:
            self._cancelled.discard(job)
            self._condition.notify_all()

    def _check(self, job: Job) -> None:
        if self._stopping or job.id in self._cancelled:
            raise _Cancelled

    def _ready(self, job: Job, files: Sequence[File]) -> Iterator[_Ready]:
        """The files that could be read and are new, in order, while the next ones are being read; those of one turn."""
        waiting, since = iter(files), time.monotonic()
        begun_any = False
        try:
            while True:
                while (
                    len(self._ahead) < AHEAD
                    and not (begun_any and self._turn_is_over(job, since))
                    and (file := next(waiting, None)) is not None
                ):
                    begun_any = True
                    if begun := self._begin(job, file):
                        self._ahead.append((file, *begun))
                if not self._ahead:
                    return
                file, version, future = self._ahead.popleft()
                self._at_hand = future
                self._check(job)  # after the line above, so that a cancel comes before it or cancels this
                try:
                    made = self._prepared(job, file, version, future)
                except Unreadable as error:
                    self.jobs.update(job.id, {file.number: {"status": "failed", "error": str(error)}})
                    continue
                yield file, made
        finally:
            for other in (self._at_hand, *(future for *_, future in self._ahead)):
                if other is not None:
                    other.cancel()
            self._ahead.clear()

    def _turn_is_over(self, job: Job, since: float) -> bool:
        return time.monotonic() - since >= TURN_S and any(user != job.user for user in tuple(self._waiting))

    def _prepared(self, job: Job, file: File, version: str, future: ProcessFuture[Parsed]) -> Prepared:
        """
        Raises:
            Unreadable: it could not be read.
        """
        try:
            parsed = self._parser.result(future)
        except Unreadable:
            raise
        except CancelledError:
            raise _Cancelled from None
        except OSError as error:
            raise Unreadable(said(error)) from None
        except Exception as error:  # a parser's defect costs its file, not the job
            log.exception("The parser of %s failed", file.source)
            raise Unreadable(f"The file could not be read: an internal error ({type(error).__name__}).") from None
        made = self._publisher.prepare(
            file.source, version, parsed, file.metadata, file.bytes, file.path, file.owned, file.root, file.folder
        )
        faults = json.dumps([(fault.message, fault.page) for fault in parsed.faults])
        come = {"status": "embedding", "pages": len(parsed.pages), "chunks": len(made.texts), "faults": faults}
        self.jobs.update(job.id, {file.number: come})
        return made

    def _begin(self, job: Job, file: File) -> tuple[str, ProcessFuture[Parsed]] | None:
        """Its version and its future text; None where there is nothing to do or nothing to read."""
        try:
            version = f"{FORMAT}:{safe_open.digest(file.path, file.root)}"
        except OSError as error:
            self.jobs.update(job.id, {file.number: {"status": "failed", "error": said(error)}})
            return None
        stored = self._store.stored(job.collection, file.source)
        if stored is not None and stored.version == version and dict(stored.metadata) == dict(file.metadata):
            self._store.settle(stored.id, file.folder, None if file.owned else (file.path, file.root))
            same = {"status": "unchanged", "document": stored.id, "chunks": stored.chunks}
            self.jobs.update(job.id, {file.number: same})
            return None
        self.jobs.update(job.id, {file.number: {"status": "reading", "change": "changed" if stored else "new"}})
        return version, self._parser.submit(file.path, file.source, file.root)

    def _publish(self, job: Job, group: Sequence[_Ready]) -> None:
        """Embed new texts of the group, then publish all of it at once."""
        if not group:
            return

        def embedded(known: set[bytes]) -> None:
            come = {file.number: {"embedded": sum(map(known.__contains__, made.new.hashes))} for file, made in group}
            self.jobs.update(job.id, come)
            self._check(job)

        documents = [made for _, made in group]
        self._publisher.embed(documents, embedded)
        try:
            numbers = self._publisher.show(job.user, job.collection, documents, job.replace)
        except SourceTaken as error:  # another user's came meanwhile
            if len(group) > 1:
                for each in group:
                    self._publish(job, [each])
            else:
                self.jobs.update(job.id, {group[0][0].number: {"status": "failed", "error": str(error)}})
            return
        except (NotFound, NotAllowed) as error:  # the collection went, or the right to write to it
            self.jobs.update(job.id, {file.number: {"status": "failed", "error": str(error)} for file, _ in group})
            return
        come = {
            file.number: {"status": "done", "document": number, "embedded": len(made.texts)}
            for (file, made), number in zip(group, numbers, strict=True)
        }
        self.jobs.update(job.id, come)
        with self._condition:
            self._condition.notify_all()


def said(error: BaseException) -> str:
    """An error of the disk or the database, with its remedy."""
    text = str(error)
    if "full" in text.lower() or getattr(error, "errno", None) == 28:
        return "The disk is full. Free some space; the job goes on at the next start."
    if "readonly" in text.lower() or "read-only" in text.lower() or getattr(error, "errno", None) == 30:
        return "The data directory cannot be written to. Make it writable; the job goes on at the next start."
    if getattr(error, "errno", None) == errno.ELOOP:
        return safe_open.LINK
    if isinstance(error, FileNotFoundError):
        return f"The file is not there: {error.filename}"
    if isinstance(error, PermissionError):
        return f"The file may not be read: {error.filename}"
    return text or type(error).__name__
