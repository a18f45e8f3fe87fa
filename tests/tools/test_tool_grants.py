"""Tests what is granted and remembered: the same in memory and in a file, and a file's is there after a restart."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ponder import tool
from tools.call_policy import Allowed, CallPolicy, Decision, Denied, NeedsApproval
from tools.grants import Grant, Grants, MemoryGrants, SqliteGrants
from tools.options import PERMISSIONS

USERS, CHATS, TOOLS = ("ana", "bob"), (None, "c1", "c2"), ("save", "send")
_users, _chats = st.sampled_from(USERS), st.sampled_from(CHATS)
_classes = st.sets(st.sampled_from(PERMISSIONS))
_grants = st.builds(
    Grant,
    user=_users, tool=st.sampled_from(TOOLS), origin=st.sampled_from(("plugin a.py", "mcp ä")), allow=st.booleans(),
    chat=_chats, arguments_hash=st.sampled_from((None, "a" * 64, "b" * 64)),
    expires_at=st.none() | st.floats(0, 1e10), definition=st.sampled_from(("", "d")),
    preview=st.text(max_size=20), given_at=st.floats(0, 1e10),
)  # fmt: skip
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), _users, _chats, _classes),
        st.tuples(st.just("unset"), _users, _chats),
        st.tuples(st.just("put"), _grants),
        st.tuples(st.just("withdraw"), _grants),
        st.tuples(st.just("restart")),
    ),
    max_size=30,
)


@tool(permission="write")
def save(text: str) -> str:
    """Saves."""
    return text


class Model:
    """The plainest thing that could be right: lists, searched from the end."""

    def __init__(self) -> None:
        self.classes = list[tuple[str, str | None, frozenset[str] | None]]()
        self.grants = list[Grant]()

    def take(self, step: tuple[Any, ...]) -> None:
        match step:
            case ("set", user, chat, classes):
                self.classes.append((user, chat, frozenset(classes)))
            case ("unset", user, chat):
                self.classes.append((user, chat, None))
            case ("put", grant):
                self.grants = [*(each for each in self.grants if not alike(each, grant)), grant]
            case ("withdraw", grant):
                self.grants = [each for each in self.grants if not alike(each, grant)]

    def held(self, user: str, chat: str | None) -> frozenset[str] | None:
        return next((classes for u, c, classes in reversed(self.classes) if (u, c) == (user, chat)), None)


def alike(one: Grant, other: Grant) -> bool:
    def about(grant: Grant) -> tuple[str | None, ...]:
        return grant.user, grant.chat, grant.tool, grant.origin, grant.arguments_hash

    return about(one) == about(other)


def take(grants: Grants, step: tuple[Any, ...]) -> None:
    match step:
        case ("set", user, chat, classes):
            grants.set_classes(user, classes, chat=chat)
        case ("unset", user, chat):
            grants.unset_classes(user, chat=chat)
        case ("put", grant):
            grants.put(grant)
        case ("withdraw", grant):
            grants.withdraw(grant)


Opened = tuple[Grants, Callable[[], Grants]]  # grants, and the same after a restart


@contextmanager
def in_memory() -> Iterator[Opened]:
    grants = MemoryGrants()
    yield grants, lambda: grants


@contextmanager
def in_a_file() -> Iterator[Opened]:
    with tempfile.TemporaryDirectory() as folder:
        opened = [SqliteGrants(Path(folder) / "permissions.db")]

        def again() -> SqliteGrants:
            opened[-1].close()
            opened.append(SqliteGrants(Path(folder) / "permissions.db"))
            return opened[-1]

        yield opened[0], again
        opened[-1].close()


@pytest.mark.parametrize("opened", [in_memory, in_a_file])
@settings(max_examples=40)
@given(steps=_steps)
def test_what_was_said_last_holds(opened: Any, steps: list[tuple[Any, ...]]) -> None:
    model = Model()
    with opened() as (grants, again):
        for step in steps:
            model.take(step)
            if step[0] == "restart":
                grants = again()
            else:
                take(grants, step)
        for user in USERS:
            assert {chat: grants.classes(user, chat) for chat in CHATS} == {
                chat: model.held(user, chat) for chat in CHATS
            }
            narrowed = {chat: model.held(user, chat) for chat in CHATS if chat is not None}
            assert grants.chats(user) == {chat: held for chat, held in narrowed.items() if held is not None}
            mine = [each for each in model.grants if each.user == user]
            assert len(grants.of_user(user)) == len(mine) and set(grants.of_user(user)) == set(mine)
            for name in TOOLS:
                theirs = {each for each in mine if (each.tool, each.origin) == (name, "mcp ä")}
                assert set(grants.of(user, name, "mcp ä")) == theirs


def test_an_approval_for_good_holds_after_a_restart_and_shows_what_was_approved(tmp_path: Path) -> None:
    before = SqliteGrants(tmp_path / "permissions.db")
    answered(CallPolicy(before, default=PERMISSIONS), "always", text="milk")
    before.close()
    after = SqliteGrants(tmp_path / "permissions.db")
    policy = CallPolicy(after, default=PERMISSIONS)
    assert policy.decide(save, {"text": "milk"}, user="ana", tainted_by={"page"}) == Allowed()
    assert isinstance(policy.decide(save, {"text": "eggs"}, user="ana"), NeedsApproval)
    (kept,) = after.of_user("ana")
    assert kept.preview == 'save(text="milk")' and kept.given_at > 0


def test_what_one_process_is_told_another_knows_at_once(tmp_path: Path) -> None:
    here, there = (SqliteGrants(tmp_path / "permissions.db") for _ in range(2))
    answered(CallPolicy(here, default=PERMISSIONS), "never", text="milk")
    here.set_classes("bob", ["read"])
    assert isinstance(CallPolicy(there, default=PERMISSIONS).decide(save, {"text": "milk"}, user="ana"), Denied)
    assert there.classes("bob", None) == frozenset({"read"})


def test_an_unknown_class_is_refused_and_what_was_set_stays(tmp_path: Path) -> None:
    grants = SqliteGrants(tmp_path / "permissions.db")
    grants.set_classes("ana", ["read"])
    with pytest.raises(ValueError, match="Unknown classes: root; accepted: none, read"):
        grants.set_classes("ana", ["read", "root"])  # type: ignore[list-item]  # what is refused
    assert grants.classes("ana", None) == frozenset({"read"})


@pytest.mark.parametrize("scope", ["arguments", "tool"])
@pytest.mark.parametrize("changed", [{"description": "Saves, and sends a copy."}, {"parameters": {"type": "object"}}])
def test_a_tool_that_changed_what_it_says_asks_again_and_stays_refused(scope: Any, changed: dict[str, Any]) -> None:
    other = save._with(**changed)
    for answer, before, after in (("always", Allowed, NeedsApproval), ("never", Denied, Denied)):
        policy = CallPolicy(default=PERMISSIONS)
        answered(policy, answer, scope, text="milk")
        assert isinstance(policy.decide(save, {"text": "milk"}, user="ana"), before)
        assert isinstance(policy.decide(other, {"text": "milk"}, user="ana"), after)


def answered(policy: CallPolicy, answer: Any, scope: Any = "arguments", **arguments: str) -> None:
    asked = policy.decide(save, arguments, user="ana")
    assert isinstance(asked, NeedsApproval)
    policy.accept(save, asked, Decision(answer, asked.arguments_hash, scope), user="ana")
