"""Tool choice: the generator's right answers pass checks that do not use it, and the judges are strict."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from training.conversation import Case, Conversation, ModelReply, SpokenCall
from training.phrases import read
from training.tasks import tool_choice
from training.tasks.tool_choice import Kind, case, conversation, same
from training.tool_bank import composed, concepts, frames, made, rivals, thing, values
from training.tool_bank.requests import request
from training.tool_bank.toolbox import toolbox

pytestmark = pytest.mark.slow

_KINDS: tuple[Kind, ...] = ("call", "none", "several", "repair")
_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def _conversations(count: int = 400) -> list[Conversation]:
    return [conversation(Random(seed), "train", (seed % 11) / 10) for seed in range(count)]


def _schemas(chat: Conversation) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat.tools}


def _first_calls(chat: Conversation) -> list[tuple[str, SpokenCall]]:
    """Returns the users' requests, with each call that answers it at once."""
    pairs = zip(chat.messages, chat.messages[1:], strict=False)
    return [(asked.content, call) for asked, reply in pairs if asked.role == "user" for call in reply.calls]


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list) else [value]


def _valid(value: Any, schema: dict[str, Any]) -> bool:
    """The little of JSON Schema that tools here use."""
    kinds: dict[str, Any] = {"string": str, "integer": int, "number": int | float, "boolean": bool, "array": list}
    if isinstance(value, bool) != (schema["type"] == "boolean") or not isinstance(value, kinds[schema["type"]]):
        return False
    if isinstance(value, list):
        return all(_valid(item, schema["items"]) for item in value)
    return "enum" not in schema or value in schema["enum"]


def test_the_same_seed_gives_the_same_conversation() -> None:
    for seed in range(20):
        assert conversation(Random(seed), "train", 0.8) == conversation(Random(seed), "train", 0.8)
        assert case(Random(seed), 4, "call").prompt == case(Random(seed), 4, "call").prompt


def test_first_calls_satisfy_the_schema_of_a_tool_that_was_offered() -> None:
    for chat in _conversations():
        schemas = _schemas(chat)
        for _, call in _first_calls(chat):
            properties = schemas[call.name]["properties"]
            assert set(schemas[call.name].get("required", ())) <= call.arguments.keys() <= properties.keys()
            assert all(_valid(value, properties[key]) for key, value in call.arguments.items())
            assert list(call.arguments) == [name for name in properties if name in call.arguments]


def test_arguments_are_in_the_words_of_the_user() -> None:
    """Finds every argument in the request, but for enums, flags and those that the wording implies."""
    implied = {0}  # "mute the speaker", "close the blinds"
    for chat in _conversations():
        schemas = _schemas(chat)
        for text, call in _first_calls(chat):
            for key, value in call.arguments.items():
                if "enum" in schemas[call.name]["properties"][key]:
                    continue
                for leaf in _leaves(value):
                    if isinstance(leaf, bool) or leaf in implied:
                        continue
                    number = str(leaf).isdigit() and 0 < int(leaf) <= 10 and _NUMBER_WORDS[int(leaf)] in text
                    assert str(leaf) in text or number, (text, call)


def test_every_wording_names_what_its_tool_requires() -> None:
    for phrasing in ("train", "held_out"):
        rng = Random(1)
        shaped = [made(rng, phrasing, frame, thing(rng, phrasing)) for frame in frames(phrasing) for _ in range(5)]
        for concept in (*concepts(phrasing), *shaped):
            names = {param.names[0] for param in concept.params}
            required = {param.names[0] for param in concept.params if param.required}
            for ask in concept.asks:
                assert required <= ask.needs <= names, (concept.key, ask)


def test_wordings_of_made_up_tools_name_their_thing() -> None:
    for phrasing in ("train", "held_out"):
        for frame in frames(phrasing):
            concept = made(Random(2), phrasing, frame, "zorble")
            for ask in concept.asks:
                assert "zorble" in re.sub(r"\{[^}]*\}", "", ask.template), (frame, ask)


