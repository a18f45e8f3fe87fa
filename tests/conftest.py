"""Fixtures that tests of several folders use, and the order that files are run in."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import interpreted
from tests.tiny import write_checkpoint

if not torch.cuda.is_available():
    # Read when a kernel is first imported: without a GPU the tests run kernels in Triton's interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        interpreted.replace_the_language_once()
        interpreted.share_what_shapes_are()
        interpreted.sum_products_in_doubles()
        interpreted.check_overflow_at_once()

if importlib.util.find_spec("httpx") is not None:
    # Each client reads all certificates that it would trust, which takes longer than most requests here.
    from httpx import _config
    from httpx._transports import default as httpx_transports

    vars(httpx_transports)["create_ssl_context"] = functools.cache(_config.create_ssl_context)

if importlib.util.find_spec("hypothesis") is not None:
    # An example may take any time on a busy machine; one that fails is printed so that it can be run again.
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what it leaves in the background; programs under test would inherit it, and ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_umask() -> Iterator[None]:
    """Undoes what a command that ran in this process did: `ponder` writes files that are its user's alone."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def postgres_address() -> Iterator[str]:
    """A PostgreSQL server's database."""
    from tests.app import postgres

    with postgres.cluster() as address:
        yield address


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny scripted model."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


# Those that take longest, by far; most have few tests.
MAX_LENGTH = (
    "bench/test_gpu_bench.py",
    "clients/test_clients.py",
    "app/runs/test_crashed_runs.py",
    "engine/gpu/test_gpu_engine.py",
    "e2e/test_real_streams.py",
    "app/wire/test_api_workers.py",
    "e2e/test_documents_page.py",
    "app/wire/test_stopping.py",
    "e2e/test_real_tools.py",
    "engine/ipc/test_supervised_engine.py",
    "e2e/test_page.py",
    "training/test_bundled_models.py",
    "e2e/test_citing.py",
    "training/test_trainer.py",
    "e2e/shell/test_operator_page.py",
    "app/api/test_openapi.py",
    "e2e/answers/test_answers.py",
    "engine/ipc/test_joined_engine.py",
    "e2e/test_chats.py",
)


SLOW_FILE = re.compile(r"^pytestmark = .*pytest\.mark\.slow", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves slow files unread in `make test`, which none of them belong to: importing a file takes long, too."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return bool(SLOW_FILE.search(collection_path.read_text(encoding="utf-8"))) or None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Returns a process for each core and each 8 GiB of memory, two to four: each has engines of its own."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(2, min(os.cpu_count() or 2, round(memory / 2**33), 4))


def pytest_configure() -> None:
    """Sets when the minutes of this run are over, for all of its processes, where TEST_MINUTES bounds them."""
    if minutes := os.environ.get("TEST_MINUTES"):
        os.environ.setdefault("TEST_END", str(time.time() + 60 * float(minutes)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips slow tests once the minutes of this run are over: a run that is cut off would report nothing at all."""
    end = os.environ.get("TEST_END")
    if end is not None and time.time() > float(end) and item.get_closest_marker("slow"):
        pytest.skip(f"not run: TEST_MINUTES={os.environ['TEST_MINUTES']} were over")


def pytest_collection_finish() -> None:
    """Spares collections of garbage the thousands of tests, which stay until the end."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Returns where several processes share the files, long ones begin first: the last to begin runs on beside idle
    processes.

    One process keeps the order that was asked for.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    folder = Path(__file__).parent
    rank = {folder / name: place for place, name in enumerate(MAX_LENGTH)}
    assert all(path.exists() for path in rank), "a file that takes long has another name now"
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
