"""Images of a core: their pixels while a sequence has them, and the encoder's rows for them within a number of bytes.

A sequence is admitted once the images that it has still to read are encoded; those whose K/V is cached need no encoder.
Encoding is a step of its own, between steps of the model: a share of a decode's time where sequences decode, so that
their streams go on. Rows are found by the digest in a placeholder's id, and pinned while a sequence has them to read;
the least recently used ones without a pin are evicted, and encoded again from the pixels where a sequence needs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.request import SequenceState
from engine.core.step import Row
from engine.multimodal.encoders import ImageEncoder
from engine.multimodal.image_input import (
    FIRST_IMAGE_ID,
    columns_of,
    has_images,
    image_tokens,
    key_of,
    lookup_keys,
    offset_of,
)

Ints = NDArray[np.int64]

DECODE_SHARE = 0.35  # of a decode's time that encoding may take between two of them
IDLE_S = 0.05  # of encoding between two looks at the mailbox, while nothing decodes
UNCLAIMED_S = 60.0  # that an image is kept before a sequence has it: that comes with the next command


@dataclass(slots=True, eq=False)
class _Image:
    """One image, of `tiles` tiles with `columns` squares each. `rows`: the encoder's output, (features, hidden_size).
    `holders`: ids of sequences with it."""

    digest: bytes
    tiles: int
    columns: int
    size: int
    pixels: bytes | None
    added_at: float
    rows: Tensor | None = None
    holders: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Pin:
    """Images that a sequence has still to read, up to position `end`."""

    seq: SequenceState
    images: tuple[_Image, ...]
    end: int

    @property
    def holds(self) -> bool:
        return self.seq.job is not None and self.seq.cursor <= self.end


class EncoderCache:
    """See the module. Without an `encoder` no sequence has images. `capacity`: bytes of rows that are kept."""

    def __init__(
        self,
        encoder: ImageEncoder | None = None,
        capacity: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._encoder = encoder
        self._capacity = capacity
        self._clock = clock
        self._images: dict[int, _Image] = {}  # by each of their keys
        self._by_digest: dict[bytes, _Image] = {}  # the least recently used first
        self._held: dict[int, set[_Image]] = {}  # by sequence
        self._pins: dict[int, _Pin] = {}  # by sequence
        self._queue: list[_Image] = []  # to be encoded, in order
        self._run: Generator[None, None, Tensor] | None = None  # of the first of them
        self._unit_s = 0.0  # of the last unit
        self.encoded_tokens = 0
        self.encoder_seconds = 0.0

    # -- images and sequences

    def add(self, digest: bytes, tiles: int, size: int, pixels: bytes) -> None:
        """Takes the pixels of an image, (tiles, size, width, 3) uint8, for a sequence that comes next."""
        now = self._clock()
        known = self._by_digest.get(digest)
        if known is not None:
            known.pixels, known.added_at = pixels, now
            return
        for each in [each for each in self._by_digest.values() if now - each.added_at > UNCLAIMED_S]:
            if not each.holders:
                each.pixels = None
                if each.rows is None:
                    self._forget(each)
        image = self._by_digest[digest] = _Image(digest, tiles, columns_of(tiles, size, len(pixels)), size, pixels, now)
        self._images.update(dict.fromkeys(lookup_keys(digest), image))

    def hold(self, sequence: int, tokens: Sequence[int]) -> None:
        """Keeps the pixels of the images among `tokens` until the sequence is released."""
        if self._encoder is None or not has_images(tokens):
            return
        held = self._held.setdefault(sequence, set())
        for key in {key_of(token) for token in image_tokens(tokens)}:
            image = self._images[key]
            image.holders.add(sequence)
            held.add(image)

    def release(self, sequence: int) -> None:
        """Ends the claims of a sequence that is closed."""
        self._pins.pop(sequence, None)
        for image in self._held.pop(sequence, ()):
            image.holders.discard(sequence)
            if image.holders:
                continue
            self._dequeue(image)
            image.pixels = None
            if image.rows is None:
                self._forget(image)

    def of(self, tokens: Sequence[int]) -> list[tuple[bytes, int, int, bytes]]:
        """Returns digest, tiles, size and pixels of the images among a sequence's tokens, once each."""
        if self._encoder is None or not has_images(tokens):
            return []
        found = dict.fromkeys(self._images[key_of(token)] for token in image_tokens(tokens))
        return [(each.digest, each.tiles, each.size, each.pixels) for each in found if each.pixels is not None]

    # -- the scheduler's side

    def encodes(self, seq: SequenceState) -> bool:
        """Returns whether the sequence has to wait for the encoder, which then has its images in its queue. Else their
        rows are pinned until they are read."""
        if seq.id not in self._held:
            return False
        places = [at for at in range(seq.cursor, len(seq.tokens)) if seq.tokens[at] >= FIRST_IMAGE_ID]
        if not places:
            return False
        images = tuple(dict.fromkeys(self._images[key_of(seq.tokens[at])] for at in places))
        pinned = {each for id, pin in self._pins.items() if id != seq.id and pin.holds for each in pin.images}
        if pinned and sum(map(self._nbytes, pinned.union(images))) > self._capacity:
            return True  # others read their images first
        self._pins[seq.id] = _Pin(seq, images, places[-1] + 1)
        for image in images:
            self._by_digest[image.digest] = self._by_digest.pop(image.digest)
            if image.rows is None and image not in self._queue:
                self._queue.append(image)
        return self.is_waiting(seq.id)

    def is_waiting(self, sequence: int) -> bool:
        """Returns whether an image that the sequence needs is in the encoder's queue."""
        pin = self._pins.get(sequence) if self._queue else None
        return pin is not None and any(image.rows is None for image in pin.images)

    def rows(self, ids: Sequence[int]) -> Tensor:
        """Returns the encoder's rows for placeholders: (len(ids), hidden_size)."""
        parts, first = [], 0
        for at in range(1, len(ids) + 1):
            if at < len(ids) and self._images[key_of(ids[at])] is self._images[key_of(ids[first])]:
                continue
            image = self._images[key_of(ids[first])]
            assert image.rows is not None, "a sequence runs before its images are encoded"
            last = len(image.rows) - 1  # forged keys reach no row of another image
            parts.append(image.rows[[min(offset_of(id), last) for id in ids[first:at]]])
            first = at
        return torch.cat(parts)

    def whole(self, seq: SequenceState, end: int) -> int:
        """Returns where a chunk of a sequence, from its cursor to `end` at most, has to end: none ends within an image
        whose tokens attend to each other. Where the cursor is within it or at its start, the chunk has all of it, be it
        longer than was asked for."""
        if self._encoder is None or not self._encoder.whole_tokens or end <= seq.cursor:
            return end
        for start, stop in seq.image_spans():
            if start < end < stop:
                return start if start > seq.cursor else stop
        return end

    def mutual(self, seq: SequenceState, start: int, end: int) -> list[tuple[int, int]]:
        """Returns the spans of images whose tokens attend to each other, and are among positions [start, end)."""
        if self._encoder is None or not self._encoder.whole_tokens:
            return []
        return [span for span in seq.image_spans() if span[0] < end and start < span[1]]

    def rotary(self, rows: Sequence[Row], positions: Ints, starts: Sequence[int]) -> Ints | None:
        """Returns the positions by which tokens rotate in a model whose images have rows and columns in the text model
        (M-RoPE, Qwen2-VL section 2.1): (3, tokens), by frame, row and column; None where no sequence has an image.

        An image begins at one position, the next token comes after its longer edge, and text counts on from there: so
        they depend on the tokens before alone. `positions` (tokens,) are those in the sequences, `starts` where each
        row's begin.
        """
        if self._encoder is None or not self._encoder.planar or not any(row.seq.image_spans() for row in rows):
            return None
        out = np.repeat(positions[None], 3, 0)
        for at, row in enumerate(rows):
            own, found, shift = positions[starts[at] : starts[at + 1]], out[:, starts[at] : starts[at + 1]], 0
            for start, end in row.seq.image_spans():
                first, image = row.seq.tokens[start], self._images[key_of(row.seq.tokens[start])]
                within = (own >= start) & (own < end)
                places = own[within] - start + offset_of(first)
                found[:, within] = start + shift
                found[1, within] += places // image.columns
                found[2, within] += places % image.columns
                shift += max(image.tiles, image.columns) - (end - start)
                found[:, own >= end] = own[own >= end] + shift
        return out

    # -- the encoder's steps

    @property
    def pending(self) -> bool:
        """Returns whether an image waits to be encoded."""
        return bool(self._queue)

    @torch.inference_mode()
    def advance(self, decode_s: float | None) -> None:
        """Encodes for a part of `decode_s`, the seconds of a decode that waits meanwhile; None: of nothing that does.
        At least one unit runs. No step may be in flight."""
        if not self._queue or self._encoder is None:
            return
        began = at = self._clock()
        ends = began + (IDLE_S if decode_s is None else DECODE_SHARE * decode_s)
        while self._queue:
            self._unit(self._encoder, self._queue[0])
            now = self._clock()
            self._unit_s, at = now - at, now
            if now + self._unit_s > ends:
                break
        self.encoder_seconds += at - began

    # -- parts

    def _unit(self, encoder: ImageEncoder, image: _Image) -> None:
        """Runs the next unit of an image, the first of the queue."""
        if self._run is None:
            assert image.pixels is not None, "no sequence has the image any more"
            pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
            self._run = encoder.encode(pixels.view(image.tiles, image.size, -1, 3))
        try:
            next(self._run)
        except StopIteration as done:
            self._run, image.rows = None, done.value
            self.encoded_tokens += len(done.value)
            del self._queue[0]
            self._evict()
        if encoder.device.type == "cuda":
            torch.cuda.synchronize(encoder.device)

    def _evict(self) -> None:
        """Drops the rows used least recently, of images that no sequence has still to read."""
        self._pins = {id: pin for id, pin in self._pins.items() if pin.holds}
        pinned = {image for pin in self._pins.values() for image in pin.images}
        encoded = [image for image in self._by_digest.values() if image.rows is not None]
        total = sum(map(self._nbytes, encoded))
        for image in encoded:
            if total <= self._capacity:
                return
            if image not in pinned:
                total -= self._nbytes(image)
                image.rows = None
                if not image.holders:
                    self._forget(image)

    def _nbytes(self, image: _Image) -> int:
        assert self._encoder is not None
        squares = image.tiles * image.columns
        return squares * self._encoder.features * self._encoder.hidden_size * self._encoder.dtype.itemsize

    def _dequeue(self, image: _Image) -> None:
        if image in self._queue:
            if image is self._queue[0]:
                self._run = None
            self._queue.remove(image)

    def _forget(self, image: _Image) -> None:
        del self._by_digest[image.digest]
        for key in lookup_keys(image.digest):
            if self._images.get(key) is image:
                del self._images[key]
