"""Constraints that would end the engine's process, block it or never come back, and those that are tried at no cost."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from queue import Queue
from typing import Any

import pytest

from engine.structured_output import llguidance_backend, spec
from engine.structured_output.compiler import Compiler, default_compiler
from engine.structured_output.llguidance_backend import Guidance, GuidanceCompiled, lark
from engine.structured_output.matcher import CompileTimeout, ConstraintRefused
from engine.structured_output.sandboxed_compile import SandboxedCompile
from engine.structured_output.schema_gate import plainly_harmless
from engine.structured_output.spec import Constraint
from tests.engine.structured_output import bfcl, sources
from tests.engine.structured_output.sources import SIZES, accepts, small, vocabulary
from tests.engine.structured_output.test_guidance import BOMBS

PATIENCE = 60.0  # seconds until a test that hangs fails
CRASHES = (
    "rules in a row", "rules that are others", "terminals in a row", "nested rules in a row", "least integer",
    "least integers",
)  # fmt: skip
SLOW = spec.Grammar("start: " + " ".join(f'"a{i}"' for i in range(60_000)))
LARGE = spec.Regex("|".join(f"a{i}" for i in range(100_000)))
TRIED = spec.Grammar('start: "a" start "b" | "c"')


@pytest.fixture(scope="module")
def probe() -> Iterator[SandboxedCompile]:
    made = SandboxedCompile(vocabulary("small"), deadline_s=PATIENCE)
    yield made
    made.close()


def refusal(probe: SandboxedCompile, constraint: Constraint) -> ConstraintRefused:
    with pytest.raises(ConstraintRefused) as refused:
        probe.lark(constraint)
    return refused.value


def test_what_would_take_the_engine_too_long_to_compile_is_refused() -> None:
    probe = SandboxedCompile(vocabulary("small"), deadline_s=PATIENCE, load_s=0.0)
    assert "of processor time; at most 0 s" in str(refusal(probe, TRIED))
    probe.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_what_was_tried_is_compiled_behind_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Guidance(vocabulary("small"))
    nice = dict[str, int]()
    load = compiler.load

    def noted(source: str, *, forces: bool = False) -> GuidanceCompiled:
        nice["there"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return load(source, forces=forces)

    monkeypatch.setattr(compiler, "load", noted)
    compiler.compile(TRIED)
    compiler.close()
    assert nice["there"] > os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


# -- a fatal constraint ends only the process that tries it


@pytest.mark.parametrize("name", CRASHES)
def test_a_grammar_that_overflows_the_stack_is_refused_by_name_and_the_next_one_is_taken(
    probe: SandboxedCompile, name: str
) -> None:
    assert "too deeply nested" in str(refusal(probe, BOMBS[name]))
    assert "inner" in probe.lark(TRIED)
    assert probe.started == 1


def test_past_its_deadline_a_compile_is_stopped() -> None:
    probe = SandboxedCompile(vocabulary("small"), deadline_s=0.1)
    refused = refusal(probe, SLOW)
    assert isinstance(refused, CompileTimeout) and "longer than 0.1 s" in str(refused)
    assert probe.started == 1
    probe.close()


def test_memory_is_bounded() -> None:
    probe = SandboxedCompile(vocabulary("small"), deadline_s=PATIENCE, memory_bytes=230 << 20)
    assert "230 MiB of memory" in str(refusal(probe, LARGE))
    assert "inner" in probe.lark(TRIED)
    probe.close()


def test_slow_masks_are_refused() -> None:
    probe = SandboxedCompile(vocabulary("small"), mask_s=0.0)
    assert "its masks take" in str(refusal(probe, TRIED))
    probe.close()


def test_what_soon_meets_a_limit_is_refused(probe: SandboxedCompile) -> None:
    many_words = {"type": "string", "maxLength": 4_000, "pattern": r"^(?:\S+\s+){0,399}\S+$"}
    assert "too many" in str(refusal(probe, spec.JsonSchema.of(many_words)))


def test_what_cannot_be_held_is_refused_with_the_same_reasons(probe: SandboxedCompile) -> None:
    for constraint in (spec.Grammar("start: other"), spec.JsonSchema.of({"not": {}}), spec.Regex("a)(b")):
        with pytest.raises(ConstraintRefused) as here:
            sources.guidance("small").load(lark(constraint))
        assert refusal(probe, constraint).reasons == here.value.reasons


def test_constraints_are_tried_side_by_side() -> None:
    probe = SandboxedCompile(vocabulary("small"), deadline_s=PATIENCE)
    probe.start()
    outcome: Queue[str] = Queue()

    def slow() -> None:
        outcome.put(type(refusal(probe, SLOW)).__name__)

    waiting = threading.Thread(target=slow)
    waiting.start()
    assert "inner" in probe.lark(TRIED)
    assert outcome.empty()
    probe.close()  # also ends running trials
    assert outcome.get(timeout=PATIENCE) == "ConstraintRefused"
    assert "stopping" in str(refusal(probe, TRIED))


def test_a_process_that_was_killed_is_started_again(probe: SandboxedCompile) -> None:
    probe.start()
    before = probe.started
    process = probe._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert "inner" in probe.lark(TRIED)
    assert probe.started == before + 1


def test_what_was_tried_is_compiled_here_and_means_the_same() -> None:
    backend = Guidance(vocabulary("small"))
    matcher = backend.compile(TRIED).matcher()
    assert accepts(matcher, vocabulary("small").encode("aacbb")) and backend.probe.started == 1
    backend.close()


# -- the whole compiler, with constraints known to do harm


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    made = default_compiler(small(), SIZES["small"])
    asked(made, TRIED)
    yield made
    made.close()


def asked(compiler: Compiler, constraint: Constraint) -> Any:
    answers: Queue[Any] = Queue()
    known = compiler.get(constraint, answers.put)
    return answers.get(timeout=PATIENCE) if known is None else known


HARMFUL = {**BOMBS, "slow": SLOW, "large": LARGE}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_bomb_is_written_and_compiled_elsewhere_and_others_go_on(
    compiler: Compiler, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is plain, and so soon done, is written here; of all else at most what came back is compiled."""
    written: list[Constraint] = []

    def write(constraint: Constraint) -> str:
        written.append(constraint)
        return lark(constraint)

    monkeypatch.setattr(llguidance_backend, "lark", write)
    outcome = asked(compiler, HARMFUL[name])
    assert bool(written) == plainly_harmless(HARMFUL[name])
    if isinstance(outcome, ConstraintRefused):
        assert outcome.reasons[0]
    assert not (written and isinstance(outcome, CompileTimeout))
    assert not isinstance(asked(compiler, spec.Literal(name)), ConstraintRefused)


