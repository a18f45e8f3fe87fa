"""`ponder index` and `ponder search` in the terminal: progress while it lasts, failures at the end, passages found.

On a terminal progress is drawn, elsewhere it is a line now and then. Text from documents is shown without control
characters: a terminal would obey them.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from app.api.response_models import FileShown, JobShown, PassageShown
from app.cli.documents.document_source import DocumentSource, Picked, RefusedFile, open_documents, pick
from app.cli.documents.folder_changes import FolderChanges, enter_folders
from app.config import BadSetting, Settings
from retrieval.index.lexical import terms

POLL_S, LINE_S = 0.2, 5.0
TELLING = 0.05  # of the work: from then on its speed says when it will be done
SNIPPET = 320  # characters
MAX_NAMED = 20  # files that are gone, in the output
_OVER = ("done", "unchanged", "failed", "cancelled")


class Work:
    """The jobs of one `ponder index`, taken together."""

    def __init__(self, shelf: DocumentSource, files: Sequence[Picked]) -> None:
        self._shelf = shelf
        self._files = len(files)
        self._bytes = sum(file.bytes for file in files) or 1
        self._began = time.monotonic()
        self.jobs: dict[str, JobShown] = {}
        self.refused: list[tuple[str, str]] = []

    def submit(self, files: Sequence[Picked], collection: str | None) -> None:
        """Queue files; those that are refused together are tried one by one."""
        try:
            id = self._shelf.submit(files, collection)
        except RefusedFile as refusal:
            if len(files) > 1:
                for file in files:
                    self.submit([file], collection)
            else:
                self.refused.append((files[0].source, str(refusal)))
        else:
            self.jobs[id] = self._shelf.job(id)

    def look(self) -> bool:
        """Ask how far it is; whether everything is over."""
        for id, job in self.jobs.items():
            if not job.over:
                self.jobs[id] = self._shelf.job(id)
                if not self.jobs[id].over:
                    break  # jobs are worked off in order: the later ones have not begun
        return all(job.over for job in self.jobs.values())

    def cancel(self) -> None:
        """Cancel running jobs and wait until they have ended."""
        for id, job in self.jobs.items():
            if not job.over:
                self._shelf.cancel(id)
        while not self.look():
            time.sleep(POLL_S)

    @property
    def files(self) -> list[FileShown]:
        return [file for job in self.jobs.values() for file in job.files]

    def count(self, *statuses: str) -> int:
        return sum(file.status in statuses for file in self.files)

    @property
    def share(self) -> float:
        """Share of the work done, by the bytes of the files that are over and of those half-way by their chunks."""
        return sum(file.bytes * _share(file) for file in self.files) / self._bytes

    def line(self) -> str:
        """Describes the progress in words."""
        chunks = sum(file.embedded for file in self.files)
        parts = [f"{self.count(*_OVER) + len(self.refused)} of {many(self._files, 'file')}", many(chunks, "chunk")]
        parts += [f"{count} {stage}" for stage in ("reading", "embedding") if (count := self.count(stage))]
        if TELLING <= (share := self.share) < 1:
            parts.append(f"about {_duration((time.monotonic() - self._began) * (1 - share) / share)} left")
        return ", ".join(parts)


def index(paths: Sequence[Path], collection: str | None, prune: bool, settings: Settings) -> int:
    """Index files and folders; the exit code. `prune`: documents whose files are gone from the folders go, too.

    Raises:
        BadSetting: a path is not there, the documents cannot be used, or there is no folder to prune.
    """
    picks = pick(paths)
    if prune and not picks.folders:
        raise BadSetting("--prune is for folders; a document alone is removed with `ponder documents delete`.")
    shelf = open_documents(settings)
    try:
        files, changes = enter_folders(shelf, picks, collection)
        work = Work(shelf, files)
        cancelled = False
        try:
            with _Shown() as shown:
                for group in shelf.groups(files) if files else ():
                    work.submit(group, collection)
                    work.look()
                    shown.update(work)
                while not work.look():
                    shown.update(work)
                    time.sleep(POLL_S)
        except KeyboardInterrupt:
            print("Stopping; press Ctrl-C again to leave at once.", file=sys.stderr)
            work.cancel()
            cancelled = True
        if prune and not cancelled:
            for document in changes.gone:
                shelf.delete(document.id)
    finally:
        shelf.close()
    for name, reason in picks.links:
        print(f"skipped: {visible(name)}: {visible(reason)}.", file=sys.stderr)
    failed = [*picks.failed, *work.refused]
    failed += [(file.source, file.error or "It failed.") for file in work.files if file.status == "failed"]
    failed += [(many(len(job.files), "file"), job.stalled) for job in work.jobs.values() if job.stalled]
    for file in work.files:
        for fault in file.faults:
            where = file.source if fault.page is None else f"{file.source}, page {fault.page}"
            print(f"note: {visible(where)}: {visible(fault.message)}", file=sys.stderr)
    for name, reason in failed:
        print(f"failed: {visible(name)}: {visible(reason)}", file=sys.stderr)
    _tell(changes, pruned := prune and not cancelled)
    done = [file for file in work.files if file.status == "done"]
    made = Counter(file.change for file in done)
    facts = [f"{made[change]} {change}" for change in ("new", "changed") if made[change]]
    facts.append(many(sum(file.chunks for file in done), "chunk"))
    said = [f"{many(len(done), 'document')} indexed ({', '.join(facts)})"]
    names = {new for _, new in changes.renamed}
    same = [file for file in work.files if file.status == "unchanged" and file.source not in names]
    said += [f"{len(same)} unchanged"] if same else []
    said += [f"{len(names)} renamed"] if names else []
    said += [f"{len(changes.gone)} {'removed' if pruned else 'gone'}"] if changes.gone else []
    said += [f"{count} cancelled"] if (count := work.count("cancelled")) else []
    said += [f"{len(failed)} failed"] if failed else []
    skipped = {**picks.skipped, **({"a link out of the folder": len(picks.links)} if picks.links else {})}
    said += [f"{count} skipped ({reason})" for reason, count in sorted(skipped.items())]
    print(", ".join(said) + ".")
    if changes.gone and not pruned:
        are, them = ("file is", "it") if len(changes.gone) == 1 else ("files are", "them")
        print(f"{len(changes.gone)} {are} gone; run with --prune to remove {them} from the index.")
    return 130 if cancelled else 1 if failed else 0


def _tell(changes: FolderChanges, pruned: bool) -> None:
    """Names what was renamed and what is gone, on standard error."""
    lines = [f"note: {visible(note)}" for note in changes.notes]
    lines += [f"renamed: {visible(old)} → {visible(new)}" for old, new in changes.renamed]
    gone = [f"{'removed' if pruned else 'gone'}: {visible(document.source)}" for document in changes.gone]
    lines += gone[:MAX_NAMED]
    lines += [f"… and {len(gone) - MAX_NAMED} more"] if len(gone) > MAX_NAMED else []
    for line in lines:
        print(line, file=sys.stderr)


class _Shown(AbstractContextManager["_Shown"]):
    """Progress on standard error: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = BarColumn(), TaskProgressColumn(), TextColumn("{task.description}", markup=False)
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("", total=1.0)
        self._last = time.monotonic()

    def __enter__(self) -> _Shown:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, work: Work) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=work.share, description=work.line())
        elif time.monotonic() - self._last > LINE_S:
            self._last = time.monotonic()
            print(work.line(), file=sys.stderr, flush=True)


