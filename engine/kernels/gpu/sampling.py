"""Samples tokens without sorting: a Gumbel race over the whole row, and a check whether the filters keep its winner.

The winner of the race among all tokens, if the filters keep it, also wins among the kept. So the winner is found first,
by all chunks of a row at once; it is kept or not by the number and the mass of the tokens likelier than it. If it is
not, nothing as unlikely is kept either, and the race is run again among the likelier ones. Few tokens need to be read:
the largest of every block of 64 tokens bounds from below the logits that can be kept.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from engine.kernels.gpu.dots import INTERPRETED
from engine.kernels.gpu.variants import Variant

BLOCK = 64  # tokens of which the largest logit is noted
CHUNK = 2048  # tokens of one program of the race: fixed, as sums depend on it
TILE = 128  # blocks that are looked at together
RACE_WARPS = 4
SETTLE_WARPS = 16
SETTLE_REGISTERS = 128  # without a limit the assembler takes 64 at times, and spills

_SLACK = tl.constexpr(1.0001)  # masses summed in another order may differ by that much
_ROUGH = tl.constexpr(4096)  # precision of the lower bound, in adjacent floats
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def adjust_kernel(logits, entries, starts, stride, block: tl.constexpr):
    """One program changes one row, stage by stage. See `sampling.adjust` for the arguments."""
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    for stage in tl.static_range(4):
        first = tl.load(starts + row * 4 + stage)
        last = tl.load(starts + row * 4 + stage + 1)
        start = first
        while start < last:
            at = start + tl.arange(0, block)
            inside = at < last
            token = tl.load(entries + 2 * at, mask=inside, other=0)
            value = tl.load(entries + 2 * at + 1, mask=inside, other=0).to(tl.float32, bitcast=True)
            x = tl.load(line + token, mask=inside, other=0.0).to(tl.float32)
            if stage == 1:
                x = tl.where(x > 0, x / value, x * value)
            elif stage == 3:
                x = tl.full(x.shape, float("-inf"), tl.float32)
            else:
                x += value
            tl.store(line + token, x, mask=inside)
            start += block
        tl.debug_barrier()  # the next stage may change the same logits, from other threads


@triton.jit
def race_kernel(
    logits, parameters, floats, winners, vocabulary, stride, chunks, chunk: tl.constexpr, each: tl.constexpr
):
    """One program looks at one chunk of one row. It writes the largest logit, the mass relative to that, the race's
    winner there with its score relative to that, and the largest of each block.

    `floats` is (rows, 3 * chunks + blocks): largest, masses, scores, blocks' largest; `winners` (rows, chunks) int32.
    """
    row = tl.program_id(1)
    at = tl.program_id(0)
    scale, _, _, _, key = _parameters(parameters, row)
    blocks: tl.constexpr = chunk // each
    block = at * blocks + tl.arange(0, blocks)
    x, token = _block_logits(logits + row.to(tl.int64) * stride, block, block == block, vocabulary, each)
    peaks = tl.max(x, 1)
    largest = tl.max(peaks, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    score = x
    mass = 0.0
    if (scale > 0) & (largest < float("inf")):
        mass = tl.sum(tl.sum(_mass(x, base, scale), 1), 0)
        score = (x - base) * scale + _gumbel(key, block, each)
    best = tl.max(tl.max(score, 1), 0)
    winner = tl.min(tl.min(tl.where(score == best, token, _NONE), 1), 0)
    note = floats + row * (chunks * (3 + blocks))
    tl.store(note + at, largest)
    tl.store(note + chunks + at, mass)
    tl.store(note + 2 * chunks + at, best)
    tl.store(note + 3 * chunks + block, peaks)
    tl.store(winners + row * chunks + at, tl.minimum(winner, vocabulary - 1))


@triton.jit
def settle_kernel(
    logits,
    parameters,
    floats,
    winners,
    hot,
    tokens,
    vocabulary,
    stride,
    chunks,
    max_chunks: tl.constexpr,
    chunk: tl.constexpr,
    each: tl.constexpr,
    tile: tl.constexpr,
):
    """One program ends the race of one row: `tokens` (rows,) int64 are the winners that the filters let through.

    `hot` (rows, blocks) int32 is scratch: the blocks that may have kept tokens. `max_chunks` is a power of 2.
    """
    row = tl.program_id(0)
    scale, top_k, top_p, reach, key = _parameters(parameters, row)
    blocks: tl.constexpr = chunk // each
    note = floats + row * (chunks * (3 + blocks))
    at = tl.arange(0, max_chunks)
    inside = at < chunks
    largests = tl.load(note + at, mask=inside, other=float("-inf"))
    largest = tl.max(largests, 0)
    scores = largests
    sampled = (scale > 0) & (largest > float("-inf")) & (largest < float("inf"))  # else the first of the largest wins
    if sampled:
        scores = tl.load(note + 2 * chunks + at, mask=inside, other=float("-inf")) + (largests - largest) * scale
    best = tl.max(scores, 0)
    first = tl.min(tl.where(scores == best, at, chunks - 1), 0)
    token = tl.load(winners + row * chunks + first)
    filtered = (top_k > 0) | (top_p < 1) | (reach > float("-inf"))
    if filtered & sampled:
        masses = tl.load(note + chunks + at, mask=inside, other=0.0)
        whole = tl.sum(masses * tl.exp2((largests - largest) * (scale * _LOG2E)), 0)
        line = logits + row.to(tl.int64) * stride
        # Kept tokens lie at or above `floor`; the blocks that have such tokens are the hot ones.
        index = tl.arange(0, max_chunks * blocks)
        peaks = tl.load(note + 3 * chunks + index, mask=index < chunks * blocks, other=float("-inf"))
        lower = _lower_bound(peaks, largest, scale, top_k, top_p * whole * _SLACK, top_p < 1)
        lowest = largest + reach
        cut = (top_k > 0) | (reach > float("-inf"))
        summed = cut & (top_p < 1)  # top-p needs the mass of all that min-p and top-k leave
        floor = tl.where(summed & (top_k == 0), lowest, tl.maximum(lower, lowest))
        is_hot = (peaks >= floor) & (peaks > float("-inf"))
        count = tl.sum(is_hot.to(tl.int32), 0)
        my_hot = hot + row * (chunks * blocks)
        tl.store(my_hot + tl.cumsum(is_hot.to(tl.int32), 0) - 1, index, mask=is_hot)
        tl.debug_barrier()  # other threads read them
        if summed:
            if top_k > 0:
                floor = _kth_largest(line, my_hot, count, vocabulary, floor, largest, top_k, tile, each)
            _, whole = _above(line, my_hot, count, vocabulary, float("-inf"), floor, largest, scale, tile, each)
        x = tl.load(line + token).to(tl.float32)
        kept = False
        while not kept:
            if x >= floor:
                number, mass = _above(line, my_hot, count, vocabulary, x, floor, largest, scale, tile, each)
                kept = ((number < top_k) | (top_k == 0)) & ((mass < top_p * whole) | (top_p >= 1)) | (number == 0)
            if not kept:
                last = token
                token = _race_above(line, my_hot, count, vocabulary, x, floor, largest, scale, key, tile, each)
                kept = token == last  # never; but a GPU must not hang where logits are no numbers
                x = tl.load(line + token).to(tl.float32)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _parameters(parameters, row):
    """Reads scale (0: greedy), top_k, top_p, reach, key of a row. See `sampling.pack`."""
    mine = parameters + row * 8
    scale = tl.load(mine).to(tl.float32, bitcast=True)
    top_k = tl.load(mine + 1)
    top_p = tl.load(mine + 2).to(tl.float32, bitcast=True)
    reach = tl.load(mine + 3).to(tl.float32, bitcast=True)
    low = tl.load(mine + 4).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(mine + 5).to(tl.uint32, bitcast=True).to(tl.uint64)
    return scale, top_k, top_p, reach, (high << 32) | low


@triton.jit
def _block_logits(line, block, inside, vocabulary, each: tl.constexpr):
    """Loads logits and tokens (blocks, each) of blocks (blocks,); -inf outside of the vocabulary."""
    token = block[:, None] * each + tl.arange(0, each)[None, :]
    x = tl.load(line + token, mask=inside[:, None] & (token < vocabulary), other=float("-inf")).to(tl.float32)
    return x, token


@triton.jit
def _hot_logits(line, hot, first, count, vocabulary, tile: tl.constexpr, each: tl.constexpr):
    """Loads the same of the hot blocks from `first` on, and the indices of these blocks."""
    at = first + tl.arange(0, tile)
    block = tl.load(hot + at, mask=at < count, other=0)
    x, token = _block_logits(line, block, at < count, vocabulary, each)
    return x, token, block


@triton.jit
def _mass(x, base, scale):
    return tl.exp2((x - base) * (scale * _LOG2E))


@triton.jit
def _gumbel(key, block, each: tl.constexpr):
    """Computes standard Gumbel numbers for blocks' tokens: token t has word t % 4 of Philox4x32-10 for counter t // 4.

    -log(-log(1 - u)), where small u decide the winner: they are distinct down to 2 ** -32.
    """
    counter = block[:, None] * (each // 4) + tl.arange(0, each // 4)[None, :]
    first, second, third, fourth = tl.randint4x(key, counter)
    word = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
    u = (word.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25)))  # 1 - u would lose a small u's bits
    waited = tl.where(u < 0.015625, series, -_LN2 * _log2(tl.maximum(1 - u, 2.9802322387695312e-08)))
    return -_LN2 * _log2(waited)


@triton.jit
def _log2(x):
    """By the device's one instruction, right to 2 ** -22: `tl.log2` is a hundred, and there are two to a token."""
    if INTERPRETED:
        return tl.log2(x)
    return libdevice.fast_log2f(x)


