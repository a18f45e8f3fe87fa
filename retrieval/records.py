"""The nouns of retrieval, as plain data: collections, documents, passages, and their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from retrieval.index.chunking import Cut
from retrieval.parsing.parsed import Parsed, ParseFault

Role = Literal["owner", "writer", "reader"]
MemberRole = Literal["writer", "reader"]
Among = frozenset[int] | Literal["own", "all"]  # collections: these, the user's own, or all that the user may read
Metadata = Mapping[str, str | int | float | bool]


class NotFound(Exception):
    """There is no such collection, document or job, or this user may not know of it."""


class NotAllowed(Exception):
    """The user may see it but not do this."""


class CollectionNameTaken(Exception):
    """The owner has another collection of this name."""


class SourceTaken(Exception):
    """The collection has another document of this source; the message names it."""


class TooManyInvited(Exception):
    """A collection has as many open invitations as it may have."""


@dataclass(frozen=True, slots=True)
class Collection:
    """`role` is the asking user's."""

    id: int
    name: str
    owner: str
    role: Role
    documents: int


@dataclass(frozen=True, slots=True)
class Member:
    """A user beside the owner: `member` reads the collection, `invited` has been asked and has not accepted."""

    user: str
    role: MemberRole
    status: Literal["member", "invited"]


@dataclass(frozen=True, slots=True)
class Invitation:
    """An offer to a user of a role in another's collection."""

    collection: int
    name: str
    owner: str
    role: MemberRole
    created_at: float


@dataclass(frozen=True, slots=True)
class Document:
    """`version` is of its bytes; `characters` and `chunks` count its text and its indexed pieces. `pages` is 0 where
    there are none; `folder` is the number of the folder that it was indexed with."""

    id: int
    collection: int
    source: str
    title: str
    media_type: str
    version: str
    bytes: int
    characters: int
    chunks: int
    pages: int
    metadata: Metadata
    faults: tuple[ParseFault, ...]
    created_at: float
    updated_at: float
    folder: int | None = None


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """A file in an attached collection, `name`. `document` is None until it is read; `error` says why it cannot be.
    Neither: it is being read."""

    name: str
    collection: int
    document: Document | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk as a search shows it: characters `start` to `end` of its document; `text` is that part."""

    id: int
    document: int
    collection: int
    title: str
    source: str
    start: int
    end: int
    parent: int
    context: str
    text: str
    page: int | None
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class New:
    """A document to be stored; `hashes` are those of its chunks, in order. `owned`: its file is ours to delete. `root`:
    the folder from which on no link to the file is followed."""

    source: str
    version: str
    parsed: Parsed
    cut: Cut
    hashes: Sequence[bytes]
    bytes: int
    metadata: Metadata
    file: Path | None
    owned: bool = False
    root: Path | None = None
    folder: int | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage found; `score` orders the hits of one search, `cosine` is its nearness to the query in meaning on the
    embedder's own scale, the same in every search. The others say where it came from (None: not among that index's).
    """

    passage: Passage
    score: float
    dense: float | None = None
    lexical: float | None = None
    rerank: float | None = None
    cosine: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Hits, best first, and how long each part took."""

    hits: tuple[Hit, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)


def among_of(named: Literal["own", "all"] | Sequence[int] | None) -> Among:
    """Collections as a request names them; the user's own where it names none."""
    return named if named == "own" or named == "all" else frozenset(named) if named is not None else "own"
