from __future__ import annotations

import json
import sqlite3
from random import Random

import pytest

from tools.builtin.databases import Databases
from tools.builtin.documents import search_documents
from tools.result import frame
from tools.sql import SqlDatabase
from training.conversation import Conversation, ModelReply
from training.tasks import database
from training.text import framing

pytestmark = pytest.mark.slow


def made(count: int = 150) -> list[Conversation]:
    rng = Random(41)
    return [database.conversation(rng, "train", at / count) for at in range(count)]


def test_the_tools_and_their_marks_are_those_that_ponder_offers(tmp_path: object) -> None:
    path = f"{tmp_path}/a.db"
    sqlite3.connect(path).close()
    offered = {tool.name: json.loads(json.dumps(tool.spec())) for tool in Databases({"a": SqlDatabase(path)}).tools()}
    assert [offered["sql_query"], offered["sql_schema"]] == [database.QUERY, database.SCHEMA]
    assert json.loads(json.dumps(search_documents.spec())) == framing.SEARCH
    assert framing.frame("a\nb", "x") == frame("a\nb", "x")


def test_every_answer_holds_the_values_that_its_query_gave() -> None:
    answers = 0
    for conversation in made():
        for at, message in enumerate(conversation.messages):
            if message.role == "tool" and '"columns"' in message.content:
                content = message.content.split("\n")
                rows = json.loads(content[1] if len(content) > 1 else content[0])["rows"]
                told = conversation.messages[at + 1].content
                for (value,) in rows[: database.SHOWN]:
                    assert ("none" if value is None else value if isinstance(value, str) else json.dumps(value)) in told
                answers += 1
    assert answers > 150


def test_the_tables_are_looked_at_once_and_before_the_first_query() -> None:
    looks = 0
    for conversation in made():
        calls = [(at, call.name) for at, message in enumerate(conversation.messages) for call in message.calls]
        given = [m for m in conversation.messages if m.role == "user" and "select" in m.content.lower()]
        if calls and not given:
            assert calls[0][1] == "sql_schema"
        # Later looks are for those who ask which tables there are: what follows the result is the answer.
        again = [at for at, name in calls if name == "sql_schema"][1:]
        assert all(not conversation.messages[at + 2].calls for at in again)
        looks += any(name == "sql_schema" for _, name in calls)
    assert looks > 75


def test_a_case_accepts_what_is_wanted_and_nothing_else() -> None:
    rng = Random(42)
    for _ in range(60):
        case = database.case(rng)
        assert all(case.judge(case.wanted).values())
        nothing = case.judge((ModelReply("", "None of my tools can do that.", ()),))
        assert nothing["right query"] is False
        assert case.judge(()) == {"right query": False, "result told": False}


def test_what_is_no_query_is_an_error_that_the_model_reads() -> None:
    case = database.case(Random(43))
    call = case.wanted[-2].calls[0]
    assert case.answer_call is not None
    wrong = type(call)(call.name, {"sql": "SELECT a FROM elsewhere"})
    assert case.answer_call(wrong).startswith("SQLite says: no such table")
