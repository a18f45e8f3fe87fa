"""Documents found and cited: parse, chunk, embed, index, search. Usable alone: `from retrieval import Library`.

SQLite is the truth and the indexes are views of it, or PostgreSQL is both. Knows nothing of engines, chats or HTTP:
relevance judges and token counters are passed in.
"""

from retrieval.folders import Folder
from retrieval.index.filters import BadFilter
from retrieval.index.hybrid import BadQuery, Query
from retrieval.index.publish import Text
from retrieval.jobs import Given, Job, OverQuota
from retrieval.library import InUse, Library
from retrieval.prompt_context import PromptSource, layout, sources
from retrieval.records import (
    AttachedFile,
    Collection,
    CollectionNameTaken,
    Document,
    Found,
    Hit,
    Invitation,
    Member,
    NotAllowed,
    NotFound,
    Passage,
    SourceTaken,
    TooManyInvited,
)

__all__ = [
    "AttachedFile",
    "BadFilter",
    "BadQuery",
    "Collection",
    "CollectionNameTaken",
    "Document",
    "Folder",
    "Found",
    "Given",
    "Hit",
    "InUse",
    "Invitation",
    "Job",
    "Library",
    "Member",
    "NotAllowed",
    "NotFound",
    "OverQuota",
    "Passage",
    "PromptSource",
    "Query",
    "SourceTaken",
    "Text",
    "TooManyInvited",
    "layout",
    "sources",
]  # fmt: skip
