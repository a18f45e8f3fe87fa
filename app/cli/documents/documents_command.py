"""`ponder documents list` and `delete`: the documents that there are, and away with some of them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from app.api.response_models import DocumentShown, FolderShown
from app.cli.documents.document_source import DocumentSource, collection_named, label, open_documents
from app.cli.documents.index_command import many, visible
from app.config import BadSetting, Settings


def list_documents(collection: str | None, as_json: bool, settings: Settings) -> None:
    """Print the documents, the newest first.

    Raises:
        BadSetting: the documents cannot be used, or there is no such collection.
    """
    with closing(open_documents(settings)) as shelf:
        known = shelf.collections()
        number = None if collection is None else collection_named(known, collection)
        found = list(shelf.documents(number))
    if as_json:
        print(json.dumps({"documents": [document.model_dump() for document in found]}))
        return
    names = {each.id: each.name for each in known}
    table = Table(box=None, pad_edge=False)
    for column in ("id", "name", "collection", "kind", "bytes", "chunks"):
        table.add_column(column, justify="right" if column in ("id", "bytes", "chunks") else "left", overflow="fold")
    for each in found:
        kind = each.media_type.rpartition("/")[2].rpartition(".")[2]
        where = names.get(each.collection, "")
        row = (str(each.id), each.source, where, kind, f"{each.bytes:,}", str(each.chunks))
        table.add_row(*(Text(visible(cell)) for cell in row))
    if found:
        Console(highlight=False).print(table)
    print(f"{many(len(found), 'document')}.")


def delete(names: Sequence[str], folder: Path | None, collection: str | None, settings: Settings) -> None:
    """Delete documents by their names or ids, or all of a folder. Either all that are named go, or none.

    Raises:
        BadSetting: one of them is not there, or more than one thing has its name.
    """
    if bool(names) == (folder is not None):
        raise BadSetting("Name documents, or a folder with --folder; `ponder documents list` shows what there is.")
    with closing(open_documents(settings)) as shelf:
        number = None if collection is None else collection_named(shelf.collections(), collection)
        if folder is not None:
            found = _folder(shelf, folder, number)
            shelf.delete_folder(found)
            print(f"{many(found.documents, 'document')} deleted, all of {visible(found.path)}.")
            return
        there = list(shelf.documents(number))
        doomed = {document.id: document for document in (_named(name, there) for name in names)}
        for id in doomed:
            shelf.delete(id)
    print(f"{many(len(doomed), 'document')} deleted.")


def _named(name: str, there: Sequence[DocumentShown]) -> DocumentShown:
    found = [document for document in there if document.source == name]
    if not found and name.isascii() and name.isdigit():
        found = [document for document in there if document.id == int(name)]
    if len(found) > 1:
        ids = ", ".join(str(document.id) for document in found)
        raise BadSetting(f"{len(found)} documents are called {name!r}; accepted: their ids {ids}, or --collection.")
    if not found:
        near = difflib.get_close_matches(name, [document.source for document in there], 3)
        meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise BadSetting(f"There is no document {name!r}.{meant} `ponder documents list` shows what there is.")
    return found[0]


def _folder(shelf: DocumentSource, path: Path, collection: int | None) -> FolderShown:
    wanted = label(path.resolve())
    among = [collection] if collection is not None else [each.id for each in shelf.collections()]
    known = [folder for each in among for folder in shelf.folders(each)]
    found = [folder for folder in known if folder.path == wanted]
    if len(found) > 1:
        raise BadSetting(f"{wanted} is in {len(found)} collections; say which with --collection.")
    if not found:
        paths = ", ".join(sorted({folder.path for folder in known})) or "none yet"
        raise BadSetting(f"The folder {wanted} was never indexed; accepted: {paths}.")
    return found[0]
