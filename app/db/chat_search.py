"""Full-text search over the titles and all messages of a user's chats, in every branch.

It takes plain words, never an index's query language. SQLite indexes texts by itself (FTS5). For PostgreSQL the words
of a text are made here, by the rules of FTS5's tokenizer and so the same whatever the locale: a search first indexes
what was written since the last one. Triggers (app/db/migrations) keep both indexes, so deleted text is not found.
"""

from __future__ import annotations

import asyncio
import difflib
import re
import secrets
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection, text

from app.db.connection import execute_many, is_sqlite, rows
from app.db.database import Database
from app.db.sqlite import Row

_WORDS = 24  # of a snippet
_MISSPELLED = 4  # letters of a word that may be misspelled
_NEAREST, _NEAR = 5, 0.75  # words that are tried in its place, and how like they are to it at least (0 to 1)

Wanted = Sequence[Sequence[str]]  # of each word, the words of which a text must have one

_VOCABULARY = text("CREATE VIRTUAL TABLE IF NOT EXISTS temp.text_words USING fts5vocab(main, text_index, row)")
_ALIKE = """length(term) BETWEEN :low AND :high AND (substr(term, 1, 2) = :begin OR {} = :end)"""
_SQLITE_ALIKE = text(f"SELECT term FROM temp.text_words WHERE {_ALIKE.format('substr(term, -2)')}")
_SQLITE_SEARCH = text("""
    WITH hits AS MATERIALIZED (SELECT rowid AS id, rank AS score FROM text_index WHERE text_index MATCH :query),
    placed AS (
        SELECT texts.id, chat_id, title, message_id, min(score) OVER (PARTITION BY chat_id) AS best,
            row_number() OVER (PARTITION BY chat_id ORDER BY message_id IS NULL, score, texts.id) AS place
        FROM hits JOIN texts ON texts.id = hits.id JOIN chats ON chats.id = texts.chat_id
        WHERE chats.user = :user AND chats.deleted_at IS NULL),
    shown AS MATERIALIZED (SELECT * FROM placed WHERE place = 1 ORDER BY best, id LIMIT :limit)
    SELECT chat_id, title, message_id, snippet(text_index, 0, :opens, :closes, '…', :words) AS snippet
    FROM shown JOIN text_index ON text_index.rowid = shown.id
    WHERE text_index MATCH :query ORDER BY best, id""")

# The words of the user's own texts. Their number in a text counts little: a rank is divided by 1 + log(length).
_POSTGRES_ALIKE = text(f"""
    SELECT term FROM (SELECT word AS term FROM ts_stat(
        'SELECT words FROM texts JOIN chats ON chats.id = texts.chat_id WHERE chats."user" = ' || quote_literal(:user)
    )) AS known WHERE {_ALIKE.format("right(term, 2)")}""")
_POSTGRES_SEARCH = text("""
    WITH placed AS (
        SELECT texts.id, texts.chat_id, title, message_id, max(rank) OVER (PARTITION BY texts.chat_id) AS best,
            row_number() OVER (
                PARTITION BY texts.chat_id ORDER BY message_id IS NULL, rank DESC, texts.id) AS place
        FROM texts JOIN chats ON chats.id = texts.chat_id
            CROSS JOIN LATERAL (SELECT ts_rank(words, CAST(:query AS tsquery), 1) AS rank) AS ranked
        WHERE chats."user" = :user AND chats.deleted_at IS NULL AND words @@ CAST(:query AS tsquery))
    SELECT placed.chat_id, title, message_id, coalesce(messages.content, title) AS text
    FROM placed LEFT JOIN messages ON messages.id = message_id
    WHERE place = 1 ORDER BY best DESC, placed.id LIMIT :limit""")
_NOT_INDEXED = text("""
    SELECT texts.id, coalesce(messages.content, chats.title) AS text
    FROM texts JOIN chats ON chats.id = texts.chat_id LEFT JOIN messages ON messages.id = texts.message_id
    WHERE words IS NULL ORDER BY texts.id LIMIT 500""")
_INDEX = text("UPDATE texts SET words = CAST(:words AS tsvector) WHERE id = :id")


