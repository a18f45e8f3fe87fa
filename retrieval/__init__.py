"""Documents found and cited: parse, chunk, embed, index, search. Usable alone: `from retrieval import Library`.

SQLite is the truth, the indexes are views of it. Knows nothing of engines, chats or HTTP: what judges relevance or
counts tokens is passed in.
"""

from retrieval.context import Source, layout, sources
from retrieval.filters import BadFilter
from retrieval.index.hybrid import BadQuery, Query
from retrieval.index.publish import Text
from retrieval.jobs import Given, Job, OverQuota
from retrieval.library import InUse, Library
from retrieval.records import (
    Collection,
    Document,
    Found,
    Hit,
    Invitation,
    Member,
    NameTaken,
    NotAllowed,
    NotFound,
    Passage,
    TooManyInvited,
)

__all__ = [
    "BadFilter", "BadQuery", "Collection", "Document", "Found", "Given", "Hit", "InUse", "Invitation", "Job",
    "Library", "Member", "NameTaken", "NotAllowed", "NotFound", "OverQuota", "Passage", "Query", "Source", "Text",
    "TooManyInvited", "layout", "sources",
]  # fmt: skip
