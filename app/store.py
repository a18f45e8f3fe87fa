"""Everything a server keeps in its data directory, opened and closed together: the nouns of `app/data/`.

Documents have files of their own (`retrieval/`), and so do tools. Knows nothing of HTTP or the engine.
"""

from __future__ import annotations

from pathlib import Path

from app.data.chats import Chats
from app.data.database import Database
from app.data.deleted import Deleted
from app.data.exchange import Exchange
from app.data.folders import Folders
from app.data.overview import Overview
from app.data.run_keys import RunKeys
from app.data.run_rows import LoggedEvent, RunRows
from app.data.search import ChatSearch

__all__ = ["LoggedEvent", "Store"]


class Store:
    """The data of one directory, which one process at a time may have open."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.chats = Chats(database)
        self.folders = Folders(database)
        self.deleted = Deleted(database)
        self.search = ChatSearch(database)
        self.exchange = Exchange(database)
        self.runs = RunRows(database)
        self.run_keys = RunKeys(database)
        self.overview = Overview(database)

    @classmethod
    async def open(cls, data_dir: Path) -> Store:
        """
        Raises:
            BadSetting: the directory cannot be used; the message says why.
        """
        return cls(await Database.open(data_dir))

    async def close(self) -> None:
        """Finish every write, then let go of the directory. Idempotent."""
        await self.database.close()
