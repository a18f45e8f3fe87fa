"""Compares folders with what was indexed from them before: files that were renamed, and files that are gone.

A renamed file is a new name with the bytes of a document whose own file is gone: the document takes the new name, and
nothing is read or embedded again. A file that could not be looked at is not gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from app.api.response_models import DocumentShown, FolderShown
from app.cli.documents.document_source import DocumentSource, Picked, Picks
from app.config import BadSetting
from retrieval.parsing import safe_open


@dataclass(slots=True)
class FolderChanges:
    """Sources before and after, documents whose files are gone, and remarks on the folders' names."""

    renamed: list[tuple[str, str]] = field(default_factory=list)
    gone: list[DocumentShown] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def enter_folders(shelf: DocumentSource, picks: Picks, collection: str | None) -> tuple[list[Picked], FolderChanges]:
    """Record the folders that were given, and give renamed documents their new names. Returns the files under the
    names of their folders, and what became of the documents that were there."""
    files, changes = [file for file in picks.files if not file.walked], FolderChanges()
    for path in picks.folders:
        folder = shelf.enter(path, collection)
        if folder.name != path.name:
            changes.notes.append(f"{path} is kept as {folder.name!r}, as the collection has another {path.name!r}.")
        mine = [
            replace(file, source=_source(shelf, folder, file.path, path), folder=folder.id)
            for file in picks.files
            if file.walked and file.root == path
        ]
        unlisted = [_source(shelf, folder, each, path) for each in picks.unlisted if each.is_relative_to(path)]
        _compare(shelf, folder, mine, unlisted, changes)
        files += mine
    return files, changes


def _source(shelf: DocumentSource, folder: FolderShown, path: Path, root: Path) -> str:
    return shelf.named(f"{folder.name}/{path.relative_to(root).as_posix()}".removesuffix("/."))


def _compare(
    shelf: DocumentSource, folder: FolderShown, files: Sequence[Picked], unlisted: Sequence[str], changes: FolderChanges
) -> None:
    known = {document.source: document for document in shelf.documents(folder=folder.id)}
    here = {file.source for file in files}
    gone = {
        source: document
        for source, document in known.items()
        if source not in here and not any(source == each or source.startswith(f"{each}/") for each in unlisted)
    }
    for file in files if gone else ():
        if file.source not in known and (document := _same(file, gone)):
            try:
                shelf.rename(document.id, file.source)
            except BadSetting:  # the name is taken by then: it is a new file, and its document gone
                continue
            changes.renamed.append((document.source, file.source))
            del gone[document.source]
    changes.gone += sorted(gone.values(), key=lambda document: document.source)


def _same(file: Picked, gone: dict[str, DocumentShown]) -> DocumentShown | None:
    """A document that is gone and has the bytes of the file, of the same kind by name."""
    suffix = PurePosixPath(file.source).suffix.lower()
    alike = [
        each
        for each in gone.values()
        if each.bytes == file.bytes and PurePosixPath(each.source).suffix.lower() == suffix
    ]
    try:
        digest = safe_open.digest(file.path, file.root) if alike else ""
    except OSError:  # reading it will tell
        return None
    return next((each for each in alike if each.version.rpartition(":")[2] == digest), None)
