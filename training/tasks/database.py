"""Questions about tables, answered by two tools in a row: one tells the tables, the other runs SQL.

    user: How many orders are there?
    assistant: <tool_call>{"name": "sql_schema", "arguments": {}}</tool_call>
    tool: -- database shop ¶ orders(id INTEGER key, customer TEXT, amount REAL)
    assistant: <tool_call>{"name": "sql_query", "arguments": {"sql": "SELECT count(*) FROM orders"}}</tool_call>
    tool: {"columns": ["count(*)"], "rows": [[4]]}
    assistant: There are 4 orders.

The tables are made up and really asked: SQLite runs every query. A later question of a chat knows the tables already.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from training import phrases
from training.conversation import Case, Conversation, Message, ModelReply, Phrasing, SpokenCall, Tool, Verdict
from training.tasks import calculator, smalltalk
from training.text import words
from training.text.framing import often_framed
from training.text.noise import casual

SHOWN = 5  # rows in an answer, at most

_TABLES: dict[Phrasing, tuple[str, ...]] = {
    "train": (
        "orders", "customers", "products", "books", "employees", "invoices", "rooms", "songs", "films", "courses",
        "students", "payments", "machines", "parcels", "recipes", "players", "trips", "plants", "members", "sales",
        "bookings", "houses",
        "messages", "projects", "games", "flights", "events", "items", "shops", "paintings",
    ),
    "held_out": ("tickets", "suppliers", "vehicles", "patients", "concerts", "deliveries", "albums", "rentals"),
}  # fmt: skip
_TEXTS: dict[Phrasing, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "train": (
        ("name", words.NAMES), ("customer", words.NAMES), ("owner", words.NAMES), ("author", words.NAMES),
        ("manager", words.NAMES),
        ("city", words.CITIES), ("country", words.COUNTRIES), ("item", words.GOODS), ("job", words.JOBS), 
        ("topic", words.TOPICS),
        ("month", words.MONTHS), ("day", words.WEEKDAYS), ("language", words.LANGUAGES), ("dish", words.DISHES),
        ("product", words.GOODS),
        ("status", ("open", "paid", "late", "closed", "new", "sent")),
        ("colour", ("red", "blue", "green", "black", "white", "grey")),
    ),
    "held_out": (
        ("person", words.HELD_OUT_NAMES), ("town", words.CITIES), ("guest", words.HELD_OUT_NAMES),
        ("article", words.GOODS),
        ("state", ("done", "waiting", "lost", "ready")), ("weekday", words.WEEKDAYS),
    ),
}  # fmt: skip
_NUMBERS: dict[Phrasing, tuple[str, ...]] = {
    "train": (
        "amount", "price", "quantity", "age", "year", "weight", "score", "stock", "pages", "length", "rating", "salary",
        "points", "seats", "cost", "height", "visits", "minutes",
    ),
    "held_out": ("total", "size", "distance", "fee", "units", "width"),
}  # fmt: skip
_DATABASES = ("shop", "main", "data", "company", "school", "library", "store", "club")

SCHEMA: Tool = {
    "type": "function",
    "function": {
        "name": "sql_schema",
        "description": "List the tables and columns of the attached databases.",
        "parameters": {
            "additionalProperties": False,
            "properties": {
                "database": {
                    "default": "",
                    "description": "the name of one; all of them if left out.",
                    "type": "string",
                }
            },
            "type": "object",
        },
    },
}
QUERY: Tool = {
    "type": "function",
    "function": {
        "name": "sql_query",
        "description": "Read from an attached SQLite database with one SELECT. Nothing can be changed.",
        "parameters": {
            "additionalProperties": False,
            "properties": {
                "sql": {
                    "description": "one SELECT statement in SQLite's dialect; sql_schema tells the tables.",
                    "maxLength": 20000,
                    "minLength": 1,
                    "type": "string",
                },
                "database": {
                    "default": "",
                    "description": "which database to ask; may be left out where there is one.",
                    "type": "string",
                },
            },
            "required": ["sql"],
            "type": "object",
        },
    },
}


@dataclass(frozen=True, slots=True)
class PhraseTable:
    """`texts` and `numbers` are its columns, beside `id`."""

    name: str
    texts: tuple[str, ...]
    numbers: tuple[str, ...]
    decimals: frozenset[str]
    rows: tuple[tuple[Any, ...], ...]  # values in the order of the columns

    def columns(self) -> list[tuple[str, str]]:
        typed = [(name, "TEXT") for name in self.texts]
        return [*typed, *((name, "REAL" if name in self.decimals else "INTEGER") for name in self.numbers)]

    def described(self) -> str:
        listed = ", ".join(f"{name} {kind}" for name, kind in self.columns())
        return f"{self.name}(id INTEGER key, {listed})"

    def create(self, db: sqlite3.Connection) -> None:
        listed = ", ".join(f"{name} {kind}" for name, kind in self.columns())
        db.execute(f"CREATE TABLE {self.name} (id INTEGER PRIMARY KEY, {listed})")
        for row in self.rows:
            db.execute(f"INSERT INTO {self.name} VALUES (NULL, {', '.join('?' * len(row))})", row)


def table(rng: Random, phrasing: Phrasing, name: str) -> PhraseTable:
    texts = rng.sample(_TEXTS[phrasing], rng.randint(1, 3))
    numbers = rng.sample(_NUMBERS[phrasing], rng.randint(1, 2))
    decimals = frozenset(name for name in numbers if rng.random() < 0.2)
    few = [(column, rng.sample(values, min(len(values), rng.randint(3, 8)))) for column, values in texts]

    def number(column: str) -> float:
        most = rng.choice((20, 300, 5000))
        return rng.randint(1, most) if column not in decimals else round(rng.uniform(1, most), rng.randint(1, 2))

    rows = tuple((*(rng.choice(some) for _, some in few), *map(number, numbers)) for _ in range(rng.randint(3, 12)))
    return PhraseTable(name, tuple(column for column, _ in texts), tuple(numbers), decimals, rows)


@dataclass(frozen=True, slots=True)
class TableQuestion:
    """A question, the query that answers it, and the answer's wording `told`, with {r} in place of the values."""

    question: str
    sql: str
    told: str


