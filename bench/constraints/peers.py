"""Ponder's backend, llguidance alone, xgrammar and outlines' integration of outlines-core, asked in turn.

Each has a process of its own, which answers for one schema at a time: how long it compiles, how long each mask takes,
which texts it takes. One that does not answer in time is killed and started again: outlines-core can compile for
minutes. Peers need not be installed (docs/performance.md says how to); they run with their own defaults.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, Self

import numpy as np

from engine.structured_output.matcher import words
from engine.structured_output.vocabulary import Vocabulary


class SchemaText(Protocol):
    """One constrained text, and the row of bits that belongs to it."""

    def fill(self) -> None: ...

    def accept(self, token: int) -> bool: ...

    def can_end(self) -> bool: ...


Start = Callable[[], SchemaText]
Compile = Callable[[str], Start]  # raises any exception for a schema that it refuses


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """The outcome of one schema: `refused` says why, else the seconds and which of the texts are valid to it."""

    refused: str | None = None
    timed_out: bool = False
    compile_s: float = 0.0
    mask_s: tuple[float, ...] = ()
    taken: tuple[bool, ...] = field(default=())


class Contestant:
    """A process that compiles with `name`'s library for one vocabulary. Started when first asked."""

    def __init__(self, name: str, vocabulary: Vocabulary, deadline_s: float = 30.0) -> None:
        self.name = name
        self._vocabulary = vocabulary
        self._deadline_s = deadline_s
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; asking again starts another."""
        self._kill()

    def ask(self, schema: str, texts: Sequence[Sequence[int]]) -> PeerAnswer:
        """Compile a schema and write each of the texts (token ids) with a mask before every token."""
        pipe = self._pipe or self._start()
        try:
            pipe.send((schema, [list(text) for text in texts]))
            if self._deadline_s > 0 and pipe.poll(self._deadline_s):
                answer: PeerAnswer = pipe.recv()
                return answer
        except (EOFError, OSError):
            self._kill()
            return PeerAnswer(refused="its process died")
        self._kill()
        return PeerAnswer(refused=f"longer than {self._deadline_s:g} s", timed_out=True)

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")  # a forked one would inherit torch's threads
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self.name, self._vocabulary, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe = ours
        try:
            ready = ours.poll(300) and ours.recv()
        except EOFError:
            ready = None
        if not ready:
            self._process.join(1)
            raise RuntimeError(f"the process of {self.name} did not start (exit code {self._process.exitcode})")
        return ours

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


def _serve(name: str, vocabulary: Vocabulary, pipe: Connection) -> None:
    compile = CONTESTANTS[name].make(vocabulary)
    _answer(compile, '{"type":"object","properties":{"a":{"type":"integer"}}}', [])  # first calls are not measured
    pipe.send("ready")
    while True:
        try:
            schema, texts = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(compile, schema, texts))


def _answer(compile: Compile, schema: str, texts: list[list[int]]) -> PeerAnswer:
    clock = time.perf_counter
    began = clock()
    try:
        start = compile(schema)
        compile_s = clock() - began
        masks: list[float] = []
        taken = []
        for ids in texts:
            text = start()
            for token in ids:
                began = clock()
                text.fill()
                masks.append(clock() - began)
                if not text.accept(token):
                    taken.append(False)
                    break
            else:
                taken.append(text.can_end())
    except Exception as error:  # each library has its own
        return PeerAnswer(refused=f"{type(error).__name__}: {str(error)[:200]}")
    return PeerAnswer(compile_s=compile_s, mask_s=tuple(masks), taken=tuple(taken))


# -- the libraries


class _OurText:
    def __init__(self, matcher: Any, size: int) -> None:
        """Any: the backend's own class is imported by its process alone."""
        self._matcher = matcher
        self._row = np.zeros(words(size), dtype=np.int32)

    def fill(self) -> None:
        self._matcher.fill(self._row)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept(token))

    def can_end(self) -> bool:
        return bool(self._matcher.can_end())


def _ponder(vocabulary: Vocabulary) -> Compile:
    from engine.structured_output.llguidance_backend import Guidance
    from engine.structured_output.spec import JsonSchema

    backend = Guidance(vocabulary)

    def compile(schema: str) -> Start:
        made = backend.compile(JsonSchema(schema))
        return lambda: _OurText(made.matcher(), vocabulary.size)

    return compile