@triton.jit
def _ordered(x):
    """Maps floats to int32 of the same order, and such an int32 to the float's bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float(ordered):
    image = ordered.to(tl.int32)
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _lower_bound(peaks, largest, scale, top_k, mass, has_top_p):
    """Returns a logit below which nothing is kept by top-k or, where there is none, by top-p, that keeps up to `mass`.

    As many blocks as have a largest logit of at least v, so many tokens have, and at least those logits' mass.
    """
    weights = tl.where(top_k > 0, 1.0, _mass(peaks, largest, scale))
    wanted = tl.where(top_k > 0, top_k.to(tl.float32), mass)
    low = _ordered(tl.full((), float("-inf"), tl.float32)).to(tl.int64)
    high = _ordered(largest).to(tl.int64) + 1
    if (top_k > 0) | has_top_p:
        while high - low > _ROUGH:
            middle = (low + high) >> 1
            enough = tl.sum(tl.where(peaks >= _float(middle), weights, 0.0), 0) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    return _float(low)


@triton.jit
def _kth_largest(line, hot, count, vocabulary, floor, largest, k, tile: tl.constexpr, each: tl.constexpr):
    """Returns the k-th largest of the logits in hot blocks, at least k of which are `floor` or more; else `floor`."""
    low = _ordered(floor).to(tl.int64)
    high = _ordered(largest).to(tl.int64) + 1
    if count <= tile:
        x, _, _ = _hot_logits(line, hot, 0, count, vocabulary, tile, each)
        while high - low > 1:
            middle = (low + high) >> 1
            enough = tl.sum(tl.sum((x >= _float(middle)).to(tl.int32), 1), 0) >= k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    else:
        while high - low > 1:
            middle = (low + high) >> 1
            number = tl.zeros((tile,), tl.int32)
            first = 0
            while first < count:
                x, _, _ = _hot_logits(line, hot, first, count, vocabulary, tile, each)
                number += tl.sum((x >= _float(middle)).to(tl.int32), 1)
                first += tile
            enough = tl.sum(number, 0) >= k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
    return _float(low)


@triton.jit
def _above(line, hot, count, vocabulary, x, floor, largest, scale, tile: tl.constexpr, each: tl.constexpr):
    """Returns the number of tokens likelier than `x` and at least `floor`, and their mass relative to the likeliest."""
    number = tl.zeros((tile,), tl.int32)
    mass = tl.zeros((tile,), tl.float32)
    first = 0
    while first < count:  # rather than `for`: Triton 3.6 interprets no range up to a computed number
        others, _, _ = _hot_logits(line, hot, first, count, vocabulary, tile, each)
        above = (others > x) & (others >= floor)
        number += tl.sum(above.to(tl.int32), 1)
        mass += tl.sum(tl.where(above, _mass(others, largest, scale), 0.0), 1)
        first += tile
    return tl.sum(number, 0), tl.sum(mass, 0)


@triton.jit
def _race_above(line, hot, count, vocabulary, x, floor, largest, scale, key, tile: tl.constexpr, each: tl.constexpr):
    """Returns the winner among the tokens likelier than `x` and at least `floor`; there is one."""
    best = tl.full((), float("-inf"), tl.float32)
    winner = tl.full((), _NONE, tl.int32)
    first = 0
    while first < count:
        others, token, block = _hot_logits(line, hot, first, count, vocabulary, tile, each)
        runs = (others > x) & (others >= floor)
        score = tl.where(runs, (others - largest) * scale + _gumbel(key, block, each), float("-inf"))
        here = tl.max(tl.max(score, 1), 0)
        who = tl.min(tl.min(tl.where(runs & (score == here), token, _NONE), 1), 0)
        better = (here > best) | (winner == _NONE)
        best = tl.where(better, here, best)
        winner = tl.where(better, who, winner)
        first += tile
    return tl.minimum(winner, vocabulary - 1)


def variants() -> list[Variant]:
    """Lists logits in fp32 and bf16; vocabularies of up to 32,768, 131,072 and 262,144 tokens."""
    sizes = {"vocabulary": "i32", "stride": "i32", "chunks": "i32"}
    scratch = {"parameters": "*i32", "floats": "*fp32", "winners": "*i32"}
    fixed = {"chunk": CHUNK, "each": BLOCK}
    even = frozenset({"vocabulary", "stride"})
    found = []
    for dtype in ("fp32", "bf16"):
        logits = {"logits": f"*{dtype}"}
        types = {**logits, "entries": "*i32", "starts": "*i32", "stride": "i32"}
        found.append(Variant(f"sampling adjust {dtype}", adjust_kernel, types, {"block": 1024}, stages=1))
        types = {**logits, **scratch, **sizes}
        found.append(
            Variant(f"sampling race {dtype}", race_kernel, types, fixed, warps=RACE_WARPS, stages=1, divisible=even)
        )
    types = {"logits": "*fp32", **scratch, "hot": "*i32", "tokens": "*i64", **sizes}
    found += [
        Variant(
            f"sampling settle {chunks}",
            settle_kernel,
            types,
            {**fixed, "max_chunks": chunks, "tile": TILE},
            warps=SETTLE_WARPS,
            stages=1,
            divisible=even,
            max_registers=SETTLE_REGISTERS,
        )
        for chunks in (16, 64, 128)
    ]
    return found
