"""Disaggregated prefill (DistServe, Zhong et al. 2024): which server reads a prompt for the one that decodes, and when
a request is refused because no server would answer it in time (early rejection, Mooncake, Qin et al. 2024).

Both requests go out at once: the decode server waits for K/V that comes while the prompt is still read. Predictions are
learnt from the answers that pass, by server. Knows nothing of connections.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_NEW = 0.2  # weight of a newer measurement
_KEPT = 0.95  # weight of older answers against a newer one, in the fit of TPOT
BYTES_PER_TOKEN = 4.0  # of a prompt whose tokens are not known
# Fields that make a prompt's tokens, or say when it is read. The others are the decoding server's.
_PROMPT_FIELDS = frozenset(
    {"model", "messages", "prompt", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "thinking",
     "priority", "deadline_s"}
)  # fmt: skip
# Fields whose answers go on from several prompts, or read the whole prompt's logits.
_APART = frozenset({"strategy", "strategy_options", "echo", "kv_transfer_params"})


@dataclass(slots=True)
class PrefillLoad:
    """Prompts that a prefill server reads for this router, and its rate while it reads."""

    clock: Callable[[], float] = time.monotonic
    prompts: int = 0  # that are not read yet
    tokens: int = 0  # of these
    per_s: float | None = None  # tokens; None: not known yet
    _since: float = 0.0  # from then on it has read without a pause, or since the last prompt ended

    def begin(self, tokens: int) -> None:
        if not self.prompts:
            self._since = self.clock()
        self.prompts += 1
        self.tokens += tokens

    def end(self, tokens: int, *, read: bool) -> None:
        """Ends a prompt, which the server did read or not."""
        now = self.clock()
        self.prompts -= 1
        self.tokens -= tokens
        if read and now > self._since:
            rate = tokens / (now - self._since)
            self.per_s = rate if self.per_s is None else self.per_s + _NEW * (rate - self.per_s)
        self._since = now

    def ttft_s(self, tokens: int) -> float | None:
        """Predicts the seconds until a prompt of so many tokens is read, after those before it; None: not known."""
        return None if self.per_s is None else (self.tokens + tokens) / self.per_s


@dataclass(slots=True)
class DecodeLoad:
    """Time per output token of a decode server, by the requests that it answers at once: a line through the answers so
    far, the newer ones weighing more."""

    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # of weights, n, s, n², n·s

    def answered(self, in_flight: float, seconds: float) -> None:
        """Learns the seconds between tokens of an answer, beside so many others and itself."""
        added = (1.0, in_flight, seconds, in_flight * in_flight, in_flight * seconds)
        self._sums = [_KEPT * old + new for old, new in zip(self._sums, added, strict=True)]

    def tpot_s(self, in_flight: int) -> float | None:
        """Predicts the seconds between tokens with so many requests; None: not known. More never seem faster."""
        weight, n, s, nn, ns = self._sums
        if not weight:
            return None
        spread = nn - n * n / weight
        slope = max(0.0, (ns - n * s / weight) / spread) if spread > 1e-9 else 0.0
        return max(0.0, s / weight + slope * (in_flight - n / weight))


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits of an operator in seconds; None: no request is refused for it."""

    max_ttft_s: float | None = None
    max_tpot_s: float | None = None

    def refusal(self, ttft_s: float | None, tpot_s: float | None) -> tuple[str, float] | None:
        """Returns the objective that would be missed and the seconds beyond it; None: neither."""
        for name, limit, predicted in (("TTFT", self.max_ttft_s, ttft_s), ("TPOT", self.max_tpot_s, tpot_s)):
            if limit is not None and predicted is not None and predicted > limit:
                return name, predicted - limit
        return None


NO_OBJECTIVES = Objectives()


def is_disaggregable(path: str, fields: Mapping[str, Any]) -> bool:
    """Returns whether one server may read the request's prompt for another: one prompt, and one answer."""
    several = fields.get("n") not in (None, 1) or (
        isinstance(prompt := fields.get("prompt"), list) and not all(isinstance(each, int) for each in prompt)
    )
    known = path in ("/v1/chat/completions", "/v1/completions")
    return known and not several and not any(fields.get(name) for name in _APART)


def estimated_tokens(body: bytes) -> int:
    """Returns about how many tokens the prompt of a request has, by its size."""
    return math.ceil(len(body) / BYTES_PER_TOKEN)


def prefill_request(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the request that has a server read the prompt and keep its K/V."""
    prompt = {name: value for name, value in fields.items() if name in _PROMPT_FIELDS}
    return {**prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


def decode_request(fields: Mapping[str, Any], host: str, port: int) -> dict[str, Any]:
    """Returns the request for the server that decodes: the client's own, and where the K/V comes from."""
    where = {"do_remote_prefill": True, "remote_host": host, "remote_port": port}
    return {**fields, "kv_transfer_params": where}