def search(query: str, limit: int, collection: str | None, rerank: bool, as_json: bool, settings: Settings) -> None:
    """Print the passages that answer best.

    Raises:
        BadSetting: the documents cannot be used, or the query cannot be searched for.
    """
    console = Console(highlight=False, soft_wrap=True)
    shelf = open_documents(settings)
    try:
        waiting = console.status("Searching …") if console.is_terminal and not as_json else nullcontext()
        with waiting:
            found = shelf.search(query, limit, collection, rerank)
    finally:
        shelf.close()
    if as_json:
        print(found.model_dump_json())
        return
    if not found.passages:
        console.print("Nothing was found.", style="dim")
    wanted = _words(query)
    for number, passage in enumerate(found.passages, 1):
        console.print(_head(number, passage))
        snippet = Text("   " + _snippet(visible(passage.text), wanted))
        if wanted is not None:
            snippet.highlight_regex(wanted, "bold")
        console.print(snippet)


def _share(file: FileShown) -> float:
    if file.status in _OVER:
        return 1.0
    return file.embedded / file.chunks if file.status == "embedding" and file.chunks else 0.0


def _head(number: int, passage: PassageShown) -> Text:
    document, span = passage.document, passage.span
    page = "" if span.page is None else f", page {span.page}"
    head = Text(f"{number}. ")
    head.append(visible(document.title), "bold")
    source = "" if document.source == document.title else f"{visible(document.source)}, "
    place = page.removeprefix(", ") + ", " if page else ""
    head.append(f"  {source}{place}characters {span.start}–{span.end}, score {passage.score:.2f}", "dim")
    return head


def _words(query: str) -> re.Pattern[str] | None:
    """Returns a pattern of the query's words to mark; longer ones also where they have an ending."""
    words = sorted(set(terms(query)), key=len, reverse=True)
    if not words:
        return None
    return re.compile("|".join(rf"\b{re.escape(word)}{chr(92)}w*" if len(word) > 3 else rf"\b{re.escape(word)}\b"
                               for word in words), re.IGNORECASE)  # fmt: skip


def _snippet(text: str, wanted: re.Pattern[str] | None) -> str:
    """The part of a passage with the most of the words."""
    if len(text) <= SNIPPET:
        return text
    places = [found.start() for found in wanted.finditer(text)] if wanted else []
    start = max(places, key=lambda at: sum(at <= other < at + SNIPPET - 40 for other in places), default=0)
    start = text.rfind(" ", 0, max(0, start - 30)) + 1
    cut = text[start : start + SNIPPET].rpartition(" ")[0]
    return f"{'… ' if start else ''}{cut} …"


def visible(text: str) -> str:
    """A text in one line, of characters that a terminal only shows."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def many(count: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
