"""The models that one server serves, by name. The first is the default.

Each has an engine of its own, in this process. Beside them stand remote models, which other servers serve. Knows
nothing of requests, nor of how an answer is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType, TracebackType
from typing import Self

from app.admission.request_budget import enter
from app.answering.answer_plan import AnswerPlan
from app.answering.model_cascade import ModelCascade, Plan, allowed_models, gate_of
from app.answering.remote_model import RemoteModel, RemotePlan
from app.answering.request_images import RequestImages
from app.answering.served_model import ServedModel
from app.auth import may_ask
from app.config import AUTO_NAME, DEFAULT_NAME, BadSetting, Settings
from app.errors import ApiError
from engine import Engine, EngineConfig
from engine.config import Fallback
from engine.errors import EngineError

NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})


class ModelRegistry:
    """At least one model. Each is found by its name and its path, and the first also as `default`.

    `auto` chooses among several, or a model and a remote one; there is none where one model alone is served.
    """

    def __init__(
        self,
        served: Sequence[ServedModel],
        auto: ModelCascade | None = None,
        remotes: Sequence[RemoteModel] = (),
        *,
        web: bool = False,
        adapters: Mapping[str, str] = NO_ADAPTERS,
    ) -> None:
        """`web`: whether images may be fetched from public addresses. `adapters` are those of the first model's engine:
        their names, and their directories or hub names.

        Raises:
            BadSetting: two have one name.
        """
        self._auto = auto
        self._remotes = {each.name: each for each in remotes}
        self._served = tuple(served)
        self._by_name: dict[str, ServedModel] = {}
        seeing = [each.name for each in served if each.sees]
        seeing += [each.name for each in remotes if each.settings.sees]
        images = RequestImages(seeing, web=web)
        for remote in remotes:
            remote.images = images
        for each in self._served:
            if each.name in self._by_name:
                raise BadSetting(f"Two models are called {each.name!r}; accepted: a name for each of its own.")
            self._by_name[each.name] = each
            each.images = images
        for each in self._served:  # the first one's names have `default` too
            for name in each.names:
                self._by_name.setdefault(name, each)
        self._adapters: dict[str, ServedModel] = {}
        for name, root in adapters.items():
            self._check_free(name)
            self._adapters[name] = self.default.with_adapter(name, root)

    @classmethod
    def of(cls, engines: Mapping[str, Engine], settings: Settings) -> ModelRegistry:
        """Engines that run already, by the names of `settings`: the first model's, and its further `models`.

        Raises:
            CheckpointError: a file beside a model's weights cannot be read.
            BadSetting: two have one name, or a remote's key is not there.
        """
        remotes = [RemoteModel(each) for each in settings.remote]
        last = next((each for each in remotes if each.settings.auto), None)
        served = []
        for name, engine in engines.items():
            first = name == settings.model_name
            path = settings.model if first else settings.models[name]
            parser = settings.tool_call_parser if first else "auto"
            served.append(ServedModel(engine, path, name, parser, warm_next_turn=settings.warm_next_turn))
        if len(served) < 2 and last is None:
            return cls(served, None, remotes, web=settings.web, adapters=settings.lora)
        by_name = {each.name: each for each in served}
        steps = [by_name[name] for name in settings.router] or sorted(served, key=lambda each: each.parameters)
        auto = ModelCascade(steps, gate_of(settings.router_gate, settings.router_bar), last)
        return cls(served, auto, remotes, web=settings.web, adapters=settings.lora)

    @classmethod
    async def start(cls, settings: Settings, begin: Callable[[str], None] = lambda model: None) -> ModelRegistry:
        """Load them one after another; `begin` gets each one's path first.

        The engines share the device. The K/V memory that the settings give, or else find, is all of theirs together and
        divided by `engine.model.memory.divided`: each pool has the same number of tokens. All other limits are each
        one's own. CPU threads are those that each model would have alone, and the system shares the cores among them.

        Raises:
            BadSetting: the settings do not go together, or one of several models cannot be loaded; the message says
                which. No engine is left running.
            EngineError: the only one cannot be loaded, or the memory is not enough for all.
        """
        from engine.model.memory import (
            divided,
            needs_of,  # it imports torch, which a joining process does not need
        )

        settings.check_models()
        settings.check_remotes()
        paths = {settings.model_name: settings.model, **settings.models}
        configs = [settings.engine_config(path) for path in paths.values()]
        fallback = settings.engine_fallback()
        engines: dict[str, Engine] = {}
        try:
            if len(configs) > 1:
                needs = []
                for name, config in zip(paths, configs, strict=True):
                    with _named(name):
                        needs.append(await asyncio.to_thread(needs_of, config))
                configs = divided(configs, needs)
            for (name, path), config in zip(paths.items(), configs, strict=True):
                begin(path)
                with _named(name) if len(configs) > 1 else nullcontext():
                    engines[name] = await Engine.start(config, fallback=fallback)
            return cls.of(engines, settings)
        except BaseException:
            for engine in engines.values():
                await engine.stop()
            raise

    @classmethod
    async def join(
        cls, settings: Settings, client: int, places: Callable[[str], AsyncIterator[str | None]]
    ) -> ModelRegistry:
        """The same models in another process than the one that started them: see `Engine.join`. `places` gives the
        engine's directories by model name.

        Raises:
            EngineError, BadSetting: as `Engine.join` and `of` raise them.
        """
        paths = {settings.model_name: settings.model, **settings.models}
        engines = {
            name: await Engine.join(settings.engine_config(path), client, places(name)) for name, path in paths.items()
        }
        return cls.of(engines, settings)

    async def stop(self) -> None:
        """Stops every engine, and closes the connections to remote models. Idempotent."""
        await asyncio.gather(
            *(each.stop() for each in self._served), *(each.close() for each in self._remotes.values())
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served)

    def __len__(self) -> int:
        return len(self._served)

    @property
    def default(self) -> ServedModel:
        return self._served[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Names that clients may ask for, paths left out: each model's own name, `default`, and `auto` where it is."""
        auto = () if self.auto is None else (AUTO_NAME,)
        served = [each.name for each in self._served if may_ask(each.name)]
        default = (DEFAULT_NAME,) if may_ask(self.default.name) else ()
        return tuple(dict.fromkeys((*served, *default, *self.adapters, *self.remotes, *auto)))

    @property
    def auto(self) -> ModelCascade | None:
        """Returns the router; None where there is none, or the request may not ask it."""
        return self._auto if may_ask(AUTO_NAME) else None

    @auto.setter
    def auto(self, cascade: ModelCascade | None) -> None:
        self._auto = cascade

    @property
    def remotes(self) -> Mapping[str, RemoteModel]:
        """Returns the remote models that the request may ask, by name."""
        return {name: each for name, each in self._remotes.items() if may_ask(name)}

    @property
    def adapters(self) -> Mapping[str, ServedModel]:
        """Returns the first model with each of its adapters that the request may ask for, by name."""
        return {name: each for name, each in self._adapters.items() if may_ask(name)}

    async def load_adapter(self, name: str, root: str) -> None:
        """Loads an adapter of the first model from a directory or a hub name; it is served once it is loaded.

        Raises:
            BadSetting: the name is taken.
            InvalidParameter: it cannot be loaded, see `Engine.load_adapter`.
        """
        self._check_free(name)
        # to its end, should its asker go: the engine would have one that no name leads to
        await asyncio.shield(asyncio.create_task(self._load_adapter(name, root), name=f"adapter {name}"))

    async def unload_adapter(self, name: str) -> None:
        """Serves an adapter no more; answers that use it are finished.

        Raises:
            ApiError: 404 `model_not_found`: there is none of that name.
        """
        if (served := self._adapters.pop(name, None)) is None:
            there = _listed(tuple(self._adapters) or ("none",))
            message = f"The LoRA adapter {name!r:.200} is not loaded; accepted: {there}."
            raise ApiError(404, message, param="lora_name", code="model_not_found")
        if served.next_turns is not None:
            served.next_turns.close()
        await served.engine.unload_adapter(name)

    async def _load_adapter(self, name: str, root: str) -> None:
        await self.default.engine.load_adapter(name, root)
        self._adapters[name] = self.default.with_adapter(name, root)

    def _check_free(self, name: str) -> None:
        if (
            name in self._by_name
            or name in self._remotes
            or name in (AUTO_NAME, DEFAULT_NAME)
            or name in self._adapters
        ):
            raise BadSetting(f"The adapter is called {name!r}, which is another model's name; accepted: another name.")

    async def plans(
        self,
        name: str,
        make: Callable[[ServedModel], Awaitable[AnswerPlan]],
        make_remote: Callable[[RemoteModel], Awaitable[RemotePlan]],
    ) -> tuple[Sequence[Plan], ModelCascade | None]:
        """Plans a request, which asks for the model of this name, with `make` or `make_remote`: for that model; for
        `auto`, for each model that it may ask now, and returns the cascade with them.

        Raises:
            ApiError: 404 `model_not_found`, or that several models cannot answer it.
            Exception: as `make` raises it.
        """
        if (remote := self.remotes.get(name)) is not None:
            return [await make_remote(remote)], None
        auto = self.auto
        if name != AUTO_NAME or auto is None:
            served = self.get(name)
            enter(served)
            return [await make(served)], None
        enter(*auto.steps)
        plans = await auto.plans(make)
        for plan in plans:
            plan.check_routed()
        return await auto.with_remote(allowed_models(plans), make_remote)

    def own(self, name: str) -> ServedModel | None:
        """Returns an engine's model, whether or not the request may ask for it; None where there is none."""
        return self._by_name.get(name) or self._adapters.get(name)

    def get(self, name: str) -> ServedModel:
        """
        Raises:
            ApiError: 404 `model_not_found`. So is `auto`, which is no model: a caller that supports it checks for
                `auto` before. 400 `remote_model`: it is on another server, and this needs an engine.
        """
        found = self.own(name)
        if found is not None and may_ask(found.name):
            return found
        local = [each for each in self.names if each != AUTO_NAME and each not in self.remotes]
        if name in self.remotes:
            message = f"The model {name!r} is on another server, and this needs an engine; accepted: {_listed(local)}."
            raise ApiError(400, message, param="model", code="remote_model")
        if name == AUTO_NAME and self.auto is not None:
            named = _listed(local)
            message = f"The model 'auto' chooses among models, and one must be named here; accepted: {named}."
        else:
            accepted = _listed(self.names or ("none",))
            message = f"The model {name!r:.200} is not served here; accepted: {accepted}."
        raise ApiError(404, message, param="model", code="model_not_found")


def fallback_memory(config: EngineConfig, fallback: Fallback) -> str:
    """Says how much memory an engine's fallback weights take, before any are loaded. Raises as `needs_of`."""
    from engine.model.memory import needs_of

    first, other = needs_of(config).weights, needs_of(fallback.config).weights
    return (
        f"The fallback weights in {fallback.config.model} take about {other / 1e6:,.0f} MB of memory beside the first "
        f"ones' {first / 1e6:,.0f} MB, and half of the KV cache."
    )


@contextmanager
def _named(model: str) -> Iterator[None]:
    """Of several models, says which one cannot be loaded."""
    try:
        yield
    except EngineError as error:
        raise BadSetting(f"The model {model!r} cannot be loaded: {error}") from error


def _listed(names: Sequence[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last