@dataclass(frozen=True, slots=True)
class FoundChat:
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

    async def find(self, user: str, text: str, limit: int) -> list[FoundChat]:
        """The best first. A text fits that has all the words; the last may be the beginning of one. Where none has, one
        fits that has words near to them."""
        words = _words(text)
        if not words:
            return []
        if not self._database.is_sqlite:
            while await self._database.read(index_texts):
                pass
        wanted = [[word] for word in words]
        return await self._found(user, wanted, limit, prefix=True) or await self._near(user, text, limit)

    async def _near(self, user: str, text: str, limit: int) -> list[FoundChat]:
        """Finds texts with words that are spelled nearly so. SQLite's index has the words of all users; what is found
        is the user's."""
        words = [word.casefold() for word in _words(text) if any(map(str.isalnum, word))]

        def known(db: Connection) -> list[list[str]]:
            if is_sqlite(db):
                db.execute(_VOCABULARY)
            return [_spelled_alike(db, user, word) if len(word) >= _MISSPELLED else [] for word in words]

        nearest = await asyncio.to_thread(_nearest, words, await self._database.read(known))
        if not any(nearest):
            return []
        wanted = [[word, *others] for word, others in zip(words, nearest, strict=True)]
        return await self._found(user, wanted, limit, prefix=False)

    async def _found(self, user: str, wanted: Wanted, limit: int, *, prefix: bool) -> list[FoundChat]:
        """`prefix`: the last word may be the beginning of one."""
        find = _found_in_sqlite if self._database.is_sqlite else _found_in_postgres
        return await self._database.read(lambda db: find(db, user, wanted, limit, prefix))


def _words(text: str) -> list[str]:
    """Returns the words of a text. A control character, which would end a quotation, is a space."""
    return "".join(letter if letter.isprintable() else " " for letter in text).split()


def _spelled_alike(db: Connection, user: str, word: str) -> list[str]:
    """Returns the index's words of about the length of `word` that begin or end as it does."""
    ends = {"begin": word[:2], "end": word[-2:], "low": len(word) - 2, "high": len(word) + 2}
    return list(
        db.scalars(_SQLITE_ALIKE, ends) if is_sqlite(db) else db.scalars(_POSTGRES_ALIKE, {**ends, "user": user})
    )


def _nearest(words: list[str], known: list[list[str]]) -> list[list[str]]:
    """Returns of each word the known ones that differ from it by a slip or two."""
    return [
        [each for each in difflib.get_close_matches(word, others, _NEAREST, _NEAR) if each != word]
        for word, others in zip(words, known, strict=True)
    ]


def _found_in_sqlite(db: Connection, user: str, wanted: Wanted, limit: int, prefix: bool) -> list[FoundChat]:
    if prefix:
        query = f"{' '.join(_quoted(word) for word, *_ in wanted)}*"
    else:
        query = " AND ".join(f"({' OR '.join(map(_quoted, each))})" for each in wanted)
    # Marks that no text can have, as nobody knew them before.
    opens, closes = f"<{secrets.token_hex(8)}>", f"<{secrets.token_hex(8)}>"
    found = rows(db, _SQLITE_SEARCH, query=query, user=user, limit=limit, opens=opens, closes=closes, words=_WORDS)
    return [_of_row(each, *_marked(each["snippet"], opens, closes)) for each in found]


def _of_row(found: Row, snippet: str, marks: list[tuple[int, int]]) -> FoundChat:
    return FoundChat(found["chat_id"], found["title"], found["message_id"], snippet, marks)


def _quoted(word: str) -> str:
    """Returns a word as the language of SQLite's index quotes it."""
    return '"{}"'.format(word.replace('"', '""'))


def _marked(snippet: str, opens: str, closes: str) -> tuple[str, list[tuple[int, int]]]:
    plain, marks = "", list[tuple[int, int]]()
    before, *parts = snippet.split(opens)
    plain = before
    for part in parts:
        inside, _, after = part.partition(closes)
        marks.append((len(plain), len(plain) + len(inside)))
        plain += inside + after
    return plain, marks


def index_texts(db: Connection) -> int:
    """Indexes some of the texts of a PostgreSQL database that are not indexed yet; returns how many they were."""
    found = db.execute(_NOT_INDEXED).all()
    if found:
        execute_many(db, _INDEX, [{"id": id, "words": _as_tsvector(content)} for id, content in found])
    return len(found)


class _Token(NamedTuple):
    """A word as an index has it, and its place in the text, as characters `start` to `end`."""

    word: str
    start: int
    end: int


