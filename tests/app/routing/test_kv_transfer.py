"""`kv_transfer_params` of the API, and `kv_transfer` of the settings: what works, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.config import BadSetting, load_settings
from engine.config import KVTransferConfig
from tests.app.conftest import Server, serving
from tests.engine.kv_apart import free_port

GIVEN = {
    "kv_role": "kv_both", "kv_ip": "10.0.0.1", "kv_port": 6000, "kv_buffer_size": 1 << 20,
    "kv_connector_extra_config": {
        "secret_file": "secret", "peers": ["10.0.0.2"], "timeout_s": 5, "layerwise_min_tokens": 9,
    },
}  # fmt: skip


def test_json_of_the_command_line_reaches_the_first_models_engine(tmp_path: Path) -> None:
    settings = load_settings(kv_transfer=json.dumps(GIVEN), data_dir=tmp_path)
    wanted = KVTransferConfig("kv_both", "secret", "10.0.0.1", 6000, 1 << 20, ("10.0.0.2",), 5.0, True, 9)
    assert settings.engine_config().kv_transfer == wanted
    extra = {**GIVEN["kv_connector_extra_config"], "use_layerwise": False}  # type: ignore[dict-item]  # it is one
    chunks = load_settings(kv_transfer=json.dumps({**GIVEN, "kv_connector_extra_config": extra}), data_dir=tmp_path)
    assert chunks.engine_config().kv_transfer == replace(wanted, use_layerwise=False)
    assert settings.engine_config("another").kv_transfer is None


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"kv_connector": "MooncakeConnector"}, r"--kv-transfer-config\.kv_connector"),
        ({"kv_role": "both"}, r"--kv-transfer-config\.kv_role"),
        ({"kv_load_failure_policy": "fail"}, r"--kv-transfer-config\.kv_load_failure_policy"),
        ({"kv_parallel_size": 2}, r"--kv-transfer-config\.kv_parallel_size"),
        ({"kv_connector_extra_config": {}}, "secret_file"),
        ({"kv_connector_extra_config": {"secret_file": "a", "layerwise_min_tokens": 0}}, "layerwise_min_tokens"),
        ({"kv_connector_extra_config": {"secret_file": "a", "use_layerwise": "often"}}, "use_layerwise"),
    ],
)
def test_what_is_no_configuration_is_refused_by_its_field(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(BadSetting, match=told):
        load_settings(kv_transfer=json.dumps({**GIVEN, **changed}))


def test_a_consumer_without_peers_is_refused(tmp_path: Path) -> None:
    given = {**GIVEN, "kv_connector_extra_config": {"secret_file": "secret"}}
    with pytest.raises(BadSetting, match="there are no peers; accepted"):
        load_settings(kv_transfer=json.dumps(given), data_dir=tmp_path).engine_config()


def test_a_stores_configuration_reaches_the_engine_in_vllms_names(tmp_path: Path) -> None:
    extra = {"secret_file": "secret", "stores": ["a", "b:9"], "lookup_timeout_s": 0.1}
    given = {"kv_connector": "KVStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    config = load_settings(kv_transfer=json.dumps(given), data_dir=tmp_path).engine_config().kv_transfer
    assert config == KVTransferConfig(
        "kv_both", "secret", kv_connector="KVStoreConnector", stores=("a", "b:9"), lookup_timeout_s=0.1
    )
    assert config.load_timeout_s == 5.0
    given["kv_connector_extra_config"] = {"secret_file": "secret"}
    with pytest.raises(BadSetting, match="there are no stores; accepted"):
        load_settings(kv_transfer=json.dumps(given), data_dir=tmp_path).engine_config()


def ask(server: Server, params: object, **more: Any) -> httpx.Response:
    body = {"model": "default", "prompt": "a b c " * 20, "max_tokens": 1, "kv_transfer_params": params, **more}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tmp_path = tmp_path_factory.mktemp("both")
    (tmp_path / "secret").write_text("a secret of a test's server")
    extra = {"secret_file": str(tmp_path / "secret"), "peers": ["127.0.0.1"]}
    transfer = {"kv_role": "kv_both", "kv_port": free_port(), "kv_connector_extra_config": extra}
    with serving(model, tmp_path / "data", kv_transfer=transfer) as server:
        yield server


@pytest.mark.slow
def test_a_reply_says_where_the_kv_is_and_a_request_takes_that_as_it_is(both: Server) -> None:
    where = ask(both, {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}).json()[
        "kv_transfer_params"
    ]
    assert where["do_remote_prefill"] and not where["do_remote_decode"]
    assert "kv_transfer_params" not in ask(both, where, prompt="something else " * 20).json()
    stats = both.stats().kv_transfer
    assert stats.failed_loads == 1  # it asked itself for a prompt that nobody reads
    chat = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    told = httpx.post(
        f"{both.url}/v1/chat/completions", json={**chat, "kv_transfer_params": {"do_remote_decode": True}}, timeout=60
    )
    assert told.json()["kv_transfer_params"] == where


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "more", "told"),
    [
        ({"do_remote_decode": True}, {"stream": True}, "with stream; accepted: without stream"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, {}, "accepted: one of them"),
        ({"do_remote_prefill": True}, {}, "together with remote_host and remote_port"),
        ({"remote_host": "127.0.0.1", "remote_port": 1}, {}, "or false without them"),
        ({"do_remote_prefill": True, "remote_host": "evil", "remote_port": 1}, {}, "accepted: the peers 127.0.0.1"),
        ({"remote_block_ids": [1]}, {}, "kv_transfer_params"),
    ],
)
def test_what_cannot_be_is_refused(both: Server, params: object, more: dict[str, Any], told: str) -> None:
    answer = ask(both, params, **more)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("kv_transfer_params") and told in answer.text


@pytest.mark.slow
def test_a_server_without_kv_transfer_refuses_both(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as server:
        answer = ask(server, {"do_remote_decode": True})
        assert answer.status_code == 400 and "this server serves no K/V; accepted" in answer.text
        answer = ask(server, {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1})
        assert answer.status_code == 400 and "kv_transfer is not set" in answer.text


@pytest.mark.slow
def test_a_server_of_a_store_answers_without_it_and_is_no_peer(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret of a test's server")
    extra = {"secret_file": str(tmp_path / "secret"), "stores": [f"127.0.0.1:{free_port()}"]}
    transfer = {"kv_connector": "KVStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    with serving(model, tmp_path / "data", kv_transfer=transfer) as server:
        assert ask(server, None).status_code == 200
        answer = ask(server, {"do_remote_decode": True})
        assert answer.status_code == 400 and "as kv_producer or kv_both of a TcpConnector" in answer.text
        answer = ask(server, {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1})
        assert answer.status_code == 400 and "kv_transfer is of K/V stores" in answer.text
        text = httpx.get(f"{server.url}/metrics", timeout=10).text
    assert "ponder_kv_transfer_lookups_total" in text and "ponder_kv_transfer_unsent_blocks_total" in text
