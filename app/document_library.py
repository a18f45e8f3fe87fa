"""The documents of a data directory, opened with the settings' embedder. Errors become a sentence."""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

from app.config import BadSetting, Settings
from retrieval import Library
from retrieval.document_database import NewerFile, StoreError
from retrieval.embedding import BUNDLED, SentenceEmbedder

if TYPE_CHECKING:
    from app.db.store import Store


log = logging.getLogger("ponder")
_BUSY_TIMEOUT_S = 30  # for another server's write


def open_library(settings: Settings) -> Library:
    """Open `<data_dir>/documents`, with the PostgreSQL database where the settings name one. The bundled
    embedder is loaded at its first text, another one at once.

    Raises:
        InUse: another process has it open.
        BadSetting: the folder, the database or the embedder cannot be used.
    """
    embedder = SentenceEmbedder(settings.embedder)
    if settings.embedder != BUNDLED:
        try:
            _ = embedder.size
        except Exception as error:  # a model's files and a Hub may raise anything
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BadSetting(f"The embedder {settings.embedder!r} cannot be loaded: {reason}") from None
    folder = documents_dir(settings)
    if (address := settings.database_address) is not None:
        return _open_in_postgres(settings, address, embedder)
    try:
        return Library.open(folder, embedder, settings.resolved_storage_per_user)
    except (OSError, sqlite3.Error, NewerFile) as error:
        raise BadSetting(f"The documents in {folder} cannot be used: {disk_trouble(error) or error}") from None


def _open_in_postgres(settings: Settings, address: str, embedder: SentenceEmbedder) -> Library:
    from app.db.postgres import postgres_engine

    folder = documents_dir(settings)
    engine = postgres_engine(address, _BUSY_TIMEOUT_S, sole=False)
    try:
        library = Library.open(folder, embedder, settings.resolved_storage_per_user, engine)
    except OSError as error:
        raise BadSetting(f"The documents in {folder} cannot be used: {disk_trouble(error) or error}") from None
    except (StoreError, NewerFile, ValueError) as error:
        raise BadSetting(f"The PostgreSQL database of --database cannot be used for documents: {error}.") from None
    if (folder / "documents.db").exists() and not library.store.any():
        log.warning("the documents of %s are not in the PostgreSQL database: `ponder migrate` copies them", folder)
    return library


async def sweep_files(store: Store, library: Library) -> None:
    """Deletes what was read of files that are gone: with their chat, or as they were never sent."""
    # In this order: an upload's row is there before its attached collection is.
    attached = await asyncio.to_thread(library.rights.all_attached)
    kept = await store.files.kept()
    for user, name in attached:
        if name not in kept:
            await asyncio.to_thread(library.detach, user, [name])


def documents_dir(settings: Settings) -> Path:
    return settings.resolved_data_dir / "documents"


def disk_trouble(error: BaseException) -> str | None:
    """Returns advice on a disk that cannot be written to; None for any other error."""
    text, number = str(error).lower(), getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in text or getattr(error, "sqlstate", None) == "53100":
        return "The disk is full. Free some space and try again."
    if number in (errno.EROFS, errno.EACCES) or "readonly" in text:
        return "The data directory cannot be written to. Make it writable and try again."
    return None
