"""A server of ours whose model plays a script: tokenizer, scheduler, sampler, masks, parsers and streams are real.

A user's message carries the script, as `play(Turn(…), …)` writes it. The model's n-th answer after that message is the
n-th turn; after the last one it says "Done." `ScriptedRunner` stands before the runner of a tiny checkpoint with random
weights and the bundled model's tokenizer and template: it runs the model and replaces its logits by one-hot rows. A
mask may forbid the script's next token: the answer then ends as soon as the mask allows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import EngineConfig, builder
from engine.builder import EngineParts
from engine.core.step import Step
from engine.model.decoder import Decoder
from engine.model.runner import Runner
from engine.model.tokenizer import Tokenizer
from tests.app.conftest import PEBBLE, Server, serving
from tests.app.gate import GatedEmbedder
from tests.clients.script import MARK, Turn

DONE = Turn("Done.")
CONTEXT = 32_768  # tokens: Claude Code's and Codex's prompts fit
CERTAIN = 60.0  # a logit that no temperature up to 2 and no penalty makes unlikely
_CLOSED = "<think>\n\n</think>\n\n"
_FALLBACK = {"<|im_end|>": 30.0, '"': 20.0, "}": 15.0, "]": 10.0, "0": 5.0}  # ends what a mask has begun


def write_checkpoint(path: Path) -> Path:
    """Writes one layer of 32 dimensions with the bundled model's tokenizer, template and 32,768 positions."""
    path.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "ponder.json"):
        (path / name).write_bytes((PEBBLE / name).read_bytes())
    bundled = json.loads((PEBBLE / "config.json").read_text(encoding="utf-8"))
    kept = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "rope_theta", "tie_word_embeddings")
    config = {name: bundled[name] for name in kept} | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "attention_bias": False,
        "rms_norm_eps": 1e-6, "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": CONTEXT, "torch_dtype": "float32",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    layer, random = "model.layers.0", torch.Generator().manual_seed(0)
    square = {
        f"{layer}.{name}.weight": torch.randn(32, 32, generator=random) * 0.1
        for name in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
            "mlp.up_proj", "mlp.down_proj",
        )
    }  # fmt: skip
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    ones = {f"{layer}.{name}.weight": torch.ones(32) for name in norms} | {"model.norm.weight": torch.ones(32)}
    embedding = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], 32, generator=random)}
    save_file(square | ones | embedding, str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


class ScriptedRunner:
    """Runs the model, and gives the logits of the script's next token."""

    queues = False

    def __init__(self, runner: Runner, tokenizer: Tokenizer) -> None:
        self.vocab_size = runner.vocab_size
        self._runner, self._tokenizer = runner, tokenizer
        self._fallback = torch.zeros(self.vocab_size)
        for text, logit in _FALLBACK.items():
            self._fallback[tokenizer.encode(text, special=True)[0]] = logit
        self._begin = tokenizer.encode("<|im_start|>assistant\n", special=True)
        self._planned: dict[tuple[int, int], tuple[str, list[int]]] = {}  # by sequence and its answer's first position

    def run(self, step: Step) -> torch.Tensor:
        logits = self._runner.run(step)
        at = 0
        for row in step.rows:
            for position in range(max(row.start, row.logits_from), row.end):
                logits[at] = self._row(row.seq.id, row.seq.tokens[: position + 1])
                at += 1
        return logits

    def _row(self, sequence: int, tokens: list[int]) -> torch.Tensor:
        start = _end_of_last(self._begin, tokens)
        if (sequence, start) not in self._planned:
            played = _turn_of(self._tokenizer.decode(tokens[:start], skip_special=False))
            if self._tokenizer.decode(tokens[start:], skip_special=False) == _CLOSED:  # by the template
                played = _CLOSED + played.split("</think>\n\n", 1)[1]
            whole = self._tokenizer.encode(f"{played}<|im_end|>", special=True)
            self._planned[sequence, start] = played, whole
        played, whole = self._planned[sequence, start]
        if tokens[start:] == whole[: len(tokens) - start]:
            rest = whole[len(tokens) - start :]
        elif played.startswith(written := self._tokenizer.decode(tokens[start:], skip_special=False)):
            rest = self._tokenizer.encode(f"{played[len(written) :]}<|im_end|>", special=True)
        else:  # a mask or a budget forced something else
            rest = []
        row = self._fallback.clone()
        if rest:
            row[rest[0]] = CERTAIN
        return row


def _end_of_last(begin: list[int], tokens: list[int]) -> int:
    """Returns the position after the last turn's beginning; the end where there is none, as in a plain completion."""
    for at in range(len(tokens) - len(begin), -1, -1):
        if tokens[at] == begin[0] and tokens[at : at + len(begin)] == begin:
            return at + len(begin)
    return len(tokens)


def _turn_of(prompt: str) -> str:
    """Returns the text of the turn that the script in `prompt` has next."""
    end = len(prompt)
    while (end := prompt.rfind(MARK, 0, end)) >= 0:
        script = prompt[end + len(MARK) :]
        with suppress(json.JSONDecodeError):  # else it is a script within a script
            turns, _ = json.JSONDecoder().raw_decode(script)
            number = script.count("<|im_start|>assistant") - 1
            return (Turn(**turns[number]) if number < len(turns) else DONE).text_of_turn()
    return DONE.text_of_turn()


def assemble(config: EngineConfig) -> EngineParts:
    """Builds an engine's parts with a `ScriptedRunner` before the model's own."""
    real, tokenizer = builder._runner, Tokenizer.load(Path(config.model))

    def scripted(given: EngineConfig, decoder: Decoder, *rest: Any) -> ScriptedRunner:
        return ScriptedRunner(real(given, decoder, *rest), tokenizer)

    with mock.patch.object(builder, "_runner", scripted):
        return builder.build(config)


@dataclass
class Requests:
    """ASGI middleware that notes method, path and status of every reply."""

    app: ASGIApp
    seen: list[tuple[str, str, int]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.seen.append((scope["method"], scope["path"], message["status"]))
            await send(message)

        await self.app(scope, receive, noted)


@contextmanager
def scripted_server(folder: Path) -> Iterator[tuple[Server, Requests]]:
    """Serves the scripted model with all three APIs and embeddings, and notes what is asked of it."""
    model = write_checkpoint(folder / "scripted")
    embedder = GatedEmbedder()
    with serving(model, folder / "data", embedder, assemble=assemble, ollama_api=True, kv_blocks=16_384) as server:
        server.app.dependency_overrides.clear()
        assert server.app.middleware_stack is not None
        requests = Requests(server.app.middleware_stack)
        server.app.middleware_stack = requests
        yield server, requests
