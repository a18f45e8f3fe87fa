"""Tokenizers made on the spot: a byte-level one and a SentencePiece-like one, both too small for whole characters."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. user assistant system tool name arguments value",
    "Größe, naïve café, Ελλάδα, Москва, 日本語, 中文字符, 한국어, 🙂🚀, e\u0301 a\u0308 combining",
    "def main():\n    return {'key': [1, 2, 3]}\n\n\n\t# a comment   with    spaces",
] * 4
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>", "[MASK]"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


@lru_cache(maxsize=1)
def byte_level() -> str:
    """tokenizer.json of a byte-level BPE of 420 tokens with special tokens and tags, as Qwen's are built."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in TAGS])
    return tokenizer.to_str()


@lru_cache(maxsize=1)
def sentencepiece(prepend: bool = True) -> str:
    """tokenizer.json of a BPE with byte fallback, as Llama 2's are built: U+2581 for spaces, BOS put in front."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        limit_alphabet=60,
        show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    data: dict[str, Any] = json.loads(tokenizer.to_str())
    data["added_tokens"] = [
        {**token, "rstrip": token["content"] == "</s>"} for token in data["added_tokens"] if token["id"] < 3
    ]
    return json.dumps(data)
