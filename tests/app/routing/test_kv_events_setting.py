"""`kv_events`: a table, JSON on the command line, and refusals that name the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import BadSetting, load_settings
from engine.config import KVEventsConfig

GIVEN = '{"endpoint": "tcp://127.0.0.1:6000", "replay_endpoint": "ipc:///tmp/replay", "buffer_steps": 5, "topic": "kv"}'


def test_json_of_the_command_line_reaches_the_first_models_engine(tmp_path: Path) -> None:
    settings = load_settings(kv_events=GIVEN, data_dir=tmp_path)
    wanted = KVEventsConfig("tcp://127.0.0.1:6000", "ipc:///tmp/replay", buffer_steps=5, topic="kv")
    assert settings.engine_config().kv_events == wanted
    assert settings.engine_config("another").kv_events is None


@pytest.mark.parametrize("off", ['{"enable_kv_cache_events": false}', '{"publisher": "null"}'])
def test_events_are_turned_off_as_in_vllm(off: str, tmp_path: Path) -> None:
    assert load_settings(kv_events=off, data_dir=tmp_path).engine_config().kv_events is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("{", "accepted: a table, or JSON, of enable_kv_cache_events"),
        ('{"max_queue_size": 5}', r"--kv-events-config\.max_queue_size"),
        ('{"endpoint": "udp://x"}', r"--kv-events-config\.endpoint"),
        ('{"hwm": 0}', r"--kv-events-config\.hwm"),
    ],
)
def test_what_is_no_configuration_is_refused_by_its_field(given: str, told: str) -> None:
    with pytest.raises(BadSetting, match=told):
        load_settings(kv_events=given)
