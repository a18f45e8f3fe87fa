"""Number of random cases that a kernel is tried on."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, settings


def examples(count: int) -> settings:
    """`count` in the interpreter. On a GPU nearly every case is a kernel to compile, so half as many are tried, and one
    that fails is shown as it was found."""
    on_gpu = torch.cuda.is_available()
    return settings(
        max_examples=count // 2 if on_gpu else count,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
        phases=[Phase.explicit, Phase.reuse, Phase.generate] if on_gpu else list(Phase),
    )
