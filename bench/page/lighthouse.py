"""Measures Lighthouse's scores of the first screen and a chat. npm fetches it into a folder of its own on request."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from bench.page.browsing import CHROMIUM, Json, browser, scripted
from bench.page.frames import section
from hatch_build import node_binary, npm_script

PEBBLE = Path(__file__).parents[2] / "models/pebble"  # what a newcomer's first screen says
FOLDER = Path(__file__).parents[2] / "build/lighthouse"
VERSION = "13"
CATEGORIES = ("performance", "accessibility", "best-practices")
RUNS = 5  # of which the median counts, as Lighthouse's authors advise
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic"


def lighthouse() -> Json:
    """Returns scores of 100 for a phone (Lighthouse's own slow network and processor) and for a desk, and the audits
    that lower them."""
    program = _program()
    made: Json = {}
    texts = {"mixed": "".join(section(i) for i in range(1, 4))}
    with scripted(texts, PEBBLE / "ponder.json") as server:
        chat, _ = server.ask("mixed it is")
        with browser() as chromium:  # closed before anything is measured
            page = chromium.new_page()
            page.goto(f"{server.direct}/c/{chat}")
            page.locator("article[aria-busy=false][aria-label=Ponder]").wait_for()
        for name, path in (("first screen", "/"), ("chat", f"/c/{chat}")):
            for form in ("phone", "desktop"):
                made[f"{name}, {form}"] = _scores(program, f"{server.direct}{path}", form)
    return made


def _program() -> Path:
    program = FOLDER / "node_modules/lighthouse/cli/index.js"
    if not program.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "package.json").write_text('{"private": true}')
        _node(npm_script(), "install", f"lighthouse@{VERSION}", "--no-audit", "--no-fund", "--ignore-scripts")
    return program


def _node(script: Path, *args: str) -> str:
    path = f"{node_binary().parent}{os.pathsep}{os.environ.get('PATH', '')}"
    env = os.environ | {"PATH": path, "CHROME_PATH": CHROMIUM}
    command = [str(node_binary()), str(script), *args]
    ran = subprocess.run(command, cwd=FOLDER, env=env, text=True, capture_output=True, timeout=300, check=False)
    if ran.returncode:
        raise RuntimeError(f"{script.name} ended with {ran.returncode}: {(ran.stderr or ran.stdout).strip()[-2000:]}")
    return ran.stdout


def _scores(program: Path, url: str, form: str) -> Json:
    """Returns the run of median performance, with the performance of all."""
    runs = sorted((_run(program, url, form) for _ in range(RUNS)), key=lambda run: run["scores"]["performance"])
    return {**runs[RUNS // 2], "performance of all": [run["scores"]["performance"] for run in runs]}


def _run(program: Path, url: str, form: str) -> Json:
    preset = ["--preset=desktop"] if form == "desktop" else []
    report = json.loads(
        _node(
            program, url, "--output=json", "--quiet", f"--only-categories={','.join(CATEGORIES)}",
            f"--chrome-flags={FLAGS}", *preset,
        )
    )  # fmt: skip
    scores = {name: round(100 * report["categories"][name]["score"]) for name in CATEGORIES}
    audits = report["audits"]
    times = {
        key: round(audits[key]["numericValue"], 1)
        for key in ("first-contentful-paint", "largest-contentful-paint", "total-blocking-time", "speed-index")
    }
    wanting = {
        ref["id"]: audits[ref["id"]].get("displayValue", "")
        for name in CATEGORIES
        for ref in report["categories"][name]["auditRefs"]
        if ref["weight"] and (audits[ref["id"]]["score"] or 0) < 1
    }
    return {
        "scores": scores,
        "ms": times,
        "shift": audits["cumulative-layout-shift"]["numericValue"],
        "wanting": wanting,
    }
