"""Text to token ids and back, for a model directory. Knows nothing of weights or scheduling.

Three ideas. Control tokens (special ones, and the tags of thinking and tool calls) arise only where the caller or the
chat template writes them, never from the text of a message: `encode` cannot produce them unless asked, and
`apply_chat_template` keeps them apart. Decoding is a matter of bytes (see detokenizer.py). And a long text keeps no
other thread waiting: the library works in Rust without the interpreter's lock, searches here go piece by piece, and a
text that cannot fit is refused by its size, or by its number of tokens before they become a list.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.errors import ChatTemplateError, CheckpointError, ContextLengthExceeded
from engine.model.chat_template import ChatTemplate
from engine.model.detokenizer import Detokenizer
from engine.model.loader import Json, is_gguf, read_json
from engine.model.quantization.gguf_file import GgufFile
from engine.model.quantization.gguf_tokenizer import tokenizer_of
from engine.multimodal.image_input import FIRST_IMAGE_ID
from engine.multimodal.prompt_images import IMAGE, images_of, with_images

# Tokens that some checkpoints do not mark as special, but that steer a model all the same.
TAGS = re.compile(r"<[|｜].*[|｜]>|</?(think|tool_calls?|tool_responses?|tools)>|\[/?(INST|TOOL_\w+)\]")
ROLES_THAT_MAY_WRITE_TAGS = {"assistant"}  # its earlier thinking and calls may come back as text; never special tokens
_WINDOW = 1 << 18  # characters that are searched in one go
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A `tokenizers` tokenizer with the settings of its model directory.

    Raises:
        CheckpointError: its decoder is of a kind that cannot be read as bytes.
    """

    def __init__(self, source: str, config: Json, eos_token_ids: Iterable[int] = ()) -> None:
        """`source` is the text of tokenizer.json, `config` that of tokenizer_config.json."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(source)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"tokenizer.json cannot be read: {error}.") from error
        data: dict[str, Any] = json.loads(source)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)
        self._named = _named_tokens(config)
        self.bos_token_id = self.token_id(self._named["bos_token"]) if "bos_token" in self._named else None
        eos = self.token_id(self._named["eos_token"]) if "eos_token" in self._named else None
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if eos is None else [eos])]))
        self._control = {
            token.content: id for id, token in added.items() if token.special or TAGS.fullmatch(token.content)
        }
        self._longest_control = max(map(len, self._control), default=0)
        self._marked = _alternatives(self._control)
        self._marked_special = _alternatives(text for text, id in self._control.items() if id in self._special)
        self.image_mark = IMAGE, IMAGE  # what the template writes for an image, and the text around it in its place
        self._nonce = secrets.token_hex(12)
        self._plain, self._alias_ids = self._without_control(data, added)
        self._bytes = _ByteReader(data.get("decoder"))
        self.max_token_bytes = _max_token_bytes(data)
        self.strips_first_space = self._bytes.strips_first_space
        self._bos_prefix = self._find_bos_prefix(config)
        self._templates = _templates(config.get("chat_template"), self._named)
        self._token_bytes = lru_cache(maxsize=None)(self._read_bytes)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Loads the tokenizer of a model directory or a GGUF file.

        Raises:
            CheckpointError: there is none, or it cannot be read.
        """
        if is_gguf(path):
            return cls(*tokenizer_of(GgufFile(path)))
        file = path / "tokenizer.json"
        if not file.is_file():
            found = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (path / name).is_file()]
            hint = f" It has {found[0]}: convert it with transformers' save_pretrained." if found else ""
            raise CheckpointError(f"{path} has no tokenizer.json.{hint}")
        config = dict(read_json(path / "tokenizer_config.json", required=False))
        for name, token in read_json(path / "special_tokens_map.json", required=False).items():
            config.setdefault(name, token)
        template = path / "chat_template.jinja"
        if template.is_file():
            config["chat_template"] = template.read_text(encoding="utf-8")
        eos = []
        for name in ("generation_config.json", "config.json"):
            value = read_json(path / name, required=False).get("eos_token_id")
            eos += value if isinstance(value, list) else [] if value is None else [value]
        return cls(file.read_text(encoding="utf-8"), config, eos)

    @property
    def control_ids(self) -> frozenset[int]:
        """Returns the ids that `encode` gives for no text: special tokens, and the tags of thinking and tool calls."""
        return frozenset(self._control.values())

    @property
    def chat_template(self) -> str | None:
        """Returns the source of the default chat template."""
        return self._templates["default"].source if "default" in self._templates else None

    @property
    def tool_template(self) -> str | None:
        """Returns the source of the chat template that is used with tools."""
        return self._templates["tool_use"].source if "tool_use" in self._templates else self.chat_template

    def encode(
        self, text: str, *, special: bool = False, bos: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """Encodes `text` to token ids.

        Args:
            special: control-token strings in the text become their ids; otherwise they never do, and are ordinary text.
            bos: begin with the tokenizer's prefix of a plain text (often BOS, sometimes nothing).
            max_tokens: refuse a text of more.

        Raises:
            ContextLengthExceeded: it has more than `max_tokens`.
        """
        prefix = self._bos_prefix if bos else []
        if special:
            return prefix + self._ids(self._tokenizer, text, max_tokens)
        return prefix + self._encode_plain(text, max_tokens)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Decodes `ids`; with `skip_special`, special tokens leave no trace."""
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return detokenizer.push(list(ids)) + detokenizer.flush()

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token by its exact string, such as "</think>"; None if it is not one token."""
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, id: int) -> bytes:
        """Returns the bytes of the token; empty for ids that no token has."""
        return self._token_bytes(id)

    def token_text(self, id: int) -> str:
        """Returns `token_bytes` as text, with U+FFFD for parts of characters."""
        return self._token_bytes(id).decode("utf-8", errors="replace")

    def is_special(self, id: int) -> bool:
        """Returns whether `decode` skips it."""
        return id in self._special

    def visible_bytes(self, id: int, skip_special: bool) -> bytes:
        """For the detokeniser: see TokenBytes there."""
        return b"" if skip_special and id in self._special else self._token_bytes(id)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[int]:
        """Renders `messages` (OpenAI's format) with the model's chat template, and encodes the prompt.

        Only the template's own text can become a control token. Where a message or a tool contains such a string, it is
        set aside while the template runs and comes back as ordinary text. `variables` reach the template, for example
        `enable_thinking=False`. Any: messages and tools are JSON.

        Raises:
            ChatTemplateError: the model has no template, or the template refuses the messages.
        """
        return self.encode_chat(messages, tools, variables, add_generation_prompt=add_generation_prompt)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, object],
        *,
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """`apply_chat_template`, for a prompt of at most `max_tokens`.

        A part `{"type": "image", "image": ImageInput}` of a message's content becomes the image's own tokens where the
        template writes `image_mark`.

        Raises:
            ChatTemplateError: the model has no template, or the template refuses the messages, or leaves out an image.
            ContextLengthExceeded: the prompt has more than `max_tokens`.
        """
        hidden = _Hidden(max_tokens)
        safe_messages = [self._set_aside(m, m.get("role"), hidden) for m in messages]
        safe_tools = None if tools is None else [self._set_aside(tool, None, hidden) for tool in tools]
        text = self._template(tools).render(
            safe_messages,
            tools=safe_tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
        images, (mark, around) = list(images_of(messages)), self.image_mark
        text = text.replace(mark, around) if images else text
        if not hidden:
            ids = self.encode(text, special=True, max_tokens=max_tokens)
            return with_images(ids, self._control.get(mark), images, max_tokens)
        text = self._replaced(self._marked, lambda match: self._alias(self._control[match.group()]), text)
        for placeholder, original in hidden.items():
            text = text.replace(placeholder, original)
        ids = self._ids(self._plain, text, max_tokens, len(self._alias(self.vocab_size)))
        found = [self._alias_ids.get(id, id) for id in ids]
        return with_images(found, self._control.get(mark), images, max_tokens)

    def _template(self, tools: list[dict[str, Any]] | None) -> ChatTemplate:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise ChatTemplateError(
                "the model has no chat template (neither tokenizer_config.json nor "
                "chat_template.jinja has one); use the completions API, or add a template."
            )
        return self._templates["default"]

    def _set_aside(self, value: Any, role: object, hidden: _Hidden) -> Any:
        """Copies JSON `value` with control-token strings replaced by placeholders, which `hidden` collects.

        Placeholders are plain letters and digits, so that a template may trim, split or quote around them.
        """
        if isinstance(value, str):
            marked = self._marked_special if role in ROLES_THAT_MAY_WRITE_TAGS else self._marked

            def replace(match: re.Match[str]) -> str:
                placeholder = f"{self._nonce}p{self._control[match.group()]}q"
                hidden.add(placeholder, match.group())
                return placeholder

            return self._replaced(marked, replace, value)
        if isinstance(value, Mapping):
            return {self._set_aside(k, role, hidden): self._set_aside(v, role, hidden) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._set_aside(item, role, hidden) for item in value]
        return value

    def _alias(self, id: int) -> str:
        return f"{self._nonce}a{id}z"

    def _without_control(
        self,
        data: dict[str, Any],
        added: Mapping[int, AddedToken],
    ) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """Copies the tokenizer so that it reads control tokens as ordinary text, and each by a secret alias instead.

        The aliases behave like the tokens they stand for (stripping, splitting), so a text with aliases is tokenised
        exactly as the text with the tokens would be. Returns the copy and its alias ids -> real ids.
        """
        control = set(self._control.values())
        for token in data.get("added_tokens", []):
            token["special"] = token["id"] in control
        plain = tokenizers.Tokenizer.from_str(json.dumps(data))
        plain.no_padding()
        plain.no_truncation()
        plain.encode_special_tokens = True
        ids = sorted(control)
        plain.add_tokens(
            [
                AddedToken(
                    self._alias(id),
                    single_word=added[id].single_word,
                    lstrip=added[id].lstrip,
                    rstrip=added[id].rstrip,
                    normalized=False,
                    special=False,
                )
                for id in ids
            ]
        )
        aliases = {plain.token_to_id(self._alias(id)): id for id in ids}
        return plain, {alias: id for alias, id in aliases.items() if alias is not None}

    def _encode_plain(self, text: str, max_tokens: int | None = None) -> list[int]:
        ids = self._ids(self._plain, text, max_tokens)
        found = self._special.intersection(ids)
        if found and (match := next(self._found(self._marked, text), None)):
            # The vocabulary itself holds the special string as one piece: break it where it stands.
            cut = match.start() + max(1, len(match.group()) // 2)
            return self._encode_plain(text[:cut]) + self._encode_plain(text[cut:])
        return ids

    def _ids(
        self, tokenizer: tokenizers.Tokenizer, text: str, max_tokens: int | None, longest_alias: int = 0
    ) -> list[int]:
        """Encodes `text`.

        Raises:
            ContextLengthExceeded: `text` has more than `max_tokens`, by its tokens or already by its bytes.
        """
        if max_tokens is not None and self.max_token_bytes is not None:
            size, most = len(text.encode("utf-8", "replace")), max(self.max_token_bytes, longest_alias) * max_tokens
            if size > most:
                raise ContextLengthExceeded(
                    f"This model's maximum context length is {max_tokens} tokens; the prompt has {size} bytes, and no "
                    f"token has more than {self.max_token_bytes}; accepted: at most {most} bytes."
                )
        # As a batch: for a single text the library keeps the interpreter's lock, and all other threads waiting.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {max_tokens} tokens, and the prompt has {len(encoding)}; "
                f"accepted: at most {max_tokens - 1}, as an answer needs some."
            )
        ids: list[int] = encoding.ids
        return ids

    def _replaced(self, pattern: re.Pattern[str], replace: Callable[[re.Match[str]], str], text: str) -> str:
        """`pattern.sub(replace, text)`, piece by piece."""
        if len(text) <= _WINDOW:
            return pattern.sub(replace, text)
        made, at = list[str](), 0
        for match in self._found(pattern, text):
            made += (text[at : match.start()], replace(match))
            at = match.end()
        return "".join((*made, text[at:]))

    def _found(self, pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
        """`pattern.finditer(text)`, piece by piece. The pattern is one of control tokens, and so are its matches."""
        start = 0
        while start < len(text):
            end = start + _WINDOW  # a match that begins before it is looked for in full
            for match in pattern.finditer(text, start, end + self._longest_control):
                if match.start() >= end:
                    break
                yield match
                end = max(end, match.end())
            start = end

    def _find_bos_prefix(self, config: Json) -> list[int]:
        if config.get("add_bos_token") is False:
            return []
        with_special = self._tokenizer.encode("a", add_special_tokens=True).ids
        without = self._tokenizer.encode("a", add_special_tokens=False).ids
        for start in range(len(with_special) - len(without) + 1):
            if with_special[start : start + len(without)] == without:
                if start == 0:
                    break
                return with_special[:start]
        return [self.bos_token_id] if config.get("add_bos_token") is True and self.bos_token_id is not None else []

    def _read_bytes(self, id: int) -> bytes:
        token = self._tokenizer.id_to_token(id) if 0 <= id < FIRST_IMAGE_ID else None
        return b"" if token is None else self._bytes.read(token)


class _Hidden(dict[str, str]):
    """Placeholders and the strings that they stand for. As text each of those is a token or more."""

    def __init__(self, max_tokens: int | None) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._count = 0

    def add(self, placeholder: str, original: str) -> None:
        """Adds a placeholder.

        Raises:
            ContextLengthExceeded: there are more than a context has tokens.
        """
        self[placeholder] = original
        self._count += 1
        if self._max_tokens is not None and self._count > self._max_tokens:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self._max_tokens} tokens, and the messages spell out control "
                f"tokens more often; accepted: at most {self._max_tokens - 1}, as an answer needs some."
            )


