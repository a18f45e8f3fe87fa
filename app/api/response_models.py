"""Public forms of documents, jobs, collections and passages. The command line reads the same back.

Made from retrieval's plain data, never from its insides: no path of a file is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from pydantic import BaseModel

from app.db.file_store import SentFile
from retrieval import AttachedFile, Collection, Document, Folder, Found, Hit, Invitation, Job, Member
from retrieval.jobs import FileStatus
from retrieval.parsing.parsed import ParseFault
from retrieval.records import MemberRole, Metadata, Role


class FaultShown(BaseModel):
    """A part that could not be read, of a document that otherwise could."""

    message: str
    page: int | None

    @classmethod
    def of(cls, fault: ParseFault) -> FaultShown:
        return cls(message=fault.message, page=fault.page)


class DocumentShown(BaseModel):
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
    faults: list[FaultShown]
    created_at: float
    updated_at: float
    folder: int | None

    @classmethod
    def of(cls, document: Document) -> DocumentShown:
        faults = [FaultShown.of(fault) for fault in document.faults]
        return cls(**{name: getattr(document, name) for name in cls.model_fields if name != "faults"}, faults=faults)


class DocumentsShown(BaseModel):
    """A page of a list; `next`, where it is not null, is `before` of the following one."""

    documents: list[DocumentShown]
    next: str | None


class FolderShown(BaseModel):
    """A folder that its user has indexed. The sources of its documents begin with `name` and a slash."""

    id: int
    collection: int
    path: str
    name: str
    documents: int

    @classmethod
    def of(cls, folder: Folder) -> FolderShown:
        return cls(**{name: getattr(folder, name) for name in cls.model_fields})


class FileShown(BaseModel):
    """Progress of a file of a job. `change`: against the document of its source, once it is being read."""

    source: str
    status: FileStatus
    change: Literal["new", "changed"] | None
    document: int | None
    bytes: int
    pages: int
    chunks: int
    embedded: int
    error: str | None
    faults: list[FaultShown]


class ChunkCounts(BaseModel):
    embedded: int
    total: int


class JobSummary(BaseModel):
    """A job without its files. `chunks.total` grows while files are still being read."""

    id: str
    collection: int
    status: str
    created_at: float
    ended_at: float | None
    counts: dict[FileStatus, int]
    chunks: ChunkCounts
    seconds_left: float | None
    stalled: str | None

    @property
    def over(self) -> bool:
        """True when nothing more is to be waited for."""
        return self.status != "running" or self.stalled is not None


class JobShown(JobSummary):
    files: list[FileShown]

    @classmethod
    def of(cls, job: Job, stalled: str | None = None) -> JobShown:
        counts = job.counts
        files = [
            FileShown(
                **{name: getattr(file, name) for name in FileShown.model_fields if name != "faults"},
                faults=[FaultShown.of(fault) for fault in file.faults],
            )
            for file in job.files
        ]
        return cls(
            id=job.id,
            collection=job.collection,
            status=job.status,
            created_at=job.created_at,
            ended_at=job.ended_at,
            counts={status: counts.get(status, 0) for status in get_args(FileStatus)},
            chunks=ChunkCounts(
                embedded=sum(file.embedded for file in job.files), total=sum(file.chunks for file in job.files)
            ),
            seconds_left=job.seconds_left,
            stalled=stalled if job.status == "running" else None,
            files=files,
        )

    def summary(self) -> JobSummary:
        return JobSummary(**{name: getattr(self, name) for name in JobSummary.model_fields})


class Ingested(BaseModel):
    """Outcome of an upload."""

    job: JobShown
    documents: list[DocumentShown]


class AttachedShown(BaseModel):
    """A file of a question, as its chat has it. `missing`: it came in a file of chats, or its document was deleted."""

    id: str | None
    name: str
    bytes: int
    status: Literal["reading", "ready", "failed", "missing"]
    error: str | None = None
    document: int | None = None
    media_type: str | None = None
    pages: int = 0
    characters: int = 0
    faults: list[FaultShown] = []

    @classmethod
    def of(cls, sent: SentFile, found: AttachedFile | None) -> AttachedShown:
        kept = sent.model_dump()
        if found is None:
            return cls(**kept, status="missing")
        if (document := found.document) is None:
            return cls(**kept, status="reading" if found.error is None else "failed", error=found.error)
        faults = [FaultShown.of(fault) for fault in document.faults]
        return cls(
            **kept, status="ready", document=document.id, media_type=document.media_type, pages=document.pages,
            characters=document.characters, faults=faults,
        )  # fmt: skip


class CollectionShown(BaseModel):
    """`role` is what the asking user is to it."""

    id: int
    name: str
    owner: str
    role: Role
    documents: int

    @classmethod
    def of(cls, collection: Collection) -> CollectionShown:
        return cls(**{name: getattr(collection, name) for name in cls.model_fields})


class MemberShown(BaseModel):
    """`invited` is a user who has not accepted, and perhaps is none."""

    user: str
    role: MemberRole
    status: Literal["member", "invited"]

    @classmethod
    def of(cls, member: Member) -> MemberShown:
        return cls(user=member.user, role=member.role, status=member.status)


class InvitationShown(BaseModel):
    """`collection` is the number of the collection that the user is invited to."""

    collection: int
    name: str
    owner: str
    role: MemberRole
    created_at: float

    @classmethod
    def of(cls, invitation: Invitation) -> InvitationShown:
        return cls(**{name: getattr(invitation, name) for name in cls.model_fields})


class DocumentOfPassage(BaseModel):
    id: int
    title: str
    source: str
    collection: int


class SpanShown(BaseModel):
    """Characters `start` to `end` of the document's text."""

    start: int
    end: int
    page: int | None


class Scores(BaseModel):
    """Scores of a hit by source; null: not among the best of that index, or not reranked. `cosine` is absolute."""

    dense: float | None
    lexical: float | None
    rerank: float | None
    cosine: float | None


class PassageShown(BaseModel):
    text: str
    document: DocumentOfPassage
    span: SpanShown
    score: float
    scores: Scores
    context: str
    metadata: Metadata

    @classmethod
    def of(cls, hit: Hit) -> PassageShown:
        passage = hit.passage
        return cls(
            text=passage.text,
            document=DocumentOfPassage(
                id=passage.document, title=passage.title, source=passage.source, collection=passage.collection
            ),
            span=SpanShown(start=passage.start, end=passage.end, page=passage.page),
            score=hit.score,
            scores=Scores(dense=hit.dense, lexical=hit.lexical, rerank=hit.rerank, cosine=hit.cosine),
            context=passage.context,
            metadata=passage.metadata,
        )


class FoundShown(BaseModel):
    passages: list[PassageShown]
    seconds: Mapping[str, float]

    @classmethod
    def of(cls, found: Found) -> FoundShown:
        return cls(passages=[PassageShown.of(hit) for hit in found.hits], seconds=found.seconds)