_LETTERS = r"[^\W_]|[\ue000-\uf8ff]"
_DIACRITICS = re.compile("[\u0300-\u036f]")
_TOKEN = re.compile(rf"(?:{_LETTERS})(?:{_LETTERS}|{_DIACRITICS.pattern})*")
_TOKEN_CHARACTERS = 500  # PostgreSQL keeps words of less than 2 KiB
_MAX_POSITION, _MAX_POSITIONS, _MAX_BYTES = 16_383, 255, 900_000  # of words in a text, of one word, of all in UTF-8


def _tokens(text: str) -> list[_Token]:
    """Returns runs of letters and digits, in lower case and without diacritics."""
    return [_Token(_folded(each[0])[:_TOKEN_CHARACTERS], each.start(), each.end()) for each in _TOKEN.finditer(text)]


def _folded(word: str) -> str:
    if word.isascii():
        return word.lower()
    bare = _DIACRITICS.sub("", unicodedata.normalize("NFD", word.casefold()))
    return unicodedata.normalize("NFC", bare)


def _as_tsvector(text: str) -> str:
    """Returns the words of a text with their positions; of a text that is very long, the first ones."""
    positions, size = dict[str, list[int]](), 0
    for at, token in enumerate(_tokens(text), 1):
        known = positions.setdefault(token.word, [])
        size += 2 if known else 8 + len(token.word.encode())
        if size > _MAX_BYTES:
            break
        place = min(at, _MAX_POSITION)
        if len(known) < _MAX_POSITIONS and place not in known[-1:]:
            known.append(place)
    return " ".join(f"'{word}':{','.join(map(str, places))}" for word, places in positions.items() if places)


def _found_in_postgres(db: Connection, user: str, wanted: Wanted, limit: int, prefix: bool) -> list[FoundChat]:
    phrases = [[[token.word for token in _tokens(word)] for word in each] for each in wanted]
    last = prefix and bool(phrases[-1][0])
    phrases = [some for each in phrases if (some := [phrase for phrase in each if phrase])]
    if not phrases:
        return []
    begins = phrases[-1][0] if last else None  # the words whose last one may go on
    query = " & ".join(f"({' | '.join(_as_tsquery(phrase, phrase is begins) for phrase in each)})" for each in phrases)
    found = rows(db, _POSTGRES_SEARCH, query=query, user=user, limit=limit)
    sought = [(phrase, phrase is begins) for each in phrases for phrase in each]
    return [_of_row(each, *_snippet(each["text"], sought)) for each in found]


def _as_tsquery(phrase: list[str], begins: bool) -> str:
    return " <-> ".join(f"'{word}'" for word in phrase) + (":*" if begins else "")


def _snippet(text: str, sought: list[tuple[list[str], bool]]) -> tuple[str, list[tuple[int, int]]]:
    """Returns the `_WORDS` words of a text that have most of the phrases, and the places of these in them."""
    tokens = _tokens(text)
    hits = [
        (at, at + len(phrase), number)
        for number, (phrase, begins) in enumerate(sought)
        for at in range(len(tokens) - len(phrase) + 1)
        if _is_at(tokens, at, phrase, begins)
    ]

    def has(first: int) -> int:
        return len({number for start, end, number in hits if first <= start and end <= first + _WORDS})

    last = max(0, len(tokens) - _WORDS)
    first = max(sorted({0, *(min(start, last) for start, _, _ in hits[:200])}), key=has, default=0)
    shown = [(start, end) for start, end, _ in sorted(hits) if first <= start and end <= first + _WORDS]
    if first and shown:  # with as much before as after
        spare = _WORDS - (max(end for _, end in shown) - shown[0][0])
        first = min(last, max(0, shown[0][0] - spare // 2))
    begin = tokens[first].start if first else 0
    end = tokens[first + _WORDS - 1].end if first < last else len(text)
    before = "…" if begin else ""
    shift = len(before) - begin
    marks = list[tuple[int, int]]()
    for start, stop in shown:
        place = (tokens[start].start + shift, tokens[stop - 1].end + shift)
        if marks and place[0] < marks[-1][1]:
            marks[-1] = (marks[-1][0], max(marks[-1][1], place[1]))
        else:
            marks.append(place)
    return before + text[begin:end] + ("…" if end < len(text) else ""), marks


def _is_at(tokens: Sequence[_Token], at: int, phrase: Sequence[str], begins: bool) -> bool:
    *whole, last = phrase
    found = tokens[at + len(whole)].word
    return (found.startswith(last) if begins else found == last) and all(
        tokens[at + n].word == word for n, word in enumerate(whole)
    )
