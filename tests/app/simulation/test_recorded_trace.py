"""Traces are read as they were recorded, refused by their line, and scaled without new sharing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.simulation.recorded_trace import TraceError, day_warp, duration_s, load_trace, scaled

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
CHAT = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 1600, "output_length": 7, "hash_ids": [0, 1, 2, 3]},
    {"timestamp": 9000, "input_length": 300, "output_length": 9, "hash_ids": [4]},
]


def written(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_azures_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(f"{HEADER}2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n")
    first, second = load_trace(path)
    assert (first.at, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at == pytest.approx(4.314579) and second.output_tokens == 109
    assert not set(first.digests(16)) & set(second.digests(16))
    assert len(first.digests(16)) == 374 // 16


def test_prompts_share_the_blocks_that_have_one_name(tmp_path: Path) -> None:
    first, second, third = load_trace(written(tmp_path, *CHAT))
    assert len(first.digests(16)) == 1000 // 16 and len(set(first.digests(16))) == 1000 // 16
    assert second.digests(16)[: 1000 // 16] == first.digests(16)
    assert not set(third.digests(16)) & set(second.digests(16))
    assert second.digests(512) != second.digests(256)


def test_blocks_that_cut_a_named_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="divides 512"):
        load_trace(written(tmp_path, *CHAT))[0].digests(24)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"timestamp": 1', "line 2: .*accepted: a time"),
        ('{"timestamp": 1, "input_length": 3, "hash_ids": [9]}', "line 2: KeyError 'output_length'"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 3, "hash_ids": []}', "line 2: .*at least one token"),
        ('{"timestamp": 1, "input_length": 513, "output_length": 3, "hash_ids": [7]}', "line 2: 1 hash_ids for 513"),
        (
            '{"timestamp": 1, "input_length": 600, "output_length": 3, "hash_ids": [9, 1]}',
            "line 2: hash_id 1 follows 9",
        ),
        ('{"timestamp": 1, "input_length": 6, "output_length": 3, "hash_ids": [-2]}', "line 2: a negative hash_id"),
        ("[1, 2]", "line 2: TypeError"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        load_trace(written(tmp_path, CHAT[0], line))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: '' begins no known trace"), ("a,b\n", "line 1: 'a,b' begins no known trace"),
        (HEADER, "no requests"), (f"{HEADER}yesterday,1,2\n", "line 2: "),
        (f"{HEADER}2023-11-16 18:15:46,5,0\n", "line 2: .*at least one token"),
        (f"{HEADER}2023-11-16 18:15:46,5\n", "line 2: "),
    ],
)  # fmt: skip
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=says):
        load_trace(path)
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path / "none.csv")


def test_a_trace_alone_is_itself(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, *CHAT))
    assert list(scaled(trace, 1, None, 1.0, seed=0)) == trace


def test_copies_come_in_order_and_share_nothing(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, *CHAT))
    period = duration_s(trace)
    assert period == pytest.approx(13.5)
    made = list(scaled(trace, 4, 10 * period / 3600, 1.0, seed=2))
    assert abs(len(made) - 4 * 10 * 3) <= 4
    assert [each.at for each in made] == sorted(each.at for each in made) and made[-1].at < 10 * period
    by_copy = {each.copy: set[bytes]() for each in made}
    for each in made:
        by_copy[each.copy] |= set(each.digests(16))
    assert len(by_copy) >= 40
    assert sum(map(len, by_copy.values())) == len(set.union(*by_copy.values()))
    assert made == list(scaled(trace, 4, 10 * period / 3600, 1.0, seed=2))
    assert made != list(scaled(trace, 4, 10 * period / 3600, 1.0, seed=3))


def test_a_copy_lasts_as_long_as_the_trace(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, *CHAT))
    for seed in range(20):
        made = list(scaled(trace, 2, None, 1.0, seed))
        assert len(made) == 6 and max(each.at for each in made) < duration_s(trace)


def test_a_day_has_a_busiest_time() -> None:
    warp = day_warp(24.0, 1.8)
    moments = [warp(at / 100) for at in range(2400)]
    assert moments == sorted(moments)
    middle = sum(11 <= each < 13 for each in moments) / 100
    night = sum(each < 1 or each >= 23 for each in moments) / 100
    assert middle / 2 == pytest.approx(1.8, abs=0.05) and night / 2 == pytest.approx(0.2, abs=0.05)