def test_tools_of_parts_name_what_they_require_and_their_thing() -> None:
    rng = Random(4)
    built = [composed.action(rng, "train", "zorble", verb) for verb in composed.VERBS for _ in range(3)]
    built += [composed.question(rng, "train", "zorble", asked) for asked in composed.QUESTIONS for _ in range(3)]
    for concept in built:
        names = [param.names[0] for param in concept.params]
        assert len(set(names)) == len(names), concept
        required = {param.names[0] for param in concept.params if param.required}
        for ask in concept.asks:
            assert required <= ask.needs <= set(names), (concept.key, ask)
            assert "zorble" in re.sub(r"\{[^}]*\}", "", ask.template).lower() and "<" not in ask.template, ask


def test_a_person_who_must_be_named_is_the_one_who_does_it() -> None:
    """Wordings of the agent are there, and those of bare values only where their kinds tell them apart."""
    built = [composed.action(Random(seed), "train", "zorble") for seed in range(300)]
    agents = [
        concept for concept in built if any(param.names[0] == "who" and param.required for param in concept.params)
    ]
    asks = [ask.template for concept in agents for ask in concept.asks]
    assert len(asks) > 200 and all("{who}" in template for template in asks)
    assert sum(template.startswith("{who} ") for template in asks) > len(asks) / 5, "as the subject of the sentence"
    for concept in built:
        kinds = {param.names[0]: param.kind.split()[0] for param in concept.params}
        for ask in concept.asks:
            for bare in re.findall(r"\{(\w+)\}, \{(\w+)\}", ask.template):
                if {*bare}.isdisjoint({"name", "zorble_id", "number", "zorbles"}):  # the object's, beside its noun
                    first, second = (kinds[name] for name in bare)
                    assert first != second and {first, second} - {"int", "num", "amount"}, ask.template


@pytest.mark.parametrize(
    ("verb", "done", "third", "ing"),
    [
        ("turn down", "turned down", "turns down", "turning down"), ("polish", "polished", "polishes", "polishing"),
        ("levy", "levied", "levies", "levying"), ("redo", "redone", "redoes", "redoing"),
        ("freeze", "frozen", "freezes", "freezing"), ("pin", "pinned", "pins", "pinning"),
        ("mimic", "mimicked", "mimics", "mimicking"), ("put up", "put up", "puts up", "putting up"),
        ("spray", "sprayed", "sprays", "spraying"), ("spread", "spread", "spreads", "spreading"),
    ],
)  # fmt: skip
def test_verbs_are_inflected(verb: str, done: str, third: str, ing: str) -> None:
    assert (composed.third_person(verb), composed.gerund(verb, done)) == (third, ing)


def test_a_made_up_verb_stays_with_its_tool() -> None:
    concept = composed.action(Random(5), "train", "lamp", "glorp")
    assert all(re.search(r"\bglorp", ask.template.lower()) for ask in concept.asks)
    assert rivals(concept, composed.action(Random(6), "train", "lamp", "glorp"))
    assert not rivals(concept, composed.action(Random(6), "train", "lamp", "frimp"))


def test_what_tells_an_attribute_never_meets_a_question_about_the_same_thing() -> None:
    asked = composed.question(Random(7), "train", "lamp", "cost")
    assert rivals(asked, made(Random(8), "train", "get", "lamp"))
    assert not rivals(asked, made(Random(8), "train", "get", "door"))
    assert not rivals(asked, made(Random(8), "train", "remove", "lamp"))


def test_no_verb_belongs_to_two_groups_nor_to_a_shape_or_a_held_out_tool() -> None:
    verbs = [verb for group in composed.synonyms() for verb in group]
    assert len(set(verbs)) == len(verbs) > 400
    shapes = [made(Random(1), part, frame, "zorble") for part in ("train", "held_out") for frame in frames(part)]
    named = [name for concept in (*shapes, *concepts("held_out")) for name in concept.names]
    assert not {name for name in named if name.split()[0] in verbs}


def test_the_bank_is_large_enough() -> None:
    assert len(concepts("train")) + len(frames("train")) >= 145
    assert len(concepts("held_out")) >= 40