@dataclass(slots=True)
class Tables:
    """A database, its two tools, and the results of both."""

    name: str
    held: tuple[PhraseTable, ...]
    framed: float  # the share of results between marks
    _db: sqlite3.Connection = field(default_factory=lambda: sqlite3.connect(":memory:"))

    def __post_init__(self) -> None:
        for each in self.held:
            each.create(self._db)

    def call(self, sql: str) -> SpokenCall:
        return SpokenCall(QUERY["function"]["name"], {"sql": sql})

    def describe(self) -> SpokenCall:
        return SpokenCall(SCHEMA["function"]["name"], {})

    def described(self, rng: Random) -> str:
        listed = "\n".join(each.described() for each in self.held)
        return often_framed(rng, f"-- database {self.name}\n{listed}", SCHEMA["function"]["name"], self.framed)

    def run(self, rng: Random, sql: str) -> tuple[str, list[tuple[Any, ...]]]:
        """The tool message for a query, and its rows.

        Raises:
            sqlite3.Error: it is no query of these tables.
        """
        found = self._db.execute(sql)
        rows = [tuple(round(v, 2) if isinstance(v, float) else v for v in row) for row in found]
        content = json.dumps({"columns": [each[0] for each in found.description], "rows": rows}, ensure_ascii=False)
        return often_framed(rng, content, QUERY["function"]["name"], self.framed), rows


def tables(rng: Random, phrasing: Phrasing, progress: float) -> Tables:
    count = 1 if progress < 0.3 else rng.randint(1, 3)
    held = tuple(table(rng, phrasing, name) for name in rng.sample(_TABLES[phrasing], count))
    return Tables(rng.choice(_DATABASES), held, 0.7)


def _written(value: object) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _literal(value: object) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def _sql(rng: Random, kind: str, of: PhraseTable, blanks: dict[str, str], value: object) -> str:
    n, c, d = blanks.get("n", ""), blanks.get("c", ""), blanks.get("d", "")
    match kind:
        case "count":
            return f"SELECT count(*) FROM {of.name}"
        case "count_where":
            return f"SELECT count(*) FROM {of.name} WHERE {c} = {_literal(value)}"
        case "sum" | "avg" | "max" | "min":
            return f"SELECT {kind}({n}) FROM {of.name}"
        case "which":
            return f"SELECT {c} FROM {of.name} WHERE {d} = {_literal(value)}"
        case "amount_of":
            return f"SELECT {n} FROM {of.name} WHERE {c} = {_literal(value)}"
        case "top" | "bottom":
            return f"SELECT {c} FROM {of.name} ORDER BY {n}{' DESC' if kind == 'top' else ''} LIMIT 1"
        case _:
            return f"SELECT DISTINCT {c} FROM {of.name}"


def ask(rng: Random, phrasing: Phrasing, of: PhraseTable, kind: str | None = None) -> TableQuestion:
    """A question about a table; some hand over the SQL itself."""
    kinds = phrases.read("database")
    drawn = kind or phrases.draw(rng, "database")
    inner = (
        rng.choice(("count", "sum", "max", "list", "amount_of", "top")) if drawn in ("statement", "schema") else drawn
    )
    if inner == "which" and len(of.texts) < 2:
        inner = drawn = "count"
    texts = rng.sample(of.texts, len(of.texts))
    blanks = {"n": rng.choice(of.numbers), "c": texts[0], "d": texts[-1]}
    by = "d" if inner == "which" else "c"
    value = rng.choice(of.rows)[of.texts.index(blanks[by])]
    sql = _sql(rng, inner, of, blanks, value)
    if drawn == "statement":
        sql = sql.lower().replace(str(value).lower(), str(value)) if rng.random() < 0.15 else sql
        return TableQuestion(kinds[drawn].ask(rng, phrasing).replace("{sql}", sql), sql, "{r}.")
    filled = {**blanks, "v": str(value), "table": of.name}
    question, told = casual(rng, kinds[inner].ask(rng, phrasing), 0.02), kinds[inner].answers[0]
    for blank, text in filled.items():
        question, told = question.replace(f"{{{blank}}}", text), told.replace(f"{{{blank}}}", text)
    return TableQuestion(question, sql, told)


