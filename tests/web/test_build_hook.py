"""Tests when the page is built, and what is said when it cannot be. Node itself is not run here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="hatchling is not installed: pip brings it for a build alone")

import hatch_build
from hatch_build import build_kernels, build_page

NEVER, NOW = 1_000_000, 2_000_000  # seconds: times that a test sets are far from the present


@pytest.fixture
def web(tmp_path: Path) -> Path:
    for name in ("src/lib/a.ts", "public/favicon.svg", "package.json", "package-lock.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return tmp_path


@pytest.fixture
def ran(web: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    ran: list[str] = []

    def node(folder: Path, script: Path, *args: str, what: str) -> None:
        ran.append(args[0])
        made = folder / ("node_modules/.package-lock.json" if args[0] == "ci" else "dist/index.html")
        made.parent.mkdir(exist_ok=True)
        made.write_text("made")

    monkeypatch.setattr(hatch_build, "run_node", node)
    monkeypatch.setattr(hatch_build, "npm_script", lambda: Path("npm-cli.js"))
    return ran


def age(web: Path) -> None:
    """Make all sources old, so that what was built is newer."""
    for path in [web, *web.rglob("*")]:
        if "dist" not in path.parts and "node_modules" not in path.parts:
            os.utime(path, (NEVER, NEVER))


def test_a_first_build_installs_and_builds_and_a_second_does_nothing(web: Path, ran: list[str]) -> None:
    age(web)
    assert build_page(web)
    assert ran == ["ci", "build"]
    assert not build_page(web)
    assert ran == ["ci", "build"]


@pytest.mark.parametrize("changed", ["src/lib/a.ts", "public/favicon.svg", "package.json"])
def test_a_newer_source_builds_again_without_installing_again(web: Path, ran: list[str], changed: str) -> None:
    age(web)
    build_page(web)
    later = (web / "dist/index.html").stat().st_mtime + 10
    os.utime(web / changed, (later, later))
    assert build_page(web)
    assert ran == ["ci", "build", "build"]


def test_a_source_that_is_gone_builds_again(web: Path, ran: list[str]) -> None:
    age(web)
    build_page(web)
    os.utime(web / "dist/index.html", (NOW, NOW))
    (web / "src/lib/a.ts").unlink()
    assert build_page(web)


def test_other_packages_are_installed_again(web: Path, ran: list[str]) -> None:
    age(web)
    build_page(web)
    later = (web / "node_modules/.package-lock.json").stat().st_mtime + 10
    os.utime(web / "package-lock.json", (later, later))
    assert build_page(web)
    assert ran == ["ci", "build", "ci", "build"]


def test_a_failure_carries_what_was_said(web: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = web / "fails.py"
    script.write_text("print('no such package'); raise SystemExit(3)")
    monkeypatch.setattr(hatch_build, "node_binary", lambda: Path(sys.executable))
    with pytest.raises(SystemExit, match=r"Failed while installing .*3(?s:.*)no such package"):
        hatch_build.run_node(web, script, "ci", what="installing the page's packages (npm ci)")
    assert not (web / "node_modules").exists()


def test_a_wheel_has_no_kernels_where_there_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build_kernels(Path(hatch_build.__file__).parent) == []