def test_held_out_tools_share_no_name_description_or_wording_with_the_trained_ones() -> None:
    train, held = concepts("train"), concepts("held_out")
    for part in ("names", "does"):
        seen = {text.lower() for concept in train for text in getattr(concept, part)}
        assert not seen & {text.lower() for concept in held for text in getattr(concept, part)}
    asked = {ask.template.lower() for concept in train for ask in concept.asks}
    assert not asked & {ask.template.lower() for concept in held for ask in concept.asks}
    assert not set(frames("train")) & set(frames("held_out"))
    for kind in read("tool_choice").values():
        assert not set(kind.train) & set(kind.held_out)


def test_trained_and_held_out_things_and_names_are_apart() -> None:
    for kind in ("thing", "attribute", "city", "person", "food", "title_first", "text_end"):
        assert not set(values.bank(kind, "train")) & set(values.bank(kind, "held_out"))
    rng = Random(3)
    assert not any(values.held_out(values.made_up(rng, "train")) for _ in range(200))
    assert all(values.held_out(values.made_up(rng, "held_out")) for _ in range(200))


def test_no_two_tools_of_a_list_do_the_same() -> None:
    for seed in range(60):
        offered = toolbox(Random(seed), "train", 1, 8)
        assert len({tool.name for tool in offered}) == 8
        assert len({(tool.concept.key, tool.concept.about) for tool in offered}) == 8


def test_thoughts_come_only_after_the_last_question() -> None:
    for chat in _conversations():
        last = max(at for at, message in enumerate(chat.messages) if message.role == "user")
        assert not any(message.thinking for message in chat.messages[:last])


def test_answers_hold_the_values_of_the_results() -> None:
    for chat in _conversations(150):
        for before, after in zip(chat.messages, chat.messages[1:], strict=False):
            if before.role != "tool" or after.role != "assistant" or after.calls or not before.content.startswith("{"):
                continue
            result = json.loads(before.content)
            for value in (leaf for item in result.values() for leaf in _leaves(item)):
                if not isinstance(value, bool) and value not in {"ok", "error"}:
                    assert str(value) in after.content


def test_it_starts_with_one_tool_and_a_string_and_grows_to_eight() -> None:
    for seed in range(50):
        chat = conversation(Random(seed), "train", 0)
        (tool,) = chat.tools
        properties = tool["function"]["parameters"]["properties"]
        assert [schema["type"] for schema in properties.values()] == ["string"]
    assert {len(conversation(Random(seed), "train", 1).tools) for seed in range(150)} == set(range(1, 9))


def test_kinds_of_turns_are_balanced() -> None:
    asked = calls = several = 0
    for seed in range(800):
        chat = conversation(Random(seed), "train", 0.8)
        for before, after in zip(chat.messages, chat.messages[1:], strict=False):
            if before.role == "user":
                asked += 1
                calls += bool(after.calls)
                several += len(after.calls) > 1
    assert 0.67 < calls / asked < 0.77
    assert 0.08 < several / asked < 0.2


def test_a_free_text_at_the_end_is_not_followed_by_more_words() -> None:
    seen = 0
    for seed in range(300):
        rng = Random(seed)
        for offered in toolbox(rng, "train", 1, 3):
            texts = [at for at, param in enumerate(offered.params) if param.kind in values.TEXTS]
            asked = request(rng, offered, "train")
            for at in texts:
                text = asked.calls[0].arguments.get(offered.keys[at], "") if asked else ""
                if asked and text and '"' not in asked.text and f"'{text}" not in asked.text:
                    seen += 1
                    assert not asked.text.endswith((f"{text} please", f"{text}, please", f"{text} thanks", f"{text}."))
    assert seen > 10


@pytest.mark.parametrize("kind", _KINDS)
def test_judges_accept_what_is_wanted(kind: Kind) -> None:
    for seed in range(40):
        asked = case(Random(seed), 1 + seed % 8, kind)
        assert len(asked.prompt.tools) == 1 + seed % 8
        assert all(asked.judge(asked.wanted).values())