def test_past_its_deadline_the_compiler_says_so_and_goes_on() -> None:
    compiler = default_compiler(small(), SIZES["small"], deadline_s=0.2)
    assert isinstance(asked(compiler, SLOW), CompileTimeout)
    assert not isinstance(asked(compiler, spec.Literal("a")), ConstraintRefused)
    compiler.close()


# -- ordinary constraints are not tried first


@lru_cache(maxsize=1)
def tool_sets() -> list[Constraint]:
    tools = list({tool["name"]: tool for tools in bfcl.tool_sets() for tool in tools}.values())
    bodies = [
        spec.sequence(f'{{"name": "{tool["name"]}", "arguments": ', spec.JsonSchema.of(tool["parameters"]), "}")
        for tool in tools
    ]
    return [spec.OneOf(tuple(bodies[at : at + 64])) for at in range(0, len(bodies), 64)]


def test_64_tools_are_plain() -> None:
    assert all(map(plainly_harmless, tool_sets()))


ORDINARY: list[Constraint] = [
    spec.JSON_OBJECT,
    spec.choice(["yes", "no"]),
    spec.Regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    spec.Regex(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    spec.Regex(r"(GET|POST) /[a-z/]+( HTTP/1\.[01])?"),
    spec.JsonSchema.of(
        {
            "$defs": {"step": {"type": "object", "properties": {"why": {"type": "string"}}, "required": ["why"]}},
            "type": "object",
            "properties": {
                "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}, "maxItems": 20},
                "answer": {"anyOf": [{"type": "string", "maxLength": 200}, {"type": "null"}]},
                "step": {"allOf": [{"$ref": "#/$defs/step"}]},
                "mail": {"type": "string", "pattern": "^[^@ ]+@[a-z.]{3,50}$"},
            },
            "required": ["steps", "answer"],
            "additionalProperties": False,
        }
    ),
]


def test_ordinary_constraints_start_no_process() -> None:
    backend = Guidance(vocabulary("small"))
    for constraint in [*ORDINARY, *tool_sets()[:1]]:
        backend.prepare(constraint)
        backend.compile(constraint)
    assert backend.probe.started == 0
    backend.close()


def items(levels: int) -> str:
    return '{"type":"array","items":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    "constraint",
    [
        TRIED,
        spec.sequence("x", spec.Optional(TRIED)),
        spec.Repeat(spec.OneOf((spec.Literal("a"), TRIED)), ","),
        spec.Regex(r"(\p{L}{1,50}\p{N}{1,50}){1,30}"),
        spec.Regex(r"((a{1,100}){1,100}){1,100}"),
        spec.Regex(r"[a-z]{0,10000}"),
        spec.Regex("a{99999999999999999999}"),
        spec.Regex("a" * 1_000),
        spec.Sequence((spec.Regex(r"\w{1,90}"), spec.Regex(r"\w{1,90}"))),
        spec.choice(str(i) for i in range(100_000)),
        spec.JsonSchema.of({"type": "string", "maxLength": 50_000}),
        spec.JsonSchema.of({"allOf": [{"minimum": 1}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"maximum": 5}}}),
        spec.JsonSchema.of({"type": "array", "items": {"enum": list(range(5))}, "uniqueItems": True}),
        spec.JsonSchema.of({"dependentRequired": {str(i): ["b"] for i in range(7)}}),
        spec.JsonSchema.of({"anyOf": [{"required": [str(i)]} for i in range(20)], "properties": {"a": {}}}),
        spec.JsonSchema.of({"enum": [f"value {i}" for i in range(2_000)]}),
        spec.JsonSchema.of({"properties": {f"k{i}": {} for i in range(300)}}),
        spec.Repeat(spec.JsonSchema.of({"prefixes": [{"format": "uri"}] * 250}), ","),
        spec.JsonSchema.of({"items": {"pattern": r"^(\w{1,20}){1,20}$"}}),
        spec.JsonSchema(items(100)),
        spec.OneOf(tuple(spec.JsonSchema.of({"enum": [str(i) * 1_000]}) for i in range(300))),
    ],
)
def test_what_may_do_harm_is_tried_first(constraint: Constraint) -> None:
    assert not plainly_harmless(constraint)


def test_a_property_named_like_a_keyword_is_no_keyword() -> None:
    names = {"pattern": {"type": "string"}, "maxLength": {"type": "integer"}, "allOf": {"type": "string"}}
    assert plainly_harmless(spec.JsonSchema(json.dumps({"type": "object", "properties": names})))
