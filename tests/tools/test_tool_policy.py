"""Tests who may call what: classes granted, answers remembered for exactly what was asked, and taint."""

from __future__ import annotations

from typing import Any

import pytest

from ponder import Tool, tool
from tools.call_policy import Allowed, CallPolicy, Decision, Denied, NeedsApproval
from tools.grants import MemoryGrants
from tools.options import PERMISSIONS, Permission


@tool(permission="none")
def clock() -> str:
    """Tells the time."""
    return "now"


@tool(permission="read")
def find(word: str) -> str:
    """Finds."""
    return word


@tool(permission="write")
def save(text: str) -> str:
    """Saves."""
    return text


@tool(permission="write", approval="never")
def note(text: str) -> str:
    """Notes."""
    return text


@tool(permission="write", approval="once")
def mail(text: str) -> str:
    """Mails."""
    return text


@tool(permission="network")
def fetch(url: str) -> str:
    """Fetches."""
    return url


@tool(permission="execute", approval="never")
def python(code: str) -> str:
    """Runs."""
    return code


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def _policy(clock: Clock | None = None) -> CallPolicy:
    return CallPolicy(default=PERMISSIONS, clock=clock or Clock())


def _asked(policy: CallPolicy, tool: Tool, arguments: dict[str, Any], **rest: Any) -> NeedsApproval:
    ruling = policy.decide(tool, arguments, user="ana", **rest)
    assert isinstance(ruling, NeedsApproval), ruling
    return ruling


def _answer(policy: CallPolicy, tool: Tool, arguments: dict[str, Any], answer: Any, **rest: Any) -> Allowed | Denied:
    chat = rest.pop("chat", None)
    asked = _asked(policy, tool, arguments, chat=chat)
    return policy.accept(tool, asked, Decision(answer, asked.arguments_hash, **rest), user="ana", chat=chat)


def test_by_default_a_user_may_only_compute_and_read() -> None:
    policy = CallPolicy()
    assert policy.decide(clock, {}, user="ana") == policy.decide(find, {"word": "a"}, user="ana") == Allowed()
    for each in (save, fetch, python):
        assert isinstance(policy.decide(each, {}, user="ana"), Denied)


def test_a_chat_narrows_what_its_user_may_do_and_never_widens_it() -> None:
    grants = MemoryGrants()
    grants.set_classes("ana", ["none", "read", "write"])
    grants.set_classes("ana", ["read", "network"], chat="c1")
    policy = CallPolicy(grants)
    assert policy.permitted("ana", "c1") == {"read"}
    assert policy.permitted("ana", "c2") == {"none", "read", "write"}
    assert policy.permitted("ben", "c1") == {"none", "read"}


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown classes: root; accepted: none, read"):
        MemoryGrants().set_classes("ana", ["root"])  # type: ignore[list-item]  # what is refused


@pytest.mark.parametrize("each", [note, fetch, python], ids=lambda each: each.name)
def test_after_untrusted_text_what_has_effects_is_asked_for_whatever_the_tool_says(each: Tool) -> None:
    policy, (name, *_) = _policy(), each.parameters["properties"]
    assert policy.decide(each, {name: "x"}, user="ana") == Allowed()
    asked = _asked(policy, each, {name: "x"}, tainted_by={"find"})
    assert asked.risk == "high" and "find" in asked.reason


@pytest.mark.parametrize("each", [clock, find], ids=lambda each: each.name)
def test_reading_goes_on_after_untrusted_text(each: Tool) -> None:
    assert _policy().decide(each, {"word": "x"}, user="ana", tainted_by={"fetch"}) == Allowed()


def test_an_approval_for_good_holds_for_exactly_these_arguments() -> None:
    policy = _policy()
    assert _answer(policy, save, {"text": "a"}, "always") == Allowed()
    assert policy.decide(save, {"text": "a"}, user="ana") == Allowed()
    assert policy.decide(save, {"text": "a"}, user="ana", tainted_by={"find"}) == Allowed(), "even after taint"
    _asked(policy, save, {"text": "b"})
    _asked(policy, save, {"text": "a", "more": 1})
    assert isinstance(policy.decide(save, {"text": "a"}, user="ben"), NeedsApproval)