@pytest.mark.parametrize("kind", _KINDS)
def test_judges_reject_empty_broken_and_foreign_replies(kind: Kind) -> None:
    for seed in range(40):
        asked = case(Random(seed), 3, kind)
        wrong: list[tuple[ModelReply, ...]] = [
            (),
            (ModelReply("", "", ()),),
            (ModelReply("", "  ", (), broken=True),),
            (ModelReply("", "Hello!", (SpokenCall("no_such_tool", {}),)),),
            tuple(replace(reply, broken=True) for reply in asked.wanted),
        ]
        for replies in wrong:
            assert not any(asked.judge(replies).values()), (replies, asked)


def _with_call(asked: Case, call: SpokenCall) -> tuple[ModelReply, ...]:
    return (replace(asked.wanted[0], calls=(call,)), *asked.wanted[1:])


def test_a_wrong_argument_is_wrong_though_the_tool_is_right() -> None:
    for seed in range(40):
        asked = case(Random(seed), 4, "call")
        (call,) = asked.wanted[0].calls
        if not call.arguments:
            continue
        key = next(iter(call.arguments))
        for arguments in ({}, call.arguments | {key: "something else"}, call.arguments | {"unasked": 1}):
            verdict = asked.judge(_with_call(asked, SpokenCall(call.name, arguments)))
            assert verdict["right tool"]
            assert not verdict["right arguments"] or not arguments


def test_a_default_may_be_given_or_left_out() -> None:
    seen = 0
    for seed in range(200):
        asked = case(Random(seed), 4, "call")
        (call,) = asked.wanted[0].calls
        properties = _schemas(asked.prompt)[call.name]["properties"]
        defaults = {key: schema["default"] for key, schema in properties.items() if "default" in schema}
        unnamed = {key: value for key, value in defaults.items() if key not in call.arguments}
        if unnamed:
            seen += 1
            given = SpokenCall(call.name, call.arguments | unnamed)
            assert asked.judge(_with_call(asked, given))["right arguments"]
    assert seen > 5


def test_all_calls_are_wanted_in_any_order_and_none_twice() -> None:
    for seed in range(40):
        asked = case(Random(seed), 4, "several")
        calls = asked.wanted[0].calls
        assert len(calls) > 1
        for given, right in ((calls[::-1], True), (calls[:1], False), ((*calls, calls[0]), False)):
            replies = (replace(asked.wanted[0], calls=given), *asked.wanted[1:])
            assert asked.judge(replies)["all calls"] is right


def test_a_call_that_failed_is_no_repair_unless_the_tool_said_try_again() -> None:
    rejected = 0
    for seed in range(60):
        asked = case(Random(seed), 3, "repair")
        failed = asked.prompt.messages[-2]
        assert failed.role == "assistant"
        assert not failed.learned
        wanted = asked.wanted[0].calls
        if wanted != failed.calls:
            rejected += 1
            assert not asked.judge((ModelReply("", "", failed.calls),))["repaired"]
    assert rejected > 30


def test_tools_answer_the_right_call_with_a_result_and_another_with_an_error() -> None:
    for seed in range(40):
        asked = case(Random(seed), 3, "call")
        assert asked.answer_call is not None
        assert "wrong call" not in asked.answer_call(asked.wanted[0].calls[0])
        assert "wrong call" in asked.answer_call(SpokenCall("no_such_tool", {}))


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (3, 3.0, True),
        (1, True, False),
        (0, False, False),
        ("3", 3, False),
        ([1, 2.0], [1.0, 2], True),
        ([1, 2], [2, 1], False),
        ({"a": [1]}, {"a": [1.0]}, True),
        ({"a": 1}, {"a": 1, "b": None}, False),
        (None, None, True),
    ],
)
def test_arguments_are_compared_as_json(a: Any, b: Any, equal: bool) -> None:
    assert same(a, b) is equal


def test_refusals_say_so_in_the_same_words() -> None:
    assert all("None of my tools" in refusal for refusal in tool_choice._REFUSALS)
    texts = [message.content for chat in _conversations(100) for message in chat.messages]
    assert any("None of my tools" in text for text in texts)
