"""Documents found and cited: parse, chunk, embed, index, search. Usable alone: `from retrieval import Library`.

SQLite is the truth, the indexes are views of it. Knows nothing of engines, chats or HTTP: what judges relevance or
counts tokens is passed in.
"""

from retrieval.context import Source, layout, sources
from retrieval.filters import BadFilter
from retrieval.jobs import Given, Job
from retrieval.library import InUse, Library
from retrieval.publish import Text
from retrieval.records import Collection, Document, Found, Hit, NameTaken, NotAllowed, NotFound, Passage
from retrieval.search import BadQuery, Query

__all__ = [
    "BadFilter", "BadQuery", "Collection", "Document", "Found", "Given", "Hit", "InUse", "Job", "Library", "NameTaken",
    "NotAllowed", "NotFound", "Passage", "Query", "Source", "Text", "layout", "sources",
]  # fmt: skip