def _llguidance(vocabulary: Vocabulary) -> Compile:
    """The library with its own reading of schemas: nothing of ours is before it."""
    from llguidance import LLMatcher

    from engine.structured_output.llguidance_backend import Guidance, GuidanceMatcher

    tokenizer = Guidance(vocabulary).tokenizer
    eos = frozenset(vocabulary.eos)

    def compile(schema: str) -> Start:
        made = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if made.is_error():
            raise ValueError(made.get_error())
        return lambda: _OurText(GuidanceMatcher(made.deep_copy(), vocabulary, eos, forces=False), vocabulary.size)

    return compile


class _XGrammarText:
    def __init__(self, matcher: Any, row: Any, eos: int) -> None:
        """Any: the library may not be there."""
        self._matcher = matcher
        self._row = row
        self._eos = eos

    def fill(self) -> None:
        self._matcher.fill_next_token_bitmask(self._row)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def can_end(self) -> bool:
        return bool(self._matcher.accept_token(self._eos))


def _xgrammar(vocabulary: Vocabulary) -> Compile:
    """`strict_mode` off: on, it forbids properties that the schema allows."""
    import xgrammar

    info = xgrammar.TokenizerInfo(
        list(vocabulary.tokens),
        xgrammar.VocabType.RAW,
        vocab_size=vocabulary.size,
        stop_token_ids=list(vocabulary.eos),
    )
    compiler = xgrammar.GrammarCompiler(info)

    def compile(schema: str) -> Start:
        made = compiler.compile_json_schema(schema, strict_mode=False)
        row = xgrammar.allocate_token_bitmask(1, vocabulary.size)
        return lambda: _XGrammarText(xgrammar.GrammarMatcher(made), row, vocabulary.eos[0])

    return compile


class _OutlinesText:
    def __init__(self, guide: Any, row: Any, fill: Callable[[Any, Any], None]) -> None:
        """Any: the library may not be there."""
        self._guide = guide
        self._row = row
        self._fill = fill

    def fill(self) -> None:
        self._fill(self._guide, self._row)

    def accept(self, token: int) -> bool:
        if not self._guide.accepts_tokens([token]):
            return False
        self._guide.advance(token, return_tokens=False)
        return True

    def can_end(self) -> bool:
        return bool(self._guide.is_finished())


def _outlines(vocabulary: Vocabulary) -> Compile:
    """Outlines' own steps from a schema to a logits processor. It wants tokens as text: others than UTF-8 are lost."""
    from outlines.backends.outlines_core import OutlinesCoreBackend
    from outlines_core import Guide
    from outlines_core.kernels.torch import allocate_token_bitmask, fill_next_token_bitmask

    eos = vocabulary.eos[0]
    texts = {str(id): token.decode(errors="replace") for id, token in enumerate(vocabulary.tokens) if token}
    backend = object.__new__(OutlinesCoreBackend)  # its constructor wants a model; these three are all that it sets
    backend.eos_token_id = eos
    backend.vocabulary = OutlinesCoreBackend.create_outlines_core_vocabulary(
        {**{name: int(name) for name in texts}, "<end>": eos}, eos, "<end>", lambda name: texts.get(name, name)
    )
    backend.tensor_library_name = "torch"

    def compile(schema: str) -> Start:
        index = backend.get_json_schema_logits_processor(schema).index
        row = allocate_token_bitmask(vocabulary.size)
        return lambda: _OutlinesText(Guide(index), row, fill_next_token_bitmask)

    return compile


@dataclass(frozen=True, slots=True)
class PeerLibrary:
    package: str
    make: Callable[[Vocabulary], Compile]

    @property
    def version(self) -> str | None:
        """None where it is not installed."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


CONTESTANTS = {
    "Ponder": PeerLibrary("llguidance", _ponder),
    "llguidance": PeerLibrary("llguidance", _llguidance),
    "xgrammar": PeerLibrary("xgrammar", _xgrammar),
    "outlines": PeerLibrary("outlines", _outlines),
}