def _alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


_FORMS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 4, "Prepend": 1}  # how many times shorter each may make a text
_WHOLE = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})  # pre-tokenizers that keep all of it


def _max_token_bytes(data: Json) -> int | None:
    """Returns the most bytes of a text that one token may have; None where the tokenizer may leave out or join without
    end (white space, unknown characters), so that no number of bytes bounds the number of tokens from below."""
    shrink = 1
    for step in _steps(data.get("normalizer"), "normalizers"):
        pattern = step.get("pattern", {}).get("String")
        if step["type"] == "Replace" and pattern and len(step["content"].encode()) >= len(pattern.encode()):
            continue
        if step["type"] not in _FORMS:
            return None
        shrink *= _FORMS[step["type"]]
    before = _steps(data.get("pre_tokenizer"), "pretokenizers")
    if any(step["type"] not in _WHOLE or step.get("behavior") == "Removed" for step in before):
        return None
    added = data.get("added_tokens", [])
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    vocab = [entry if isinstance(entry, str) else entry[0] for entry in data["model"]["vocab"]]
    known = set(vocab)
    if any(step["type"] == "ByteLevel" for step in before):
        letters, longest = known.issuperset(_byte_level_table()), max(map(len, vocab))
    else:
        letters = data["model"].get("byte_fallback") is True and "<0xFF>" in known
        longest = max(len(token.encode()) for token in vocab)
    return shrink * max(longest, *(len(token["content"].encode()) for token in added), 1) if letters else None


