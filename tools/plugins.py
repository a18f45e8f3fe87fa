"""A folder of plugins that may change while the server runs: every `*.py` file, and every package, is one.

A changed plugin is imported afresh, under a module name that was never used, and its tools take the old ones' places at
once; a call that runs keeps the code it began with. A plugin that can't be imported is a fault, and its old tools stay.
Knows nothing of the plugins' work.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import linecache
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tools.calling import in_thread
from tools.registry import Registry, leave, tools_in

log = logging.getLogger("ponder")

IMPORT_S = 20.0
POLL_S = 0.3  # between two looks; a look at a hundred files takes about a millisecond
_PREFIX = "_ponder_plugin_"
_numbers = itertools.count(1)

Stamp = tuple[tuple[str, int, int, int], ...]  # of every file: path, modified (ns), bytes, inode


class PluginFolder:
    """The plugins of one folder. Names like `_…`, `.…` or `test_…` are skipped."""

    def __init__(self, path: Path, registry: Registry) -> None:
        """`path` need not exist yet."""
        self.path = path
        self._registry = registry
        self._seen = dict[Path, Stamp]()
        self._modules = dict[Path, str]()
        self._scanning = asyncio.Lock()

    async def scan(self) -> list[str]:
        """Loads new and changed plugins, drops deleted ones, and returns the origins it touched."""
        async with self._scanning:
            return await self._scan()

    async def watch(self, changed: Callable[[list[str]], None] = lambda _: None) -> None:
        """Scans until it is cancelled; `changed` gets the origins that were touched."""
        while True:
            try:
                if touched := await self.scan():
                    changed(touched)
            except Exception:
                log.exception("The plugins in %s could not be looked at", self.path)
            await asyncio.sleep(POLL_S)

    async def _scan(self) -> list[str]:
        now = await asyncio.to_thread(self._stamps)
        touched = list[str]()
        for path in [path for path in self._seen if path not in now]:
            origin = self._origin(path)
            gone = self._registry.remove(origin)
            _forget(self._modules.pop(path, None))
            del self._seen[path]
            touched.append(origin)
            await self._leave(origin, gone)
        for path, stamp in now.items():
            if self._seen.get(path) != stamp:
                self._seen[path] = stamp
                touched.append(self._origin(path))
                await self._load(path)
        return touched

    async def _load(self, path: Path) -> None:
        origin = self._origin(path)
        name = f"{_PREFIX}{next(_numbers)}_{path.stem}"
        try:
            # In a thread: an import may take long, and calls go on meanwhile.
            async with asyncio.timeout(IMPORT_S):
                module = await in_thread(lambda: _imported(path, name))
            tools = tools_in([module], origin)
        except TimeoutError:
            self._fail(origin, name, f"its import took longer than {IMPORT_S:g} s; do slow things in Toolset.open.")
            return
        except Exception as error:  # a plugin's import may do anything
            self._fail(origin, name, _described(error, path))
            return
        old = self._registry.replace(origin, tools)
        _forget(self._modules.get(path))
        self._modules[path] = name
        await self._leave(origin, old)

    def _fail(self, origin: str, name: str, message: str) -> None:
        _forget(name)
        self._registry.fail(origin, message)
        log.warning("The %s could not be loaded: %s", origin, message)

    async def _leave(self, origin: str, old: Sequence[Any]) -> None:
        try:
            await leave(old)
        except Exception:
            log.exception("An old toolset of %s could not be closed", origin)

    def _origin(self, path: Path) -> str:
        return f"plugin {path.name}"

    def _stamps(self) -> dict[Path, Stamp]:
        found = dict[Path, Stamp]()
        with suppress(FileNotFoundError):
            for path in sorted(self.path.iterdir()):
                if path.name.startswith(("_", ".", "test_")):
                    continue
                files = [path] if path.suffix == ".py" else list(_sources(path))
                with suppress(FileNotFoundError):  # deleted as we look: the next look sees it
                    if files:
                        found[path] = tuple(_stamp(each) for each in files)
        return found


def _sources(path: Path) -> Iterator[Path]:
    """A package's source files; nothing where it is no package."""
    if (path / "__init__.py").is_file():
        for folder, _, names in os.walk(path):
            yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _stamp(path: Path) -> tuple[str, int, int, int]:
    status = path.stat()
    return str(path), status.st_mtime_ns, status.st_size, status.st_ino


def _imported(path: Path, name: str) -> ModuleType:
    package = path.is_dir()
    source = path / "__init__.py" if package else path
    linecache.checkcache(str(source))
    spec = importlib.util.spec_from_file_location(
        name, source, loader=_Source(name, str(source)), submodule_search_locations=[str(path)] if package else None
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # annotations are looked up there, and relative imports
    spec.loader.exec_module(module)
    return module


class _Source(SourceFileLoader):
    """Compiles the file's current source: bytecode caches go by whole seconds, and edits come faster."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _Submodules(MetaPathFinder):
    """Finds the modules within a package of ours, so that they too are compiled anew."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PREFIX) or path is None:
            return None
        PathFinder.invalidate_caches()  # a directory listing of a second ago may lack a new file
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Source(fullname, spec.loader.path)
            spec.cached = None
        return spec


sys.meta_path.insert(0, _Submodules())


def _forget(name: str | None) -> None:
    """Takes a plugin's modules out of sys.modules; running calls keep their references."""
    if name is not None:
        for each in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
            del sys.modules[each]


def _described(error: BaseException, path: Path) -> str:
    """The error with the line of the plugin it comes from, and no trace."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError in line {error.lineno}: {error.msg}"
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(str(path)):
            line = trace.tb_lineno
        trace = trace.tb_next
    where = "" if line is None else f" (line {line})"
    return f"{type(error).__name__}: {error}{where}"
