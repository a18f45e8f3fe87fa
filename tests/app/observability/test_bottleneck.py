"""Limits of an engine: by counters made for each, and by those of an engine that has one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.config import Settings
from app.observability.bottleneck import SETTINGS, Bottleneck, bottleneck, growth_of
from app.observability.time_windows import COUNTED_S, TimeWindows
from engine.outputs import Stats
from tests.app.conftest import serving

START = Stats(blocks_total=100, block_size=16)
# A minute of decodes at full time: 600 steps of 8 sequences in 57 s, and long ago as many of one, just as slow.
BUSY = replace(
    START,
    step_seconds=57.0,
    steps=600,
    running=8,
    blocks_used=50,
    decodes=((600, 600, 54.0), (0, 0, 0.0), (0, 0, 0.0), (600, 4800, 57.0)),
)
BEFORE = replace(START, decodes=((600, 600, 54.0),))


def found(last: Stats, first: Stats = BEFORE, max_running: int = 64) -> Bottleneck:
    limit = bottleneck([(0.0, first), (60.0, last)], max_running)
    assert limit is not None
    return limit


def test_one_look_says_nothing() -> None:
    assert bottleneck([], 8) is None and bottleneck([(0.0, START)], 8) is None


def test_an_engine_with_little_to_do_is_idle() -> None:
    assert found(replace(BUSY, step_seconds=1.5)).limit == "idle"
    assert found(replace(BUSY, step_seconds=1.5, waiting=3), max_running=8).limit == "max_running"


def test_memory_limits_where_sequences_lose_it_or_wait_for_it() -> None:
    assert found(replace(BUSY, preemptions=4)).limit == "kv_memory"
    assert found(replace(BUSY, waiting=4, blocks_used=95)).limit == "kv_memory"
    assert found(replace(BUSY, blocks_used=95)).limit != "kv_memory", "nobody waits"
    assert found(replace(BUSY, preemptions=4), first=replace(BEFORE, preemptions=4)).limit != "kv_memory", "long ago"


def test_the_batch_limits_where_it_is_full_and_others_wait() -> None:
    assert found(replace(BUSY, waiting=4), max_running=8).limit == "max_running"
    assert found(replace(BUSY, waiting=4), max_running=9).limit != "max_running"


def test_the_host_limits_where_steps_do_not_fill_the_time_with_work() -> None:
    slow = found(
        replace(BUSY, step_seconds=20.0, decodes=((600, 600, 54.0), (0, 0, 0.0), (0, 0, 0.0), (200, 1600, 20.0)))
    )
    assert slow.limit == "host" and slow.busy == pytest.approx(1 / 3)


def test_time_without_work_is_not_held_against_the_host() -> None:
    rested = replace(BUSY, running=0)
    looks = [(0.0, BEFORE), (60.0, BUSY), (600.0, rested)]
    limit = bottleneck(looks, 64)
    assert limit is not None and limit.busy == pytest.approx(0.95) and limit.limit == "bandwidth"


def test_prompts_limit_where_most_of_the_steps_read_them() -> None:
    reading = replace(BUSY, decodes=((600, 600, 54.0), (0, 0, 0.0), (0, 0, 0.0), (200, 1600, 19.0)))
    limit = found(reading)
    assert limit.limit == "prefill" and limit.prompts == pytest.approx(2 / 3)


@pytest.mark.parametrize(("alone_s", "limit"), [(0.09, "bandwidth"), (0.03, "decode"), (0.012, "compute")])
def test_decoding_is_told_apart_by_how_its_time_grows(alone_s: float, limit: str) -> None:
    """Varies the step time of one sequence; that of eight is 0.095 s."""
    alone = (600, 600, 600 * alone_s)
    told = found(replace(BUSY, decodes=(alone, *BUSY.decodes[1:])), replace(START, decodes=(alone,)))
    assert told.limit == limit and told.rows == 8 and told.step_s == pytest.approx(0.095)


def test_growth_is_the_exponent() -> None:
    linear = [(100, 100 * rows, 100 * 0.01 * rows) for rows in (1, 2, 4, 8)]
    assert growth_of(linear) == pytest.approx(1)
    assert growth_of([(100, 100 * rows, 5.0) for rows in (1, 2, 4, 8)]) == pytest.approx(0)
    assert growth_of(linear[:1]) is None and growth_of([(3, 3, 1.0), (3, 6, 1.0)]) is None, "too few"


def test_settings_that_help_exist() -> None:
    assert {name for names in SETTINGS.values() for name in names} <= set(Settings.model_fields)


def test_windows_keep_a_minute_of_counters_and_the_one_before() -> None:
    now = 0.0
    windows = TimeWindows(lambda: now)
    for second in range(200):
        now = float(second)
        windows.counted("m", replace(START, steps=second))
    looks = windows.last_minute("m")
    assert looks[0][0] == 199 - COUNTED_S and looks[-1][0] == 199 and len(looks) == COUNTED_S + 1
    assert windows.last_minute("other") == []


@pytest.mark.slow
def test_a_full_batch_of_a_real_engine_is_named(model: Path, tmp_path: Path) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True}
    with serving(model, tmp_path, max_running=1) as server, httpx.Client(base_url=server.url, timeout=60) as http:

        def limit() -> Any:
            (engine,) = http.get("/api/operator/stats").json()["models"]
            return engine["bottleneck"]

        assert limit() is None
        with ThreadPoolExecutor(4) as threads:
            answers = [threads.submit(http.post, "/v1/chat/completions", json=body) for _ in range(4)]
            server.until(lambda stats: stats.running == 1 and stats.waiting == 3)
            while (told := limit())["limit"] != "max_running":
                assert not any(answer.done() for answer in answers), told
            assert told["settings"] == ["max_running"] and told["waiting"] >= 0.5
            assert [answer.result().status_code for answer in answers] == [200] * 4
        assert 1 in {told["rows"], limit()["rows"]}, "each step had one sequence"
