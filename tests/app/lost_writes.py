"""A loss of power, played: what a process wrote is recorded, and its files are made again without what was not synced.

    LD_PRELOAD=… LOST_WRITES_ROOT=DATA LOST_WRITES_LOG=LOG python -m tests.app.lost_writes MODEL DATA

is a server with users, who say what they were told by files called ACK-…: at such a moment the power goes. A name is on
the disk once its folder was synced, bytes once their file was; of the rest any part may be there, in pieces.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

SOURCE = Path(__file__).with_suffix(".c")
CREATE, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, FOLDER = range(1, 8)
SECTOR = 512  # bytes that a disk writes whole

Losing = Literal["everything", "nothing", "some"]


def compile_shim(folder: Path) -> Path:
    """The library to preload."""
    made = folder / "lost_writes.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", made, SOURCE], check=True, capture_output=True)
    return made


class Record(NamedTuple):
    kind: int
    inode: int
    offset: int
    path: str
    data: bytes


def records(log: Path) -> Iterator[Record]:
    data, at = log.read_bytes(), 0
    while at < len(data):
        kind, inode, offset, length, name = struct.unpack_from("<5q", data, at)
        at += 40
        path = data[at : at + name].decode()
        at += name
        yield Record(kind, inode, offset, path, data[at : at + length])
        at += length


@dataclass(eq=False)
class _File:
    synced: bytearray = field(default_factory=bytearray)
    pending: list[Record] = field(default_factory=list)

    def apply(self, record: Record) -> None:
        if record.kind == TRUNCATE:
            del self.synced[record.offset :]
            self.synced.extend(bytes(record.offset - len(self.synced)))
            return
        end = record.offset + len(record.data)
        self.synced.extend(bytes(max(0, end - len(self.synced))))
        self.synced[record.offset : end] = record.data

    def sync(self) -> None:
        for record in self.pending:
            self.apply(record)
        self.pending.clear()


class Disk:
    """Content of a disk, and the writes that are on their way there."""

    def __init__(self) -> None:
        self._files = dict[int, _File]()  # by inode
        self._names = dict[str, _File | None]()  # synced; None is a folder
        self._changes = defaultdict[str, list[tuple[int, str, str, _File | None]]](list)  # of names, by folder

    def take(self, record: Record) -> None:
        folder = record.path.rpartition("/")[0]
        match record.kind:
            case 1:  # CREATE
                made = self._files[record.inode] = _File()
                self._changes[folder].append((CREATE, record.path, "", made))
            case 2 | 3:  # WRITE, TRUNCATE
                if record.inode in self._files:
                    self._files[record.inode].pending.append(record)
            case 4:  # SYNC
                if record.path in self._changes or record.inode not in self._files:
                    self._settle(record.path, len(self._changes[record.path]))
                else:
                    self._files[record.inode].sync()
            case 5:  # RENAME
                self._changes[folder].append((RENAME, record.path, record.data.decode(), None))
            case 6:  # UNLINK
                self._changes[folder].append((UNLINK, record.path, "", None))
            case _:
                self._changes[folder].append((FOLDER, record.path, "", None))

    def _settle(self, folder: str, count: int) -> None:
        for kind, path, to, made in self._changes[folder][:count]:
            if kind == RENAME:
                if path in self._names:
                    self._names[to] = self._names.pop(path)
            elif kind == UNLINK:
                self._names.pop(path, None)
            else:
                self._names[path] = made
        del self._changes[folder][:count]

    def lose_power(self, losing: Losing, random: Random) -> None:
        """Only what was synced is left, and none, all or some of the rest."""
        for folder, changes in list(self._changes.items()):
            persistence = {"everything": 0, "nothing": len(changes), "some": random.randint(0, len(changes))}[losing]
            self._settle(folder, persistence)
        for file in self._files.values():
            for record in file.pending:
                if losing == "nothing" or (losing == "some" and random.random() < 0.5):
                    file.apply(_torn(record, random) if losing == "some" else record)

    def write(self, root: str, folder: Path) -> None:
        """Make the files below `root` again in `folder`."""
        for path, file in sorted(self._names.items()):
            place = folder / path[len(root) :].lstrip("/")
            if not all(str(above) in self._names for above in Path(path).parents if len(str(above)) > len(root)):
                continue  # its folder is gone
            if file is None:
                place.mkdir(exist_ok=True)
            elif place.name.endswith("-shm"):
                continue  # mapped, not written; SQLite makes it anew
            else:
                place.write_bytes(file.synced)


def _torn(record: Record, random: Random) -> Record:
    """The first sectors of a write, or all of it."""
    if record.kind != WRITE or random.random() < 0.5:
        return record
    return record._replace(data=record.data[: SECTOR * random.randint(0, len(record.data) // SECTOR)])


def moments(log: Path) -> Iterator[tuple[str, int]]:
    """Yields what was said to a user, as JSON, and after how many records."""
    for at, record in enumerate(records(log)):
        if record.kind == WRITE and record.path.rpartition("/")[2].startswith("ACK-"):
            yield record.data.decode(), at


def left_over(log: Path, count: int, root: str, folder: Path, losing: Losing, random: Random) -> None:
    """The files that are there after the power went once `count` records were written."""
    folder.mkdir()
    disk = Disk()
    for at, record in enumerate(records(log)):
        if at == count:
            break
        disk.take(record)
    disk.lose_power(losing, random)
    disk.write(root, folder)


def main(model: Path, data: Path) -> None:
    import httpx

    from app.db.account_store import Accounts
    from app.sequences import persistence
    from tests.app.conftest import serving
    from tests.app.gate import GatedEmbedder
    from tests.app.library import DAM, upload
    from tools.builtin.notes import Notebook
    from tools.grants import Grant, SqliteGrants
    from tools.journal import SqliteJournal

    count = 0

    def told(**what: object) -> None:
        nonlocal count
        count += 1
        (data / f"ACK-{count}").write_text(json.dumps(what))

    with (
        serving(model, data, GatedEmbedder(), sandbox=False) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):

        def is_done(job: str, _: object) -> bool:
            return bool(http.get(f"/api/jobs/{job}").json()["status"] == "done")

        for number in range(3):
            chat = http.post("/api/chats", json={}).json()["id"]
            told(kind="chat", id=chat)
            asked = http.post(f"/api/chats/{chat}/runs", json={"content": f"Count to {number}.", "max_tokens": 20})
            run = asked.json()["run_id"]
            told(kind="run", id=run, chat=chat)
            seen = 0
            with http.stream("GET", f"/api/runs/{run}/events") as reply:
                for line in reply.iter_lines():
                    if line.startswith("id:"):
                        seen = int(line[3:])
                        told(kind="event", run=run, seq=seen)
            http.patch(f"/api/chats/{chat}", json={"title": f"Title {number}"}).raise_for_status()
            told(kind="title", id=chat, title=f"Title {number}")
            text = f"{DAM} {'Stone. ' * 800} {number}"
            reply = upload(http, (f"dam{number}.txt", text), wait="0")
            assert reply.status_code in (201, 202), reply.text
            told(kind="upload", source=f"dam{number}.txt", text=text)
            job = reply.json()["job"]["id"]
            server.until(partial(is_done, job))
            told(kind="document", source=f"dam{number}.txt")
    accounts = Accounts.open(data)
    notes, grants, journal = (
        Notebook(data / "notes.db"), SqliteGrants(data / "permissions.db"), SqliteJournal(data / "calls.db"),
    )  # fmt: skip
    for number in range(3):
        accounts.ensure_user(f"user{number}", None)
        key, _ = accounts.create_key(f"user{number}", "", None)
        told(kind="key", id=key.id)
        notes.remember("ana", f"note {number}")
        told(kind="note", text=f"note {number}")
        grants.put(Grant("ana", f"tool{number}", "built-in", allow=False))
        told(kind="grant", tool=f"tool{number}")
        journal.begin("run", f"call{number}", "print")
        told(kind="call", id=f"call{number}")
        persistence._write(persistence.file_of(data), f"sequences {number}".encode())
        told(kind="sequences", text=f"sequences {number}")
        accounts.revoke(key.id)
        told(kind="revoked", id=key.id)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
