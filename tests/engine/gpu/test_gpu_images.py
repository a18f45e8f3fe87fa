"""Images on the Triton kernels, on a GPU or a pretended one: their rows reach the layers as torch's do."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import GREEDY, Engine, EngineConfig, Span
from tests.engine.multimodal import seeing
from tests.engine.multimodal.test_image_sequences import asked

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.slow]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return seeing.write(tmp_path_factory.mktemp("gpu"), seeing.build(text={**sizes, "tie_word_embeddings": False}))


async def test_rows_of_images_reach_the_layers(checkpoint: Path) -> None:
    common = {"model": str(checkpoint), "kv_blocks": 40, "max_running": 2}
    found = []
    for settings in ({"device": "cpu", "dtype": "float32", "kernels": "torch"}, {"device": "cuda", "dtype": "float16"}):
        async with await Engine.start(EngineConfig(**common, **settings)) as engine:  # type: ignore[arg-type]  # fields of it
            tokens = await asked(engine, "What?", 21)
            async with await engine.open(tokens) as seq:
                out = await seq.generate_all(Span(GREEDY, max_tokens=2, logprobs=20, ignore_eos=True))
            found.append([dict(each.top) for each in out.logprobs])
    for one, other in zip(*found, strict=True):
        shared = sorted(one.keys() & other.keys(), key=lambda token: -one[token])[:5]
        assert len(shared) == 5 and max(abs(one[token] - other[token]) for token in shared) < 0.05