def _steps(part: Json | None, inner: str) -> list[Json]:
    """Lists the parts of a normalizer or pre-tokenizer, as tokenizer.json has them."""
    if part is None:
        return []
    return [step for each in part[inner] for step in _steps(each, inner)] if part["type"] == "Sequence" else [part]


def _named_tokens(config: Json) -> dict[str, str]:
    """Returns `bos_token`, `eos_token` and the like, written as a string or as an object."""
    named = {}
    for name, token in config.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            named[name] = content
    return named


def _templates(source: object, tokens: Mapping[str, str]) -> dict[str, ChatTemplate]:
    if source is None:
        return {}
    if isinstance(source, str):
        return {"default": ChatTemplate(source, tokens)}
    if isinstance(source, list) and all(isinstance(entry, dict) for entry in source):
        return {entry["name"]: ChatTemplate(entry["template"], tokens) for entry in source}
    raise CheckpointError("tokenizer_config.json: chat_template is neither a string nor a list of named templates.")


class _ByteReader:
    """Decodes a vocabulary entry to its bytes, as read from the tokenizer's decoder description (JSON).

    Byte-level vocabularies write bytes as printable characters (GPT-2's table); SentencePiece ones write a space as
    U+2581 and rare bytes as `<0x0A>`.
    """

    def __init__(self, decoder: Json | None) -> None:
        steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = {step["type"] for step in steps}
        unknown = kinds - {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        if unknown or not kinds:
            raise CheckpointError(
                f"tokenizer.json: its decoder ({', '.join(sorted(unknown)) or 'none'}) is not "
                "supported; supported: byte-level and SentencePiece vocabularies."
            )
        self._byte_level = _byte_level_table() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self._replaced = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]
        self._replaced += [(s["replacement"], " ") for s in steps if s["type"] == "Metaspace"]
        self.strips_first_space = any(
            (s["type"] == "Strip" and s["start"] == 1) or (s["type"] == "Metaspace" and s["prepend_scheme"] != "never")
            for s in steps
        )

    def read(self, token: str) -> bytes:
        """Returns the bytes of one vocabulary entry."""
        if self._byte_level is not None:
            if all(character in self._byte_level for character in token):
                return bytes(self._byte_level[character] for character in token)
            return token.encode()
        if self._byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match.group(1), 16)])
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token.encode()


def _byte_level_table() -> dict[str, int]:
    """Maps characters to bytes: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
