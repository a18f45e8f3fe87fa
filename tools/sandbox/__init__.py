"""Runs untrusted Python: a warm pool of single-use sandboxes, and an interpreter for small pure code.

Knows nothing of tools or models.
"""

from tools.sandbox.pool import Sandbox
from tools.sandbox.pure import Pure, PureConfig
from tools.sandbox.sandbox_config import Finished, SandboxConfig, SandboxFailed, SandboxUnavailable, Support
from tools.sandbox.support import check

__all__ = [
    "Finished",
    "Pure",
    "PureConfig",
    "Sandbox",
    "SandboxConfig",
    "SandboxFailed",
    "SandboxUnavailable",
    "Support",
    "check",
]
