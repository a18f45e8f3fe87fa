"""Tools: functions with a schema, and toolsets, classes of tools with shared state.

`@tool` makes a tool from a function's signature and docstring; `Tool.from_schema` makes one from a JSON schema, for
tools declared elsewhere (MCP). A declared tool is still the function it wraps, so a test may simply call it. A
toolset's `open` runs before the first call and `close` when the host lets the toolset go, after the calls that still
run. A toolset that could not be opened is tried again at its next call.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

from tools.calling import evaluated
from tools.context import Context
from tools.errors import ToolDeclarationError, ToolError
from tools.json_schema import checker
from tools.limits import Rate
from tools.options import Approval, Permission, named, options
from tools.schema import JSONSchema, Signature, caller


@dataclass
class _Life:
    """The state of a toolset between its opening and its closing."""

    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    opened: bool = False
    calls: int = 0
    leaving: bool = False


class Toolset:
    """Base class of tools that share state. Methods declared with `@tool` become its tools, under their own names."""

    _life_: _Life | None = None  # made at first use, so that a subclass need not call super().__init__()

    def __init_subclass__(cls) -> None:
        """Raises `ToolDeclarationError` for a tool that has no `self`: it would be silently left out."""
        for name, value in vars(cls).items():
            if isinstance(value, (staticmethod, classmethod)) and isinstance(value.__func__, DeclaredTool):
                raise ToolDeclarationError(
                    f"{cls.__qualname__}.{name} is a {type(value).__name__}; a toolset's tools take self."
                )

    async def open(self) -> None:
        """Called once before the first call of any tool: connect, open files."""

    async def close(self) -> None:
        """Called once when the toolset is let go, if it was opened."""

    def tools(self) -> list[Tool]:
        """The tools of this instance, in the order of their declaration, bases first."""
        names = dict.fromkeys(
            name
            for kind in reversed(type(self).__mro__)
            for name, value in vars(kind).items()
            if isinstance(value, DeclaredTool)
        )
        # A name that a subclass has made something else is no tool any more.
        bound = (getattr(self, name) for name in names if isinstance(inspect.getattr_static(self, name), DeclaredTool))
        return list(bound)

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Keeps the toolset open for one call.

        Raises:
            ToolError: it could not be opened; the message says why.
        """
        life = self._life()
        life.calls += 1
        try:
            async with life.changing:
                if not life.opened:
                    try:
                        await self.open()
                    except Exception as error:
                        raise ToolError(f"{type(self).__name__} could not be opened: {error}") from error
                    life.opened = True
            yield
        finally:
            life.calls -= 1
            if life.leaving:
                await self._close_when_idle(life)

    async def leave(self) -> None:
        """Closes the toolset, now or after the last running call. A later call opens it anew."""
        life = self._life()
        life.leaving = True
        await self._close_when_idle(life)

    def _life(self) -> _Life:
        if self._life_ is None:
            self._life_ = _Life()
        return self._life_

    async def _close_when_idle(self, life: _Life) -> None:
        async with life.changing:
            if life.opened and life.calls == 0:
                life.opened = False
                life.leaving = False
                await self.close()


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
Run = Callable[[Context, dict[str, Any]], Awaitable[Any]]  # any JSON value, or one that pydantic can convert
GuidedParameters = Callable[[], Awaitable[JSONSchema | None]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Tool:
    """A tool, as the registry, the policy and the executor know it.

    `permission`: the class of its effects; `timeout_s`: seconds for a call; `rate`: calls per user; `approval`:
    whether a person is asked before it runs: never, once in a chat, or always; `idempotent`: whether a second run does
    no harm; `cache_s`: seconds that a result is reused for the same user and arguments, 0 for not at all; `max_chars`:
    of the result as the model reads it; `origin`: the module, plugin or server it comes from; `foreign`: whether its
    name, description and schema are somebody else's text, which a model may follow. `guided_parameters`
    returns narrower parameters as of now, to which the calls of small models are held by guided decoding, or None; the
    model is not shown them.
    """

    name: str
    description: str
    parameters: JSONSchema
    permission: Permission = "read"
    timeout_s: float = 30.0
    rate: Rate | None = None
    approval: Approval = "never"
    idempotent: bool = True
    cache_s: float = 0.0
    max_chars: int = 8000
    origin: str = ""
    foreign: bool = False
    owner: object | None = field(default=None, repr=False)  # the toolset a method is bound to
    guided_parameters: GuidedParameters | None = field(default=None, repr=False)
    _check: Callable[[Mapping[str, Any]], dict[str, Any]] = field(repr=False)
    _run: Run = field(repr=False)

    @classmethod
    def from_schema(
        cls,
        name: str,
        description: str,
        parameters: JSONSchema,
        call: Run,
        *,
        origin: str = "",
        permission: Permission = "read",
        timeout: float = 30.0,
        rate: str | None = None,
        approval: Approval | None = None,
        idempotent: bool | None = None,
        cache: float = 0.0,
        max_chars: int = 8000,
    ) -> Tool:
        """A tool declared by a JSON schema. `call` is given the arguments once they fit it.

        Raises:
            ToolDeclarationError: the name, the schema or a policy is not accepted.
        """
        where = f"Tool {name!r}" + (f" (of {origin})" if origin else "")
        policy = options(where, permission, timeout, rate, approval, idempotent, cache, max_chars)
        checked = checker(where, name, parameters)
        if not description.strip():
            raise ToolDeclarationError(f"{where} has no description; say what it does, for the model to know.")
        return cls(
            name=named(name, where),
            description=description,
            parameters=copy.deepcopy(parameters),
            origin=origin,
            _check=checked,
            _run=call,
            **policy,
        )

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function takes them, defaults filled in.

        Raises:
            BadArguments: they do not fit the schema; the message names each field that doesn't.
        """
        return self._check(arguments)

    async def call(self, ctx: Context, arguments: Mapping[str, Any]) -> Any:
        """Checks the arguments, as JSON has them, and runs the tool; returns its function's result.

        Raises:
            BadArguments: they do not fit the schema.
            Exception: as the function raises it.
        """
        return await self._run(ctx, self._check(arguments))

    @property
    def has_effects(self) -> bool:
        """Returns whether the order of its calls may matter, so that they run one after another."""
        return self.permission in ("write", "execute") or not self.idempotent

    @property
    def untrusted(self) -> bool:
        """Returns whether its results may contain text that somebody else wrote."""
        return self.permission != "none"

    @property
    def definition(self) -> str:
        """SHA-256 in hex of all that it says of itself, by which an approval knows whether it is still that tool."""
        fields_ = [self.origin, self.name, self.description, self.parameters, self.permission]
        return hashlib.sha256(json.dumps(fields_).encode()).hexdigest()

    def spec(self) -> dict[str, Any]:
        """The tool as OpenAI's `tools` list has it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def of(self, origin: str) -> Self:
        """The same tool, said to come from `origin`."""
        return self._with(origin=origin)

    def with_guided_parameters(self, parameters: GuidedParameters) -> Self:
        """Returns the same tool with its `guided_parameters`."""
        return self._with(guided_parameters=parameters)

    def _with(self, **changes: object) -> Self:
        changed = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(changed, name, value)
        return changed


class DeclaredTool(Tool, Generic[P, R]):
    """A tool made by `@tool`: called directly, it is the function."""

    __name__: str
    __wrapped__: Callable[P, R]
    _signature: Signature

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.owner is not None:
            return cast("Callable[..., R]", self.__wrapped__)(self.owner, *args, **kwargs)
        return self.__wrapped__(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: DeclaredTool[Concatenate[S, P], R], instance: S, owner: type | None = None
    ) -> DeclaredTool[P, R]: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> object:
        # Read from an instance, the tool is bound to it, as a method is.
        if instance is None:
            return self
        bound = self._with(owner=instance)
        return bound._with(_run=bound._invoke)

    async def _invoke(self, ctx: Context, arguments: dict[str, Any]) -> Any:
        function = cast("Callable[..., Any]", self.__wrapped__)
        signature = self._signature
        if signature.context is not None:
            arguments[signature.context] = ctx
        for name, kind in signature.injected.items():
            arguments[name] = ctx.get(kind)
        if self.owner is None:
            return await evaluated(ctx, lambda: function(**arguments), function)
        if not hasattr(self.owner, "in_use"):
            return await evaluated(ctx, lambda: function(self.owner, **arguments), function)
        async with cast("Toolset", self.owner).in_use():
            return await evaluated(ctx, lambda: function(self.owner, **arguments), function)


@overload
def tool(function: Callable[P, R], /) -> DeclaredTool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    permission: Permission = "read",
    timeout: float = 30.0,
    rate: str | None = None,
    approval: Approval | None = None,
    idempotent: bool | None = None,
    cache: float = 0.0,
    max_chars: int = 8000,
) -> Callable[[Callable[P, R]], DeclaredTool[P, R]]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    permission: Permission = "read",
    timeout: float = 30.0,
    rate: str | None = None,
    approval: Approval | None = None,
    idempotent: bool | None = None,
    cache: float = 0.0,
    max_chars: int = 8000,
) -> Any:  # one of the overloads above
    """Makes a function a tool: bare, or with its permission and policies.

    The function may be plain (it runs in a thread), async, or a generator of either kind whose strings are shown as
    they come and together are the result. `approval` is "always" for write and execute unless said otherwise, else
    "never"; `idempotent` is true for none and read unless said otherwise. `timeout` and `cache` are seconds.

    Raises:
        ToolDeclarationError: the function or an option can't be used; the message names the remedy.
    """
    frame = caller(1)

    def declare(function: Callable[..., Any]) -> DeclaredTool[..., Any]:
        if not inspect.isfunction(function):
            raise ToolDeclarationError(f"@tool stands above a function (def or async def), not {function!r}.")
        where = f"Tool {function.__qualname__} (in {function.__module__})"
        policy = options(where, permission, timeout, rate, approval, idempotent, cache, max_chars)
        signature = Signature(function, method=_is_method(function), frame=frame)
        # The class of a method is not known yet; where `self` has been left out, its first argument would be lost.
        made = DeclaredTool[..., Any](
            name=named(function.__name__ if name is None else name, where),
            description=signature.description,
            parameters=signature.parameters,
            origin=function.__module__,
            _check=signature.checked,
            _run=_unbound,
            **policy,
        )
        for key in ("__module__", "__name__", "__qualname__", "__doc__"):
            object.__setattr__(made, key, getattr(function, key))
        made = made._with(__wrapped__=function, _signature=signature)
        return made if _is_method(function) else made._with(_run=made._invoke)

    return declare if function is None else declare(function)


async def _unbound(ctx: Context, arguments: dict[str, Any]) -> Any:
    raise ToolError(f"{ctx.tool or 'The tool'} is a method; call it on an instance of its Toolset.")


def _is_method(function: Callable[..., Any]) -> bool:
    """Returns whether it stands in a class body: its qualified name has a class before it."""
    first = next(iter(inspect.signature(function).parameters), "")
    return "." in function.__qualname__.split("<locals>.")[-1] and first == "self"
