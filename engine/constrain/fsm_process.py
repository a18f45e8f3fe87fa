"""Makes automata over tokens in a process of its own, which can be killed: some expressions take minutes and gigabytes.

Run as a script by `fsm.FiniteStates`, never imported by the engine's process, so it starts without torch. Reads pickles
from stdin, first the vocabulary and then one expression after another; answers each with arrays, or with a message.

outlines-core follows the first alternative that matches (`a|ab` would never give "ab") and loses moves out of states
where the text may end. Neither can happen before the end is certain: so every expression is given an end of its own,
the character NUL, and one more token that writes it. A state is final where that token leads to a match.
"""

from __future__ import annotations

import contextlib
import pickle
import resource
import sys
from typing import Any

import numpy as np
import outlines_core
from numpy.typing import NDArray

END = b"\0"
Moves = dict[int, dict[int, int]]  # state -> token -> state


def arrays(pattern: str, vocabulary: outlines_core.Vocabulary, size: int) -> dict[str, Any]:
    """The automaton as the arrays of a `fsm.Table`. Any: arrays of several types."""
    index = outlines_core.Index(f"(?:{pattern})\\x00", vocabulary)
    moves: Moves = index.get_transitions()
    matched = index.get_final_states()
    final = {state for state, row in moves.items() if row.pop(size, None) in matched}
    live = _reaching(final, moves)
    start = index.get_initial_state()
    if start not in live:
        raise ValueError("no text fits")
    numbers = _numbered(start, live, moves)
    tokens: list[NDArray[np.int32]] = []
    targets: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.int32]] = []
    row_of: list[int] = []
    rows: dict[bytes, int] = {}  # many states take the same tokens: their row is kept once
    for state in numbers:
        kept = sorted((token, numbers[target]) for token, target in moves.get(state, {}).items() if target in live)
        tokens.append(np.array([token for token, _ in kept], dtype=np.int32))
        targets.append(np.array([target for _, target in kept], dtype=np.int32))
        mask = _bits(tokens[-1], size)
        if mask.tobytes() not in rows:
            rows[mask.tobytes()] = len(masks)
            masks.append(mask)
        row_of.append(rows[mask.tobytes()])
    return {
        "masks": np.stack(masks),
        "rows": np.array(row_of, dtype=np.int32),
        "final": np.array([state in final for state in numbers]),
        "starts": np.cumsum([0, *map(len, tokens)]),
        "tokens": np.concatenate(tokens),
        "targets": np.concatenate(targets),
    }


def _reaching(final: set[int], moves: Moves) -> set[int]:
    """States from which the text can still be completed."""
    before: dict[int, set[int]] = {}
    for state, row in moves.items():
        for target in set(row.values()):
            before.setdefault(target, set()).add(state)
    live, todo = set(final), list(final)
    while todo:
        for state in before.get(todo.pop(), ()):
            if state not in live:
                live.add(state)
                todo.append(state)
    return live


def _numbered(start: int, live: set[int], moves: Moves) -> dict[int, int]:
    """The states that can be reached, and a number for each in order; the first is 0."""
    numbers, todo = {start: 0}, [start]
    for state in todo:
        for target in sorted(set(moves.get(state, {}).values()) & live):
            if target not in numbers:
                numbers[target] = len(numbers)
                todo.append(target)
    return numbers


def _bits(tokens: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    known, eos, size, most_bytes = pickle.load(source)
    known.pop(END, None)
    with contextlib.suppress(ValueError):  # a lower limit may be set already
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    vocabulary = outlines_core.Vocabulary(eos, {**known, END: [size]})
    pickle.dump("ready", sink)
    sink.flush()
    while True:
        try:
            pattern = pickle.load(source)
        except EOFError:
            return
        try:
            answer: Any = arrays(pattern, vocabulary, size)
        except Exception as error:  # the library raises what Rust gives it
            answer = str(error)
        pickle.dump(answer, sink)
        sink.flush()


if __name__ == "__main__":
    main()
