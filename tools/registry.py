"""The tools there are, by name, from several origins: modules, entry points, plugin files, MCP servers.

Names are unique: where two origins claim one, the first keeps it, and the clash is a fault that is listed until it
ends. An origin that fails to load is a fault too, never the end of the others. Knows nothing of how tools are run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, TypeVar

from tools.context import Context
from tools.errors import NotProvided, ToolDeclarationError
from tools.options import NAME
from tools.tool import Tool, Toolset

T = TypeVar("T")
Offer = object  # a Tool, a Toolset or its class, a module with such, or a list or tuple of them


@dataclass(frozen=True, slots=True)
class Fault:
    """A plugin that could not be loaded, wholly or in part, and why."""

    origin: str
    message: str


class Registry:
    """Tools by name. One event loop's: it is not for several threads at once."""

    def __init__(self) -> None:
        self.generation = 0  # grows with every change, for caches derived from the tools
        self._origins = dict[str, tuple[Tool, ...]]()
        self._table = dict[str, Tool]()
        self._clashes = list[Fault]()
        self._failures = dict[str, str]()
        self._provided = dict[type, Callable[[Context], Any]]()

    def add(self, *offers: Offer, origin: str | None = None) -> list[Tool]:
        """Adds the offers, and returns the tools; those of an origin that is there already are added to it.

        Raises:
            ToolDeclarationError: something is offered that is no tool, or a toolset's class needs arguments.
        """
        new = tools_in(offers, origin)
        for each in new:
            self._origins[each.origin] = (*self._origins.get(each.origin, ()), each)
        self._rebuild()
        return new

    def replace(self, origin: str, tools: Iterable[Tool]) -> tuple[Tool, ...]:
        """Puts an origin's new tools where its old ones were, and returns the old; its failure is forgotten."""
        old = self._origins.get(origin, ())
        self._origins[origin] = tuple(tools)
        self._failures.pop(origin, None)
        self._rebuild()
        return old

    def remove(self, origin: str) -> tuple[Tool, ...]:
        """Takes an origin's tools and faults away, and returns the tools; their names go to the next origin that claims
        them.
        """
        old = self._origins.pop(origin, ())
        self._failures.pop(origin, None)
        self._rebuild()
        return old

    def fail(self, origin: str, message: str) -> None:
        """Notes that an origin could not be loaded; tools of it that are there stay."""
        self._failures[origin] = message

    @property
    def faults(self) -> list[Fault]:
        """Returns the faults: origins that failed, and names that were taken."""
        return [*(Fault(origin, message) for origin, message in self._failures.items()), *self._clashes]

    def load_entry_points(self, group: str = "ponder.tools") -> None:
        """Adds the tools of installed packages; a broken entry point becomes a fault."""
        for point in entry_points(group=group):
            package = f" ({point.dist.name} {point.dist.version})" if point.dist is not None else ""
            origin = f"entry point {point.name}{package}"
            try:
                self.replace(origin, tools_in([point.load()], origin))
            except (Exception, SystemExit) as error:  # a package's import may do anything
                self.fail(origin, f"{type(error).__name__}: {error}")

    def get(self, name: str) -> Tool | None:
        return self._table.get(name)

    def near(self, name: str) -> list[str]:
        """Up to three names that look like this one, the nearest first."""
        folded = {each.lower().replace("-", "_"): each for each in self._table}
        found = get_close_matches(name.lower().replace("-", "_"), folded, 3, 0.5)
        return [folded[each] for each in found]

    def specs(self, names: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """The tools as OpenAI's `tools` list has them, in the order of their names, so that a prompt repeats.

        Raises:
            KeyError: a name that there is not.
        """
        wanted = sorted(self._table if names is None else set(names))
        if unknown := [name for name in wanted if name not in self._table]:
            raise KeyError(
                f"There are no tools {', '.join(unknown)}; there are {', '.join(sorted(self._table)) or 'none'}."
            )
        return [self._table[name].spec() for name in wanted]

    def provide(self, kind: type[T], value: T | None = None, *, factory: Callable[[Context], T] | None = None) -> None:
        """Provides tools with `Depends[kind]` and `ctx.get(kind)`: one value, or one made for every call.

        Raises:
            ValueError: not exactly one of `value` and `factory` is given.
        """
        if (value is None) == (factory is None):
            raise ValueError(f"For {kind.__qualname__}, give either a value or factory=, a function of the Context.")
        self._provided[kind] = factory if factory is not None else lambda _: value

    def provided(self, ctx: Context, kind: type) -> Any:
        """Returns the value provided for a type.

        Raises:
            NotProvided: nothing was.
        """
        if kind not in self._provided:
            raise NotProvided(f"Nothing was provided for {kind.__qualname__}; the host does so with Registry.provide.")
        return self._provided[kind](ctx)

    async def close(self) -> None:
        """Lets every toolset go."""
        await leave(each for brought in self._origins.values() for each in brought)

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._table.values())

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def _rebuild(self) -> None:
        self._table, self._clashes = {}, []
        for origin, brought in self._origins.items():
            for each in brought:
                if NAME.fullmatch(each.name) is None:
                    message = f"the name {each.name!r} is not 1 to 64 characters of a-z, A-Z, 0-9, _ and -."
                    self._clashes.append(Fault(origin, message))
                    continue
                holder = self._table.setdefault(each.name, each)
                if holder is not each:
                    message = f"the name {each.name!r} is taken by {holder.origin}; rename one, as in @tool(name=…)."
                    self._clashes.append(Fault(origin, message))
        self.generation += 1


