"""From a function to a tool: the schema it gets, the arguments it takes, and what can't be declared."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from ponder import BadArguments, Context, Depends, Tool, ToolDeclarationError, run_tool, tool


class Kind(enum.Enum):
    RAIN = "rain"
    SUN = "sun"


class Place(BaseModel):
    """A place."""

    title: str
    within: Place | None = None


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0


@tool(permission="read", timeout=5, rate="20/min", approval="never", idempotent=True, cache=60, max_chars=800)
async def weather(ctx: Context, city: str, days: Annotated[int, "how many days ahead", Field(ge=1, le=7)] = 1) -> str:
    """Current weather.

    Of the next days too.

    Args:
        city: its name,
            in any language.

    Returns:
        What no model needs to know.
    """
    return f"{city} {days} {ctx.user}"


def test_a_signature_and_its_docstring_make_the_schema() -> None:
    assert weather.spec() == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Current weather. Of the next days too.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "required": ["city"],
                "properties": {
                    "city": {"type": "string", "description": "its name, in any language."},
                    "days": {
                        "type": "integer",
                        "default": 1,
                        "minimum": 1,
                        "maximum": 7,
                        "description": "how many days ahead",
                    },
                },
            },
        },
    }


def test_what_is_declared_is_on_the_tool() -> None:
    assert (weather.permission, weather.timeout_s, str(weather.rate)) == ("read", 5.0, "20/min")
    assert (weather.approval, weather.idempotent, weather.cache_s, weather.max_chars) == ("never", True, 60.0, 800)
    assert weather.origin == __name__


@pytest.mark.parametrize(
    ("permission", "approval", "idempotent"),
    [
        ("none", "never", True),
        ("read", "never", True),
        ("network", "never", False),
        ("write", "always", False),
        ("execute", "always", False),
    ],
)
def test_approval_and_idempotence_follow_from_the_permission(permission: Any, approval: str, idempotent: bool) -> None:
    @tool(permission=permission)
    def act() -> None:
        """Acts."""

    assert (act.approval, act.idempotent) == (approval, idempotent)


async def test_a_tool_is_still_the_function_it_wraps() -> None:
    assert await weather(Context(user="ana", call_id="1"), "Oslo", days=2) == "Oslo 2 ana"
    assert weather.__name__ == "weather" and (weather.__doc__ or "").startswith("Current weather.")


def test_the_context_may_stand_anywhere_and_what_is_injected_is_hidden() -> None:
    @tool
    def find(word: str, point: Depends[Point], ctx: Context) -> str:
        """Finds."""
        return f"{word} {point.x} {ctx.call_id} {ctx.get(Point) is point}"

    assert list(find.parameters["properties"]) == ["word"]
    from ponder import FakeContext

    assert run_tool(find, FakeContext(provided={Point: Point(2.0)}), word="a").text == "a 2.0 call-1 True"


def test_a_type_that_is_local_to_a_function_is_found() -> None:
    class Local(BaseModel):
        a: int

    @tool
    def take(local: Local) -> int:
        """Takes."""
        return local.a

    assert run_tool(take, local={"a": 3}).value == 3


def test_parameters_may_be_called_anything() -> None:
    @tool
    def odd(schema: int, model_config: int, _x: int, json: int, self_: int = 0) -> list[int]:
        """Odd."""
        return [schema, model_config, _x, json, self_]

    assert run_tool(odd, schema=1, model_config=2, _x=3, json=4).value == [1, 2, 3, 4, 0]


def test_definitions_are_written_out_where_they_are_not_recursive() -> None:
    @tool
    def go(points: list[Point], place: Place, again: Point | None = None) -> None:
        """Goes."""

    schema = go.parameters
    assert list(schema["$defs"]) == ["Place"]
    assert schema["properties"]["points"]["items"]["required"] == ["x"]
    assert "title" in schema["$defs"]["Place"]["properties"], "a field called title is no title"
    assert "title" not in schema["$defs"]["Place"]
    for each in (schema, schema["$defs"]["Place"], schema["properties"]["points"]["items"]):
        assert each["additionalProperties"] is False
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"city": 3}, "city: input should be a valid string, and is 3"),
        ({"city": "Oslo", "days": "3"}, 'days: input should be a valid integer, and is "3"'),
        ({"city": "Oslo", "days": 3.5}, "days: .*and is 3.5"),
        ({"city": "Oslo", "days": True}, "days: .*and is true"),
        ({"city": "Oslo", "days": 8}, "days: .*less than or equal to 7, and is 8"),
        ({}, "city: it is required, and missing"),
        ({"city": "Oslo", "day": 3}, "day: there is no such argument; did you mean days?"),
        ({"city": "Oslo", "xyz": 3}, "xyz: there is no such argument; accepted: city, days"),
        ({"city": float("nan")}, "not JSON"),
    ],
)
def test_bad_arguments_name_the_field_and_what_is_wrong(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArguments, match=said):
        weather.validate(arguments)


def test_every_bad_field_is_named_at_every_depth() -> None:
    @tool
    def go(points: list[Point], place: Place) -> None:
        """Goes."""

    with pytest.raises(BadArguments) as caught:
        go.validate({"points": [{"x": 1}, {"x": "1", "z": 0}], "place": {"title": "a", "extra": 1}})
    assert {each.where for each in caught.value.problems} == {"points[1].x", "points[1].z", "place.extra"}


def test_what_json_writes_as_a_string_is_read() -> None:
    @tool
    def when(day: datetime.date, amount: Decimal, kind: Kind, mode: Literal["a", "b"]) -> None:
        """Goes on a day."""

    read = when.validate({"day": "2024-02-29", "amount": "1.10", "kind": "sun", "mode": "b"})
    assert read == {"day": datetime.date(2024, 2, 29), "amount": Decimal("1.10"), "kind": Kind.SUN, "mode": "b"}


@tool
def many(
    number: Annotated[int, Field(ge=-5, le=5)],
    text: Annotated[str, Field(max_length=3)],
    flag: bool,
    ratio: float,
    kind: Kind,
    rows: Annotated[list[Point], Field(max_length=2)],
    choice: int | str | None = None,
    counts: dict[str, int] | None = None,
) -> None:
    """Takes many things."""


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, -2.25, "", "rain", "abcd"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "y", "z"]), inner, max_size=3),
    max_leaves=5,
)
_GOOD = {
    "number": st.integers(-6, 6),
    "text": st.text("ab", max_size=4),
    "flag": st.booleans(),
    "ratio": st.sampled_from([1, 0.5]),
    "kind": st.sampled_from(["rain", "sun", "snow"]),
    "rows": st.lists(st.fixed_dictionaries({"x": st.integers(0, 3)}, optional={"y": st.just(0.5), "z": st.just(1)})),
}


@given(
    st.fixed_dictionaries(
        {name: st.one_of(good, good, good, _JSON) for name, good in _GOOD.items()},
        optional={"choice": _JSON, "counts": st.dictionaries(st.text("ab"), st.integers()), "unknown": _JSON},
    )
)
def test_the_schema_and_the_tool_accept_the_same(arguments: dict[str, Any]) -> None:
    fits = jsonschema.Draft202012Validator(many.parameters).is_valid(arguments)
    try:
        many.validate(arguments)
    except BadArguments:
        assert not fits
    else:
        assert fits


def _declared(source: str) -> Callable[[], object]:
    def declare() -> object:
        names: dict[str, Any] = {"tool": tool, "Context": Context, "Any": Any}
        exec(source, names)  # so that a bad declaration is text, as an author writes it
        return names

    return declare


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("@tool\ndef f(a):\n    'Does.'", "a has no type; annotate it"),
        ("@tool\ndef f(*a: int):\n    'Does.'", "name every argument"),
        ("@tool\ndef f(**a: int):\n    'Does.'", "name every argument"),
        ("@tool\ndef f(a: int, /):\n    'Does.'", "remove the `/`"),
        ("@tool\ndef f(a: int): ...", "has no description; begin its docstring"),
        ("@tool\ndef f(a: int):\n    'Args:\\n    a: it.'", "has no description"),
        ("@tool\ndef f(a: int):\n    '''Does.\n\n    Args:\n        b: it.\n    '''", "describes b, .* it gives a"),
        (
            "@tool\ndef f(c: Context):\n    '''Does.\n\n    Args:\n        c: it.\n    '''",
            "describes c, .* no arguments",
        ),
        ("@tool\ndef f(a: int):\n    '''Does. Args: a: it.'''", "write it on a line of its own"),
        ("@tool\ndef f(a: int):\n    '''Does.\n\n    Args: a: it.\n    '''", "holds more than `Args:`"),
        ("@tool\ndef f(a: int):\n    '''Does.\n\n    Args:\n        it.\n    '''", "is not `name: what it is`"),
        ("@tool(permission='root')\ndef f():\n    'Does.'", "accepted: none, read, write, network, execute"),
        ("@tool(approval='maybe')\ndef f():\n    'Does.'", "accepted: never, once, always"),
        ("@tool(rate='fast')\ndef f():\n    'Does.'", "'fast' is not a rate; write a count"),
        ("@tool(rate='0/min')\ndef f():\n    'Does.'", "is not a rate"),
        ("@tool(timeout=0)\ndef f():\n    'Does.'", "above 0 and at most 3600"),
        ("@tool(timeout=float('nan'))\ndef f():\n    'Does.'", "above 0"),
        ("@tool(cache=-1)\ndef f():\n    'Does.'", "write 0 for no cache"),
        ("@tool(cache=9, permission='write')\ndef f():\n    'Does.'", "remove cache"),
        ("@tool(cache=9, permission='network')\ndef f():\n    'Does.'", "remove cache"),
        ("@tool(max_chars=10)\ndef f():\n    'Does.'", "below 200"),
        ("@tool(name='two words')\ndef f():\n    'Does.'", "'two words' is not 1 to 64 of the characters"),
        ("@tool\ndef f(a: type(tool)):\n    'Does.'", "cannot be written as JSON"),
        ("@tool\ndef f(a: 'Nowhere'):\n    'Does.'", "names 'Nowhere', which is not there"),
        ("@tool\ndef f(a: Context, b: Context):\n    'Does.'", "takes two contexts"),
        ("@tool\nclass f:\n    'Does.'", "stands above a function"),
        ("@tool\n@staticmethod\ndef f():\n    'Does.'", "stands above a function"),
    ],
)
def test_what_cannot_be_declared_says_what_to_write_instead(source: str, said: str) -> None:
    with pytest.raises(ToolDeclarationError, match=said):
        _declared(source)()


async def _echo(ctx: Context, arguments: dict[str, Any]) -> Any:
    return arguments


_ECHO = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def test_a_tool_is_made_of_a_schema_too() -> None:
    made = Tool.from_schema("echo", "Says it again.", _ECHO, _echo, origin="mcp demo", permission="network", timeout=9)
    assert run_tool(made, n=3).value == {"n": 3}
    assert (made.origin, made.permission, made.timeout_s, made.untrusted) == ("mcp demo", "network", 9.0, True)
    with pytest.raises(BadArguments, match="n: 'x' is not of type 'integer'"):
        run_tool(made, n="x")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string"}, 'must have "type": "object"'),
        ({"type": "object", "properties": {"a": {"type": "nothing"}}}, "is not JSON Schema"),
        ({"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1/x"}}}, "only references within it"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolDeclarationError, match=said):
        Tool.from_schema("echo", "Says it again.", schema, _echo)


def test_a_schema_changed_afterwards_changes_nothing() -> None:
    schema = json.loads(json.dumps(_ECHO))
    made = Tool.from_schema("echo", "Says it again.", schema, _echo)
    schema["properties"]["n"]["type"] = "string"
    assert made.parameters == _ECHO and made.validate({"n": 1}) == {"n": 1}
