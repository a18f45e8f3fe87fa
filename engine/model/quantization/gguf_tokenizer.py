"""Tokenizers from GGUF metadata, as the tokenizer.json and tokenizer_config.json that `Tokenizer` reads.

Two kinds: GPT-2's byte-level BPE, split by the pattern that `tokenizer.ggml.pre` names, and SentencePiece's, in which
merges follow from the scores of pieces. Knows nothing of weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import CheckpointError
from engine.model.quantization.gguf_file import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # of tokenizer.ggml.token_type; 1 is a normal token
MAX_TOKEN_BYTES = 1024  # merges are found by cutting a token at each of its characters

# Patterns of the tokenizers' own publications, by the names that llama.cpp gives them.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(tail: str, digits: str) -> str:
    """Returns a pattern that splits at changes of case, of Tekken and GPT-4o."""
    words = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{tail}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{tail}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


PATTERNS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (_QWEN2,)),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", _GPT2)),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "tekken": (_cased("", r"\p{N}"),),
    "gpt-4o": (_cased("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"),),
}
# A word of the vocabulary is never cut, and a text begins with BOS if the file does not say otherwise.
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"}
_NORMALIZED = {"qwen2", "deepseek-r1-qwen"}  # their tokenizers bring texts to NFC first

# Control tokens that end an answer, which files do not always name as such.
_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>",
    "<|end_of_turn|>",
}  # fmt: skip


def tokenizer_of(file: GgufFile) -> tuple[str, dict[str, Any], list[int]]:
    """Returns the texts that `Tokenizer` takes: tokenizer.json, the object of tokenizer_config.json, and the ids that
    end an answer.

    Raises:
        CheckpointError: there is no vocabulary, it contradicts itself, or its kind or pattern is not supported.
    """
    return _Vocabulary(file).parts()


class _Vocabulary:
    def __init__(self, file: GgufFile) -> None:
        self._file, self._metadata = file, file.metadata
        self._kind = self._get("model", str, None)
        if self._kind not in ("gpt2", "llama"):
            raise self._refuse("model", self._kind, "gpt2, llama")
        tokens = self._list("tokens", str)
        types = self._list("token_type", int) if "tokenizer.ggml.token_type" in self._metadata else [1] * len(tokens)
        if len(types) != len(tokens):
            raise self._refuse("token_type", f"{len(types)} types", f"one for each of {len(tokens)} tokens")
        while tokens and types[len(tokens) - 1] == _UNUSED:  # padding, so that the embedding has a round size
            tokens = tokens[:-1]
        self._tokens, self._types = tokens, types[: len(tokens)]
        self._ids = {token: id for id, token in enumerate(tokens)}
        if len(self._ids) != len(tokens):
            twice = next(token for id, token in enumerate(tokens) if self._ids[token] != id)
            raise self._refuse("tokens", f"a list with {twice!r} twice", "each token once")
        if not tokens or max(len(token.encode()) for token in tokens) > MAX_TOKEN_BYTES:
            raise self._refuse("tokens", "empty or has a longer one", f"tokens of up to {MAX_TOKEN_BYTES} bytes")
        self._pre = self._pattern_name() if self._kind == "gpt2" else ""

    def parts(self) -> tuple[str, dict[str, Any], list[int]]:
        model = self._byte_level() if self._kind == "gpt2" else self._sentencepiece()
        whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": self._added(), **model}
        return json.dumps(whole, ensure_ascii=False), self._config(), self._ends()

    def _byte_level(self) -> dict[str, Any]:
        merges = []
        for merge in self._list("merges", str) if "tokenizer.ggml.merges" in self._metadata else ():
            cut = merge.find(" ", 1)
            first, second = merge[: max(0, cut)], merge[cut + 1 :]
            if f"{first}{second}" not in self._ids or first not in self._ids or second not in self._ids:
                raise self._refuse("merges", f"a list with {merge[:100]!r}", "pairs of tokens that make a token")
            merges.append([first, second])
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in PATTERNS[self._pre]
        ]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return {
            "normalizer": {"type": "NFC"} if self._pre in _NORMALIZED else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {**self._bpe(merges), "ignore_merges": self._pre in _WHOLE_WORDS},
        }

    def _sentencepiece(self) -> dict[str, Any]:
        missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in self._ids]
        if missing:
            raise self._refuse("tokens", f"a list without <0x{missing[0]:02X}>", "a token for every byte")
        scores = self._list("scores", float)
        if len(scores) < len(self._tokens):
            raise self._refuse("scores", f"{len(scores)} scores", f"one for each of {len(self._tokens)} tokens")
        prefix = self._get("add_space_prefix", bool, True)
        normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
        normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        model = self._bpe(self._merges_by_score(scores))
        unknown = self._token("unknown_token_id")
        return {
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {**model, "unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
        }

    def _merges_by_score(self, scores: Sequence[float]) -> list[list[str]]:
        """Returns all pairs of pieces that make a piece, the best score first: SentencePiece joins such neighbours in
        that order."""
        pieces = {token for token, kind in zip(self._tokens, self._types, strict=True) if kind == 1}
        found = []
        for id, token in enumerate(self._tokens):
            if token not in pieces:
                continue
            for cut in range(1, len(token)):
                first, second = token[:cut], token[cut:]
                if first in pieces and second in pieces:
                    found.append((-scores[id], id, self._ids[first], self._ids[second]))
        found.sort()
        return [[self._tokens[first], self._tokens[second]] for _, _, first, second in found]

    def _bpe(self, merges: list[list[str]]) -> dict[str, Any]:
        return {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": self._ids, "merges": merges,
        }  # fmt: skip

    def _added(self) -> list[dict[str, Any]]:
        special = {_CONTROL, _UNKNOWN}
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": id, "content": token, **plain, "special": kind in special}
            for id, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if token and (kind in special or kind == _USER_DEFINED)
        ]

    def _config(self) -> dict[str, Any]:
        names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
        names["pad_token"] = "padding_token_id"
        config: dict[str, Any] = {ours: self._token(theirs) for ours, theirs in names.items()}
        bos = self._get("add_bos_token", bool, self._kind == "llama" or self._pre in _WHOLE_WORDS)
        config["add_bos_token"] = bos
        if self._get("add_eos_token", bool, False):
            raise self._refuse("add_eos_token", True, "False: a prompt is continued, not ended")
        templates = {
            key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": value
            for key, value in self._metadata.items()
            if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
        }
        if templates:
            config["chat_template"] = [{"name": name, "template": value} for name, value in templates.items()]
            if not all(isinstance(value, str) for value in templates.values()):
                raise self._refuse("chat_template", "no string", "Jinja templates")
        return config

    def _ends(self) -> list[int]:
        named = (self._token(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
        control = {token for token, kind in zip(self._tokens, self._types, strict=True) if kind == _CONTROL}
        return [self._ids[token] for token in dict.fromkeys([*named, *sorted(_ENDS & control)]) if token is not None]

    def _pattern_name(self) -> str:
        name = self._get("pre", str, None)
        if name not in PATTERNS:
            raise self._refuse("pre", name, ", ".join(PATTERNS))
        return str(name)

    def _token(self, key: str) -> str | None:
        """Returns the token that a key names by its number, if it is there."""
        id = self._get(key, int, None)
        if id is None:
            return None
        if not 0 <= id < len(self._tokens):
            raise self._refuse(key, id, f"0 to {len(self._tokens) - 1}")
        return self._tokens[id]

    def _get(self, key: str, kind: type, default: Any) -> Any:  # Any: a value of `kind` or the default
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not default and type(value) is not kind:
            raise self._refuse(key, value, f"a {kind.__name__}")
        return value

    def _list(self, key: str, kind: type) -> list[Any]:  # Any: values of `kind`
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, tuple) or not all(type(each) is kind for each in value):
            raise self._refuse(key, "missing" if value is None else "of another kind", f"an array of {kind.__name__}")
        return list(value)

    def _refuse(self, key: str, value: object, accepted: str) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) < 200 else f"{shown[:200]}…"
        return CheckpointError(f"{self._file.path}: tokenizer.ggml.{key} is {shown}; supported: {accepted}.")