def tools_in(offers: Sequence[Offer], origin: str | None = None) -> list[Tool]:
    """The tools in the offers; with an `origin`, they are said to come from there.

    Raises:
        ToolDeclarationError: something is offered that is no tool, or a toolset's class needs arguments.
    """
    found = list[Tool]()
    for offer in offers:
        if isinstance(offer, Tool):
            found.append(offer)
        elif isinstance(offer, Toolset) or (inspect.isclass(offer) and issubclass(offer, Toolset)):
            toolset = offer if isinstance(offer, Toolset) else _made(offer)
            if not toolset.tools():
                raise ToolDeclarationError(
                    f"{type(toolset).__qualname__} has no tools; put @tool above a method of it."
                )
            found += toolset.tools()
        elif isinstance(offer, (list, tuple)):
            found += tools_in(offer)
        elif isinstance(offer, ModuleType):
            inner = tools_in(_public(offer))
            if not inner:
                raise ToolDeclarationError(f"{offer.__name__} declares no tool; put @tool above a function in it.")
            found += inner
        else:
            raise ToolDeclarationError(
                f"{offer!r} is no tool; offer a function with @tool, a Toolset (or its class), a module, or a list."
            )
    return [each if origin is None else each.of(origin) for each in found]


async def leave(tools: Iterable[Tool]) -> None:
    """Lets the toolsets go that the tools belong to, each after its last running call."""
    for owner in {id(each.owner): each.owner for each in tools}.values():
        if isinstance(owner, Toolset):
            await owner.leave()


def _made(kind: type[Toolset]) -> Toolset:
    try:
        return kind()
    except TypeError as error:
        raise ToolDeclarationError(
            f"{kind.__qualname__} could not be made without arguments ({error}); offer an instance of it."
        ) from error


def _public(module: ModuleType) -> list[Offer]:
    """A module's public tools and toolsets, each once; a class of which there is an instance is not offered too."""
    public = [value for name, value in vars(module).items() if not name.startswith("_")]
    sets = [value for value in public if isinstance(value, Toolset)]
    made = {type(each) for each in sets}
    own = f"{module.__name__}."
    kinds = [
        value
        for value in public
        if inspect.isclass(value)
        and issubclass(value, Toolset)
        and f"{value.__module__}.".startswith(own)  # not an imported class, such as Toolset itself
        and value not in made
        and not inspect.isabstract(value)
    ]
    found = [value for value in public if isinstance(value, Tool)]
    return list({id(each): each for each in [*found, *sets, *kinds]}.values())
