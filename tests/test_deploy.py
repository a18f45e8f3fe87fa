"""Files of deploy/: a compose file and a Helm chart, whose commands and variables are Ponder's own."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config import load_settings
from app.config.settings import Settings
from app.routing.replicas import ReplicaAddress

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
CHART = DEPLOY / "helm/ponder"


def options_of(command: list[str], option: str) -> list[str]:
    return [each.removeprefix(f"{option}=") for each in command if each.startswith(f"{option}=")]


def check_environment(environment: dict[str, str]) -> None:
    """Asserts that variables are settings, and that their K/V events are accepted."""
    for name in environment:
        assert name.removeprefix("PONDER_").lower() in Settings.model_fields, name
    events = load_settings(kv_events=environment["PONDER_KV_EVENTS"]).kv_events
    assert events is not None and events.replay_endpoint is not None


def test_the_compose_files_router_knows_each_server_and_its_events() -> None:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    services = compose["services"]
    servers = {name: each for name, each in services.items() if name.startswith("server-")}
    for each in servers.values():
        check_environment(each["environment"])
    assert all(
        each["networks"] == ["inside"] and "ports" not in each
        for each in services.values()
        if each is not services["router"]
    )
    assert compose["networks"]["inside"]["internal"] is True
    command = compose["services"]["router"]["command"]
    replicas = [ReplicaAddress.parse(each) for each in options_of(command, "--replica")]
    assert {each.url for each in replicas} == {f"http://{name}:8000" for name in servers}
    assert all(each.events and each.replay for each in replicas)
    assert "--shared-state" in command  # chats are the database's, and
    places = [volume.split(":") for each in servers.values() for volume in each["volumes"]]
    own = [name for name, place in places if place == "/data"]
    assert len(set(own)) == len(servers)  # no two share a data directory, but for documents' files
    assert {name for name, place in places if place != "/data"} == {"documents"}
    assert {*own, "documents", "database"} == compose["volumes"].keys()


def test_the_compose_files_servers_are_given_its_database_and_its_redis() -> None:
    """`:?` and `$` are compose's."""
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]
    for name in ("server-a", "server-b"):
        environment = services[name]["environment"]
        filled: dict[str, Any] = {
            each: re.sub(r"\$\{PONDER_PASSWORD[^}]*\}", "secret", environment[f"PONDER_{each.upper()}"])
            for each in ("database", "redis")
        }
        settings = load_settings(**filled)
        assert settings.database is not None and settings.redis is not None
        assert settings.database.get_secret_value() == "postgresql://ponder:secret@postgres/ponder"
        assert settings.redis.get_secret_value() == "redis://:secret@redis:6379/0"
        assert set(services[name]["depends_on"]) == {"postgres", "redis"}
    made = services["postgres"]["environment"]
    assert (made["POSTGRES_USER"], made["POSTGRES_DB"]) == ("ponder", "ponder")


def test_the_charts_values_and_metadata_are_yaml() -> None:
    chart, values = (yaml.safe_load((CHART / name).read_text()) for name in ("Chart.yaml", "values.yaml"))
    assert chart["apiVersion"] == "v2" and chart["name"] == "ponder" and values["replicas"] == 2
    text = "".join(each.read_text() for each in (CHART / "templates").iterdir())
    for name in values:
        assert f".Values.{name}" in text, f"{name} has no effect"


@pytest.mark.parametrize("template", sorted((CHART / "templates").iterdir()), ids=lambda each: each.name)
def test_the_charts_templates_are_yaml_whatever_stands_for_their_actions(template: Path) -> None:
    """Helm itself is asked below, where it is there."""
    lines = [line for line in template.read_text().splitlines() if not re.fullmatch(r"\s*\{\{-.*\}\}", line)]
    text = re.sub(r"\{\{ .*? \}\}", "x", "\n".join(lines))
    assert "{{" not in text
    made = list(yaml.safe_load_all(text))
    assert all(each["metadata"]["labels"]["app.kubernetes.io/name"] == "ponder" for each in made)
    for each in made:
        if template_of := each["spec"].get("template"):
            labels = template_of["metadata"]["labels"]
            assert each["spec"]["selector"]["matchLabels"] == labels  # else it would never own its pods
            for container in template_of["spec"]["containers"]:
                assert {probe["port"] for probe in _probes(container)} <= {port["name"] for port in container["ports"]}


def _probes(container: dict[str, Any]) -> list[dict[str, Any]]:
    return [each["httpGet"] for name, each in container.items() if name.endswith("Probe")]


@pytest.fixture
def helm() -> str:
    found = shutil.which("helm")
    if found is None:
        pytest.skip("helm is not on the path")
    return found


def test_helm_lints_the_chart(helm: str) -> None:
    subprocess.run([helm, "lint", "--strict", CHART], check=True, capture_output=True, timeout=60)


def test_helm_renders_servers_and_a_router_that_knows_each(helm: str) -> None:
    given = ["--set", "replicas=3", "--set", "settings.PONDER_MAX_RUNNING=32", "--set", "router.adminKeySecret=keys"]
    given += ["--set", "settingsSecret=shared", "--set", "documentsClaim=files", "--set", "router.sharedState=true"]
    done = subprocess.run([helm, "template", "mine", CHART, *given], check=True, capture_output=True, timeout=60)
    made = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout)}
    server = made["StatefulSet", "mine-server"]["spec"]
    assert server["replicas"] == 3 and server["serviceName"] == "mine-servers"
    container = server["template"]["spec"]["containers"][0]
    environment = {each["name"]: each["value"] for each in container["env"]}
    check_environment(environment)
    assert environment["PONDER_MAX_RUNNING"] == "32"
    assert container["envFrom"] == [{"secretRef": {"name": "shared"}}]
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/data", "/data/documents"]
    router = made["Deployment", "mine-router"]["spec"]["template"]["spec"]["containers"][0]
    replicas = [ReplicaAddress.parse(each) for each in options_of(router["args"], "--replica")]
    assert [each.url for each in replicas] == [f"http://mine-server-{at}.mine-servers:8000" for at in range(3)]
    assert "--shared-state" in router["args"]
    assert router["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": "admin-key"}
    policy = made["NetworkPolicy", "mine-events"]["spec"]["ingress"]
    events = [each for each in policy if {"port": 5557} in each["ports"]]
    labels = made["Deployment", "mine-router"]["spec"]["template"]["metadata"]["labels"]
    assert len(events) == 1 and events[0]["from"] == [{"podSelector": {"matchLabels": labels}}]
