"""Full-text search of a user's chats, over their titles and everything said in them, in every branch.

Triggers of the database keep the index (app/data/migrations.py), so what is deleted is not found any more. What is
searched for are words, never the index's query language. Knows nothing of meanings: `retrieval/` does, for documents.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from app.data.database import Database

_WORDS = 24  # of a snippet

_SEARCH = """
    WITH hits AS MATERIALIZED (SELECT rowid AS id, rank AS score FROM text_index WHERE text_index MATCH ?1),
    placed AS (
        SELECT texts.id, chat_id, title, message_id, min(score) OVER (PARTITION BY chat_id) AS best,
            row_number() OVER (PARTITION BY chat_id ORDER BY message_id IS NULL, score, texts.id) AS place
        FROM hits JOIN texts ON texts.id = hits.id JOIN chats ON chats.id = texts.chat_id
        WHERE chats.user = ?2 AND chats.deleted_at IS NULL),
    shown AS MATERIALIZED (SELECT * FROM placed WHERE place = 1 ORDER BY best, id LIMIT ?3)
    SELECT chat_id, title, message_id, snippet(text_index, 0, ?4, ?5, '…', ?6) AS snippet
    FROM shown JOIN text_index ON text_index.rowid = shown.id
    WHERE text_index MATCH ?1 ORDER BY best, id"""


@dataclass(frozen=True, slots=True)
class Found:
    """A chat and the message of it that fits best; its title, with `message_id` None, where no message fits.

    `marks`: the places in the snippet, as characters `start` to `end`, that were searched for.
    """

    chat_id: str
    title: str
    message_id: str | None
    snippet: str
    marks: list[tuple[int, int]]


class ChatSearch:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, user: str, text: str, limit: int) -> list[Found]:
        """The best first. A text fits that has all the words; the last may be the beginning of one."""
        query = _query(text)
        if not query:
            return []
        # Marks that no text can have, as nobody knew them before.
        opens, closes = f"<{secrets.token_hex(8)}>", f"<{secrets.token_hex(8)}>"
        found = await self._database.rows(_SEARCH, query, user, limit, opens, closes, _WORDS)
        return [
            Found(each["chat_id"], each["title"], each["message_id"], *_marked(each["snippet"], opens, closes))
            for each in found
        ]


def _query(text: str) -> str:
    """Words as the index's language quotes them. A control character, which would end a quotation, is a space."""
    words = "".join(letter if letter.isprintable() else " " for letter in text).split()
    quoted = ['"{}"'.format(word.replace('"', '""')) for word in words]
    return f"{' '.join(quoted)}*" if quoted else ""


def _marked(snippet: str, opens: str, closes: str) -> tuple[str, list[tuple[int, int]]]:
    plain, marks = "", list[tuple[int, int]]()
    before, *parts = snippet.split(opens)
    plain = before
    for part in parts:
        inside, _, after = part.partition(closes)
        marks.append((len(plain), len(plain) + len(inside)))
        plain += inside + after
    return plain, marks
