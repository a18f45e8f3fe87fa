"""Documents found and cited: parse, chunk, embed, index, search. Usable alone: `from retrieval import Library`.

SQLite is the truth, the indexes are views of it. Knows nothing of engines, chats or HTTP: what judges relevance or
counts tokens is passed in.
"""

from retrieval.context import Source, layout, sources
from retrieval.filters import BadFilter
from retrieval.jobs import Given, Job
from retrieval.library import InUse, Library
from retrieval.search import BadQuery, Found, Hit
from retrieval.store import Collection, Document, NotAllowed, NotFound, Passage

__all__ = [
    "BadFilter", "BadQuery", "Collection", "Document", "Found", "Given", "Hit", "InUse", "Job", "Library", "NotAllowed",
    "NotFound", "Passage", "Source", "layout", "sources",
]  # fmt: skip
