"""Constraints by outlines-core: a finite automaton over tokens, for what is regular, small and known ahead of requests.

The whole table is made when the constraint is compiled, in a process beside this one that is killed when it takes too
long or too much memory, and is kept on disk. A gate lets in only what the automaton holds exactly: expressions,
choices, and small closed schemas, which `closed_schema` writes as expressions itself, because outlines-core's own
reading of schemas skips keywords in silence. No text that it makes holds the character NUL.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from engine.constrain import closed_schema, spec
from engine.constrain.matcher import CompileTimeout, ConstraintRefused
from engine.constrain.regular import regular
from engine.constrain.spec import Constraint
from engine.constrain.table import Table
from engine.constrain.vocabulary import Vocabulary

LONGEST_PATTERN = 8_000
LONGEST_SCHEMA = 8_000
MOST_TABLE_BYTES = 64 << 20
FORMAT = 1  # of the tables on disk; what was written as another is made again


class FiniteStates:
    """The backend, for constraints that another one took: it does not look at each expression by itself.

    One constraint at a time; its process starts with the first, and ends when told to `rest`. Tables are kept in
    `cache_dir`, at most `cache_bytes` of them, the longest unused going first; in None, nowhere.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        cache_dir: Path | None = None,
        cache_bytes: int = 1 << 30,
        deadline_s: float = 60.0,
        memory_bytes: int = 4 << 30,
    ) -> None:
        self._vocabulary = vocabulary
        self._cache_dir = cache_dir
        self._cache_bytes = cache_bytes
        self._deadline_s = deadline_s
        self._memory_bytes = memory_bytes
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        vocabulary.warm()

    def check(self, constraint: Constraint) -> ConstraintRefused | None:
        try:
            self._pattern(constraint)
        except ConstraintRefused as refused:
            return refused
        return None

    def stored(self, constraint: Constraint) -> Table | None:
        if self._cache_dir is None:
            return None
        try:
            pattern = self._pattern(constraint)
        except ConstraintRefused:
            return None
        return self._load(self._file(pattern))

    def compile(self, constraint: Constraint) -> Table:
        pattern = self._pattern(constraint)
        with self._turn:
            answer = self._ask(pattern)
        if isinstance(answer, str):
            raise ConstraintRefused([f"outlines-core: {answer}"])
        table = Table(**answer, vocabulary=self._vocabulary)
        if table.size > MOST_TABLE_BYTES:
            raise ConstraintRefused([f"its table takes {table.size} bytes; at most {MOST_TABLE_BYTES} are kept"])
        if self._cache_dir is not None:
            self._store(self._file(pattern), answer)
        return table

    def rest(self) -> None:
        """Let the process go, if one runs and is idle; the next constraint starts another."""
        with self._turn:
            self._kill()

    def close(self) -> None:
        """Kill the process, whatever it does; nothing is compiled after that."""
        self._closed = True
        self._kill()

    # -- the process

    def _ask(self, pattern: str) -> Any:
        """Any: arrays by name, or a message."""
        process = self._process or self._started()
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            process.kill()

        watch = threading.Timer(self._deadline_s, kill)
        watch.daemon = True
        watch.start()
        try:
            return _exchange(process, pattern)
        except (OSError, EOFError, pickle.UnpicklingError):
            self._kill()
            if killed.is_set():
                raise CompileTimeout(f"its automaton takes longer than {self._deadline_s:g} s") from None
            if self._closed:
                raise ConstraintRefused(["the engine is stopping"]) from None
            limit = self._memory_bytes >> 20
            raise ConstraintRefused([f"its automaton takes more than {limit} MiB of memory"]) from None
        finally:
            watch.cancel()

    def _started(self) -> subprocess.Popen[bytes]:
        """A new process that knows the vocabulary. What that takes, about a second, is held against no constraint."""
        if self._closed:
            raise ConstraintRefused(["the engine is stopping"])
        script = Path(__file__).with_name("fsm_process.py")
        process = subprocess.Popen(
            [sys.executable, "-P", str(script)],  # -P: our modules beside the script are not its library
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process = process
        vocabulary = self._vocabulary
        try:
            _exchange(process, (vocabulary.ids, vocabulary.eos[0], vocabulary.size, self._memory_bytes))
        except (OSError, EOFError, pickle.UnpicklingError):
            self._kill()
            raise ConstraintRefused(["the process that makes automata could not start"]) from None
        return process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    _close(pipe)

    # -- the gate

    def _pattern(self, constraint: Constraint) -> str:
        """The constraint as one expression. Raises `ConstraintRefused`."""
        if not self._vocabulary.eos:
            raise ConstraintRefused(["the model has no end-of-sequence token, so no text could be complete"])
        try:
            pattern = regular(_with_patterns(constraint))
        except closed_schema.NotClosed as error:
            raise ConstraintRefused([f"not a small closed schema: {error}"]) from None
        if pattern is None:
            raise ConstraintRefused(["not made of expressions, choices and closed schemas alone"])
        if len(pattern) > LONGEST_PATTERN:
            raise ConstraintRefused([f"its expression has {len(pattern)} characters; at most {LONGEST_PATTERN}"])
        return pattern

    # -- the disk

    def _file(self, pattern: str) -> Path:
        assert self._cache_dir is not None
        named = f"{FORMAT}\n{self._vocabulary.digest}\n{pattern}"
        return self._cache_dir / f"{hashlib.sha256(named.encode()).hexdigest()}.npz"

    def _load(self, file: Path) -> Table | None:
        """The table in a file; None where there is none, or a damaged one, which is removed."""
        try:
            with np.load(file, allow_pickle=False) as arrays:
                table = Table(**{name: arrays[name] for name in arrays.files}, vocabulary=self._vocabulary)
            os.utime(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
            return None
        return table

    def _store(self, file: Path, arrays: dict[str, Any]) -> None:
        """Keep a table, if the disk lets us; a cache that cannot be written costs time, nothing else."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
                np.savez(part, **arrays)
            os.replace(part.name, file)
            self._make_room(file)
        except OSError:
            return

    def _make_room(self, newest: Path) -> None:
        files = [(each.stat(), each) for each in newest.parent.glob("*.npz")]
        total = sum(stat.st_size for stat, _ in files)
        for stat, each in sorted(files, key=lambda pair: pair[0].st_mtime_ns):
            if total <= self._cache_bytes:
                return
            if each != newest:
                each.unlink(missing_ok=True)
                total -= stat.st_size


def _exchange(process: subprocess.Popen[bytes], message: object) -> Any:
    """Any: what the process answers."""
    assert process.stdin is not None and process.stdout is not None
    pickle.dump(message, process.stdin)
    process.stdin.flush()
    return pickle.load(process.stdout)


def _close(pipe: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # what it still holds for a process that is gone
        pipe.close()


def _with_patterns(constraint: Constraint) -> Constraint:
    """The constraint with every schema in it written as an expression. Raises `NotClosed`."""
    match constraint:
        case spec.JsonSchema(source, compact):
            if len(source) > LONGEST_SCHEMA:  # looking for its table would hold up the engine for nothing
                raise closed_schema.NotClosed(f"more than {LONGEST_SCHEMA} characters")
            return spec.Regex(closed_schema.pattern(source, compact=compact))
        case spec.Sequence(parts):
            return spec.Sequence(tuple(map(_with_patterns, parts)))
        case spec.OneOf(parts):
            return spec.OneOf(tuple(map(_with_patterns, parts)))
        case spec.Optional(part):
            return spec.Optional(_with_patterns(part))
        case spec.Repeat(part, separator):
            return spec.Repeat(_with_patterns(part), separator)
    return constraint