def _told(asked: TableQuestion, rows: Sequence[tuple[Any, ...]]) -> str:
    if not rows:
        return "Nothing was found."
    shown = ", ".join(", ".join(map(_written, row)) for row in rows[:SHOWN])
    if len(rows) > SHOWN:
        return asked.told.replace("{r}", f"{shown} and {len(rows) - SHOWN} more")
    return asked.told.replace("{r}", shown)


def _turn(rng: Random, db: Tables, asked: TableQuestion, known: bool) -> list[Message]:
    content, rows = db.run(rng, asked.sql)
    look = [Message("assistant", calls=(db.describe(),)), Message("tool", db.described(rng))]
    return [
        Message("user", asked.question),
        *([] if known else look),
        Message("assistant", calls=(db.call(asked.sql),)),
        Message("tool", content),
        Message("assistant", _told(asked, rows)),
    ]


def _which_tables(rng: Random, phrasing: Phrasing, db: Tables) -> list[Message]:
    question = casual(rng, phrases.read("database")["schema"].ask(rng, phrasing), 0.02)
    return [
        Message("user", question),
        Message("assistant", calls=(db.describe(),)),
        Message("tool", db.described(rng)),
        Message("assistant", f"{', '.join(each.name for each in db.held)}."),
    ]


def conversation(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    """One to four questions; a question with its SQL needs no look at the tables."""
    db = tables(rng, phrasing, progress)
    messages: list[Message] = []
    known = False
    for _ in range(1 if rng.random() < 0.5 else rng.randint(2, 4)):
        roll = rng.random()
        if roll < 0.06:
            messages += _which_tables(rng, phrasing, db)
            known = True
        elif roll < 0.1:
            made = smalltalk.sample(rng, phrasing)
            messages += [Message("user", made.user), Message("assistant", made.answer)]
        else:
            kind = phrases.draw(rng, "database")
            asked = ask(rng, phrasing, rng.choice(db.held), "count" if kind == "schema" else kind)
            given = kind == "statement"
            messages += _turn(rng, db, asked, known or given)
            known |= not given
    beside = calculator.others(rng, phrasing, rng.randint(0, 2) if progress > 0.3 and rng.random() < 0.5 else 0)
    offered = [QUERY, SCHEMA, *beside, *([calculator.CANONICAL.tool()] if rng.random() < 0.3 else [])]
    rng.shuffle(offered)
    return Conversation(tuple(messages), tuple(offered), rng.random() < 0.9)


def case(rng: Random, phrasing: Phrasing = "held_out") -> Case:
    """One question about a table, by default in words and with names that were never trained on."""
    db = tables(rng, phrasing, 1.0)
    kind = phrases.draw(rng, "database")
    asked = ask(rng, phrasing, rng.choice(db.held), "count" if kind == "schema" else kind)
    _, rows = db.run(rng, asked.sql)
    described = db.described(rng)
    told = _told(asked, rows)

    def answer_call(call: SpokenCall) -> str:
        if call.name == SCHEMA["function"]["name"]:
            return described
        try:
            return db.run(rng, str(call.arguments.get("sql", "")))[0]
        except sqlite3.Error as error:
            return f"SQLite says: {error}."

    called = (ModelReply("", "", (db.call(asked.sql),)), ModelReply("", told, ()))
    wanted = called if kind == "statement" else (ModelReply("", "", (db.describe(),)), *called)
    prompt = Conversation((Message("user", asked.question),), (QUERY, SCHEMA))
    return Case(prompt, _judge(db, asked, rows), wanted, answer_call)


def _judge(db: Tables, asked: TableQuestion, rows: list[tuple[Any, ...]]) -> Callable[[Sequence[ModelReply]], Verdict]:
    def same_rows(call: SpokenCall) -> bool:
        try:
            return db.run(Random(0), str(call.arguments.get("sql", "")))[1] == rows
        except sqlite3.Error:
            return False

    def judged(replies: Sequence[ModelReply]) -> Verdict:
        queries = [call for reply in replies for call in reply.calls if call.name == QUERY["function"]["name"]]
        last = replies[-1] if replies else ModelReply("", "", (), broken=True)
        whole = not last.broken and not last.calls
        values = [_written(value) for row in rows[:SHOWN] for value in row]
        return {
            "right query": any(same_rows(call) for call in queries),
            "result told": whole and all(value in last.content for value in values),
        }

    return judged