def test_an_approval_of_the_whole_tool_does_not_hold_after_untrusted_text() -> None:
    policy = _policy()
    _answer(policy, save, {"text": "a"}, "always", scope="tool")
    assert policy.decide(save, {"text": "b"}, user="ana") == Allowed()
    _asked(policy, save, {"text": "b"}, tainted_by={"find"})


def test_an_approval_of_one_call_is_for_that_call() -> None:
    policy = _policy()
    assert _answer(policy, save, {"text": "a"}, "once") == Allowed()
    _asked(policy, save, {"text": "a"})


def test_a_tool_that_asks_once_asks_once_in_each_chat() -> None:
    policy = _policy()
    assert _answer(policy, mail, {"text": "a"}, "once", chat="c1") == Allowed()
    assert policy.decide(mail, {"text": "b"}, user="ana", chat="c1") == Allowed()
    _asked(policy, mail, {"text": "b"}, chat="c2")
    _asked(policy, mail, {"text": "b"}, chat="c1", tainted_by={"find"})


def test_a_refusal_is_for_one_call_or_for_good() -> None:
    policy = _policy()
    assert isinstance(_answer(policy, save, {"text": "a"}, "no"), Denied)
    _asked(policy, save, {"text": "a"})
    assert isinstance(_answer(policy, save, {"text": "a"}, "never", scope="tool"), Denied)
    assert isinstance(policy.decide(save, {"text": "b"}, user="ana"), Denied)


def test_a_refusal_for_good_wins_over_an_approval_for_good() -> None:
    policy = _policy()
    _answer(policy, save, {"text": "a"}, "always")
    _answer(policy, save, {"text": "b"}, "never", scope="tool")
    assert isinstance(policy.decide(save, {"text": "a"}, user="ana"), Denied)


def test_an_approval_ends_when_it_expires() -> None:
    clock = Clock()
    policy = _policy(clock)
    _answer(policy, save, {"text": "a"}, "always", expires_s=60)
    clock.now += 59
    assert policy.decide(save, {"text": "a"}, user="ana") == Allowed()
    clock.now += 1
    _asked(policy, save, {"text": "a"})


def test_a_withdrawn_approval_is_gone() -> None:
    policy = _policy()
    _answer(policy, save, {"text": "a"}, "always")
    for grant in list(policy.grants.of("ana", "save", save.origin)):
        policy.grants.withdraw(grant)
    _asked(policy, save, {"text": "a"})


def test_an_answer_to_another_question_is_no_answer() -> None:
    policy = _policy()
    harmless, harmful = _asked(policy, save, {"text": "a"}), _asked(policy, save, {"text": "rm"})
    ruling = policy.accept(save, harmful, Decision("always", harmless.arguments_hash), user="ana")
    assert isinstance(ruling, Denied)
    _asked(policy, save, {"text": "rm"})


def test_an_approval_is_not_for_a_tool_of_the_same_name_from_elsewhere() -> None:
    policy = _policy()
    _answer(policy, save, {"text": "a"}, "always")
    _answer(policy, save, {"text": "b"}, "always", scope="tool")
    _asked(policy, save.of("mcp stranger"), {"text": "a"})


def test_the_preview_shows_what_would_hide() -> None:
    asked = _asked(_policy(), save, {"text": "safe\u202etxt.exe\u200b\n" + "é"})
    assert asked.preview == r'save(text="safe\u202etxt.exe\u200b\né")'
    long = _asked(_policy(), save, {"text": "a" * 5000}).preview
    assert long.endswith(f"a… ({len('save(text=..)') + 1000} more characters are not shown)")


@pytest.mark.parametrize("answer", ["once", "no"])
def test_what_is_not_remembered_takes_no_scope_and_no_expiry(answer: Any) -> None:
    for wrong in ({"scope": "tool"}, {"expires_s": 5}):
        with pytest.raises(ValueError, match="is for one call"):
            Decision(answer, "hash", **wrong)
    with pytest.raises(ValueError, match="seconds above 0"):
        Decision("always", "hash", expires_s=0)


def test_every_class_has_a_ruling() -> None:
    each: Permission
    for each in PERMISSIONS:
        made = tool(permission=each)(clock.__wrapped__)
        assert isinstance(_policy().decide(made, {}, user="ana"), Allowed | NeedsApproval)
