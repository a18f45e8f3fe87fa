"""The masked-diffusion model that a server has, and the thread that runs its passes.

One thread runs the passes of all texts in turn, so that neither the event loop nor the engines wait for one. Knows
nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from app.config import BadSetting
from engine.errors import EngineError, QueueFull
from engine.model.loader import name_of

if TYPE_CHECKING:  # torch comes with it, which a server without such a model need not have in this process
    from engine.diffusion import MaskedDiffusionModel

MAX_RUNS = 4  # texts at once: their passes take turns
_RETRY_AFTER_S = 1.0

T = TypeVar("T")


class DiffusionService:
    """A loaded model and its thread. `close` it once no text is in the making."""

    def __init__(self, model: MaskedDiffusionModel, name: str) -> None:
        from engine.builder import use_threads

        self.model, self.name, self.runs = model, name, 0
        # One CPU thread of torch's: such models are small, and a second one waits longer than it helps.
        self._thread = ThreadPoolExecutor(1, "diffusion", use_threads, (1, model.decoder.device))

    @staticmethod
    async def load(path: str, device: str) -> DiffusionService:
        """Loads the model of the setting.

        Raises:
            BadSetting: it is no masked-diffusion model, or cannot be read.
        """

        def load() -> DiffusionService:
            from engine.diffusion import load_masked_diffusion

            return DiffusionService(load_masked_diffusion(path, device=device), name_of(path))

        try:
            return await asyncio.to_thread(load)
        except EngineError as error:
            raise BadSetting(f"diffusion_model cannot be loaded: {error}") from None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def about(self) -> dict[str, Any]:
        """Returns as JSON (so Any) what a client has to know of the model."""
        model = self.model
        return {
            "model": self.name,
            "mask": model.mask,
            "ends": [model.tokenizer.token_text(token) for token in model.eos_token_ids],
            "block_sizes": list(model.block_sizes),
            "answer_tokens": model.answer_tokens,
            "max_tokens": model.decoder.spec.max_position_embeddings,
        }

    @contextmanager
    def run(self) -> Iterator[None]:
        """Holds a place for a text as long as it is in the making.

        Raises:
            QueueFull: there are `MAX_RUNS` already.
        """
        if self.runs >= MAX_RUNS:
            message = (
                f"{MAX_RUNS} texts are being filled already; accepted: up to {MAX_RUNS} at once. Try again shortly."
            )
            raise QueueFull(message, _RETRY_AFTER_S)
        self.runs += 1
        try:
            yield
        finally:
            self.runs -= 1

    async def compute(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which runs in the model's thread; cancelled, not at all or to its end."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
