"""Tools by name, from several origins: who holds a name, what is told of what could not be loaded."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ponder import Context, NotProvided, Tool, ToolDeclarationError, Toolset, tool
from tools.registry import Registry, tools_in


def _tool(name: str, says: str = "") -> Tool:
    @tool(name=name)
    def made() -> str:
        """Says."""
        return says

    return made


class Pair(Toolset):
    @tool
    def first(self) -> str:
        """First."""
        return "1"

    @tool
    def second(self) -> str:
        """Second."""
        return "2"


class Needy(Toolset):
    def __init__(self, path: str) -> None:
        self.path = path

    @tool
    def where(self) -> str:
        """Returns where."""
        return self.path


def test_tools_toolsets_classes_and_lists_are_added() -> None:
    registry = Registry()
    registry.add(_tool("a"), Pair, [Needy("x"), _tool("b")])
    assert sorted(each.name for each in registry) == ["a", "b", "first", "second", "where"]
    assert len(registry) == 5 and "a" in registry and "z" not in registry and registry.faults == []


def test_what_is_no_tool_is_refused() -> None:
    with pytest.raises(ToolDeclarationError, match="is no tool; offer a function with @tool"):
        Registry().add(len)
    with pytest.raises(ToolDeclarationError, match="Empty has no tools; put @tool above a method"):
        Registry().add(type("Empty", (Toolset,), {}))
    with pytest.raises(ToolDeclarationError, match="Needy could not be made without arguments .* offer an instance"):
        Registry().add(Needy)


def test_of_two_with_one_name_the_first_stays_and_the_clash_is_told_until_it_ends() -> None:
    registry = Registry()
    (first,) = registry.add(_tool("a"), origin="one")
    registry.add(_tool("a"), _tool("b"), origin="two")
    assert registry.get("a") is first and "b" in registry
    (fault,) = registry.faults
    assert fault.origin == "two" and "'a' is taken by one" in fault.message
    registry.remove("one")
    told = registry.get("a")
    assert told is not None and told.origin == "two" and registry.faults == []


def test_a_replaced_origin_keeps_its_place_and_its_claim() -> None:
    registry = Registry()
    registry.add(_tool("a"), origin="one")
    registry.add(_tool("a"), origin="two")
    before = registry.generation
    registry.replace("one", tools_in([_tool("a"), _tool("c")], "one"))
    held = registry.get("a")
    assert held is not None and held.origin == "one" and "c" in registry
    assert registry.generation > before


def test_specs_come_in_the_order_of_names_and_unknown_ones_are_refused() -> None:
    registry = Registry()
    registry.add(_tool("b"), _tool("a"))
    assert [each["function"]["name"] for each in registry.specs()] == ["a", "b"]
    assert [each["function"]["name"] for each in registry.specs(["b"])] == ["b"]
    with pytest.raises(KeyError, match="There are no tools z; there are a, b"):
        registry.specs(["z", "a"])


def test_names_near_to_a_wrong_one_are_found() -> None:
    registry = Registry()
    registry.add(_tool("http_fetch"), _tool("sql_query"))
    assert registry.near("HTTP-fetch") == ["http_fetch"]
    assert registry.near("sql") == ["sql_query"]
    assert registry.near("zzz") == []


def test_a_value_or_a_factory_is_provided_and_never_both() -> None:
    registry, ctx = Registry(), Context(user="ana", call_id="c1")
    registry.provide(int, 3)
    registry.provide(str, factory=lambda each: each.user)
    assert (registry.provided(ctx, int), registry.provided(ctx, str)) == (3, "ana")
    with pytest.raises(NotProvided, match="Nothing was provided for float"):
        registry.provided(ctx, float)
    with pytest.raises(ValueError, match="either a value or factory="):
        registry.provide(int)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with an installed package that has two entry points, one of them broken."""
    (tmp_path / "demo_tools_good.py").write_text(
        "from ponder import tool\n@tool\ndef shout(text: str) -> str:\n    'Shouts.'\n    return text.upper()\n"
    )
    (tmp_path / "demo_tools_bad.py").write_text("raise RuntimeError('no licence')\n")
    info = tmp_path / "demo_tools-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo-tools\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[ponder.tools]\nbad = demo_tools_bad\ngood = demo_tools_good\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("demo_tools_good", "demo_tools_bad"):
        sys.modules.pop(name, None)


def test_entry_points_are_loaded_and_a_broken_one_is_told(installed: Path) -> None:
    registry = Registry()
    registry.load_entry_points()
    shout = registry.get("shout")
    assert shout is not None and shout.origin == "entry point good (demo-tools 1.2)"
    assert [(each.origin, each.message) for each in registry.faults if "demo-tools" in each.origin] == [
        ("entry point bad (demo-tools 1.2)", "RuntimeError: no licence")
    ]


def test_a_module_offers_its_public_tools_and_the_toolsets_it_defines() -> None:
    module = sys.modules[__name__]
    names = {each.name for each in tools_in([Pair])}
    monkey = type(module)("made_up")
    vars(monkey).update(shout=_tool("shout"), _hidden=_tool("hidden"), Toolset=Toolset, Imported=Pair, again=Pair())
    assert {each.name for each in tools_in([monkey])} == {"shout"} | names
    with pytest.raises(ToolDeclarationError, match="empty declares no tool"):
        tools_in([type(module)("empty")])
