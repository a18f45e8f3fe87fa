"""Servers on Ray Serve: two of them answer OpenAI's client, and a killed one is replaced."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

from app.cli.route_command import ray_config
from tests.app.cli.test_cli import ponder
from tests.app.routing.test_router import free_port, until

pytestmark = pytest.mark.slow


@pytest.fixture
def deployed(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'ponder[ray]'")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    import ray
    from ray import serve

    from app.routing.ray_serve import build

    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build({"options": ["--model", str(model), "--device", "cpu"], "min_replicas": 2, "max_replicas": 2}))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def test_two_replicas_answer_openais_client_and_a_killed_one_is_replaced(deployed: str) -> None:
    def replicas() -> int:
        return int(httpx.get(f"{deployed}/health").json()["replicas"])

    until(lambda: replicas() == 2)
    with openai.OpenAI(base_url=f"{deployed}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for _ in range(4):
            answer = client.chat.completions.create(
                model="default", messages=[{"role": "user", "content": "hi"}], max_tokens=4
            )
            assert answer.usage is not None and answer.usage.completion_tokens > 0
        servers = [each for each in psutil.process_iter(["cmdline"]) if _is_server(each)]
        assert len(servers) == 2
        servers[0].kill()
        until(lambda: replicas() < 2)
        deadline = time.monotonic() + 120
        while replicas() < 2:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": "hi"}], max_tokens=4)


def _is_server(process: psutil.Process) -> bool:
    command: list[str] = process.info["cmdline"] or []
    return "app.cli" in command and "serve" in command and "--kv-events-config" in command


def test_the_printed_configuration_is_the_applications(tmp_path: Path) -> None:
    done = ponder(
        "deploy", "ray", "--min-replicas", "2", "--print-config", "--", "--model", "models/some", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    config: dict[str, Any] = yaml.safe_load(done.stdout)
    (application,) = config["applications"]
    assert application["import_path"] == "app.routing.ray_serve:build"
    assert application["args"]["options"] == ["--model", "models/some"] and application["args"]["min_replicas"] == 2
    assert done.stdout == ray_config(application["args"], "127.0.0.1", 8000)


def test_fewer_at_most_than_at_least_is_refused(tmp_path: Path) -> None:
    done = ponder("deploy", "ray", "--min-replicas", "5", "--max-replicas", "2", cwd=tmp_path)
    assert done.returncode == 2 and "accepted: at most --max-replicas, 2" in done.stderr
