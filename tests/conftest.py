"""What tests of several folders stand on."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.interpreted import replace_the_language_once
from tests.tiny import write_checkpoint

if not torch.cuda.is_available():
    # Read when a kernel is first imported: without a GPU the tests run kernels in Triton's interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        replace_the_language_once()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what it leaves in the background; programs under test would inherit it, and ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny scripted model."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")

