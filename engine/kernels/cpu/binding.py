"""Bindings of the native kernels: the C structures, and weights packed into the layouts that they read.

The structures mirror decoder.cpp, experts.h and linear.h. Knows shapes and pointers, nothing of checkpoints or
requests.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.buffers import empty_bytes
from engine.model.quantization.quantized_weight import AffineWeight


class WeightStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tiles", "bias", "scales")),
        *((name, ctypes.c_int64) for name in ("out", "in", "eight_bits_from")),
        *((name, ctypes.c_int64) for name in ("group", "bits", "zero", "minimums")),
    ]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        *((name, WeightStruct) for name in ("qkv", "o", "gate_up", "down")),
        ("mixture", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("attention_pre", "attention_post", "mlp_pre", "mlp_post")),
        *((name, ctypes.c_void_p) for name in ("head_norm", "query_norm", "key_norm", "taps")),
        *((name, ctypes.c_int64) for name in ("window", "rotation", "tap_count")),
    ]


class ModelStruct(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("layers", "hidden", "heads", "kv_heads", "width", "intermediate", "gated")
        ),
        *((name, ctypes.c_float) for name in ("eps", "scale", "residual")),
        ("layer", ctypes.POINTER(LayerStruct)),
        *((name, ctypes.c_int64) for name in ("centred", "parallel")),
    ]


class StepStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "table_stride", "block_size", "threads")),
        *((name, ctypes.c_void_p) for name in ("slots", "starts", "contexts", "tables")),
        *((name, ctypes.c_void_p) for name in ("rotations", "states", "caches", "scales")),
        *((name, ctypes.c_int64) for name in ("cache_elements", "scale_elements", "conv_elements")),
        *((name, ctypes.c_void_p) for name in ("layer_tables", "layer_slots")),
        *((name, ctypes.c_void_p) for name in ("branch_starts", "branch_slots")),
        ("branch_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("adapters", "updates", "last_keys")),
    ]


class LowRankStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("rank", "first", "blocks")),
    ]


class UpdatesStruct(ctypes.Structure):
    _fields_ = [("parts", ctypes.POINTER(LowRankStruct)), ("count", ctypes.c_int64)]


class ExpertStruct(ctypes.Structure):
    _fields_ = [("gate_up", WeightStruct), ("down", WeightStruct)]


class RouterStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "selection_bias", "shared_gate")),
        *((name, ctypes.c_int64) for name in ("experts", "per_token", "sigmoid", "normalised")),
        *((name, ctypes.c_int64) for name in ("groups", "groups_per_token", "group_summed")),
        *((name, ctypes.c_float) for name in ("scaling", "min_weight")),
    ]


class MixtureStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("experts", "hidden", "gated")),
        ("expert", ctypes.POINTER(ExpertStruct)),
        ("router", RouterStruct),
    ]


class NativeLinear:
    """A linear layer of the kernels, called with activations; `_keep` says where its numbers lie."""

    def __init__(self, library: ctypes.CDLL, out: int, width: int, bias: Tensor | None) -> None:
        self._library = library
        self.out, self.width = out, width
        self._bias = None if bias is None else bias.float().contiguous()

    def _keep(self, tiles: Tensor, scales: Tensor | None, *grouped: int, eight_bits_from: int = 0) -> None:
        """`grouped`: columns of a scale, bits, the code of zero and whether there are minimums; or nothing."""
        self.tiles, self._scales = tiles, scales  # the structure only points to them
        addresses = tiles.data_ptr(), pointer(self._bias), pointer(scales)
        self.struct = WeightStruct(*addresses, self.out, self.width, eight_bits_from, *(grouped or (0, 0, 0, 0)))

    def __call__(self, x: Tensor) -> Tensor:
        """(tokens, in) bfloat16 -> (tokens, out) bfloat16."""
        return self._apply(x, None, 0.0, False, torch.bfloat16)

    def logits(self, x: Tensor, norm: Tensor, eps: float, *, centred: bool) -> Tensor:
        """RMSNorm with weight `norm` (in,) float32, or LayerNorm if `centred`, then the product: (tokens, in) ->
        (tokens, out) float32."""
        return self._apply(x, norm, eps, centred, torch.float32)

    def _apply(self, x: Tensor, norm: Tensor | None, eps: float, centred: bool, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        to = torch.empty(len(x), self.out, dtype=dtype)
        if len(x):
            code = self._library.ponder_linear(
                ctypes.c_void_p(x.data_ptr()),
                ctypes.c_int64(len(x)),
                ctypes.c_void_p(pointer(norm)),
                ctypes.c_float(eps),
                ctypes.c_int(centred),
                ctypes.byref(self.struct),
                ctypes.c_void_p(to.data_ptr()),
                ctypes.c_int(dtype == torch.float32),
                ctypes.c_int(torch.get_num_threads()),
            )
            if code:
                raise MemoryError("No memory for the activations of a step.")
        return to


class TiledWeight(NativeLinear):
    """A linear layer of the kernels: `weight` (out, in) bfloat16, in a multiple of 32, and `bias` (out,) or None.

    A `gated` one joins gate and up, each of out / 2 rows, alternating in blocks of 16, as the kernels want them.
    `eight_bits_from` rounds the weight to int8, with a scale for each output, where in is a multiple of 64: steps of
    fewer tokens than that keep activations of 16 bits, and those of more round them to 8.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        eight_bits_from: int | None = None,
    ) -> None:
        if gated:
            weight, bias = alternating(weight), None if bias is None else alternating(bias)
        out, width = weight.shape
        super().__init__(library, out, width, bias)
        if eight_bits_from is not None and self.width % 64 == 0:
            self._keep(*int8_tiles(weight), eight_bits_from=eight_bits_from)
        else:
            self._keep(self._bfloat16_tiles(weight.contiguous()), None)

    def _bfloat16_tiles(self, weight: Tensor) -> Tensor:
        out, width = ctypes.c_int64(self.out), ctypes.c_int64(self.width)
        tiles = empty_bytes(self._library.ponder_packed_bytes(out, width))
        self._library.ponder_pack(ctypes.c_void_p(weight.data_ptr()), out, width, ctypes.c_void_p(tiles.data_ptr()))
        return tiles


class GroupedWeight(NativeLinear):
    """A linear layer of the kernels on `weight`, (out, in) with in a multiple of 32, and `bias` (out,) or None. `gated`
    as for a TiledWeight."""

    def __init__(
        self, library: ctypes.CDLL, weight: AffineWeight, bias: Tensor | None = None, *, gated: bool = False
    ) -> None:
        out, width = weight.codes.shape
        super().__init__(library, out, width, bias if bias is None or not gated else alternating(bias))
        tiles, scales, group = grouped_blocks(weight, gated=gated)
        self._keep(tiles, scales, group, weight.bits, weight.zero, weight.minimums is not None)


def grouped_blocks(weight: AffineWeight, *, gated: bool) -> tuple[Tensor, Tensor, int]:
    """Packs a weight as grouped.cpp reads it: blocks of 32 outputs as bytes (blocks, groups, bytes of a group), scales
    of the rows (out,), filled up to whole blocks, and the columns of a group, at most 128."""
    out, width = weight.codes.shape
    group = next(size for size in (weight.group, 128, 64, 32) if size <= 128 and weight.group % size == 0)
    groups, blocks, repeats = width // group, -(-out // 32), weight.group // group
    parts = [weight.scales] if weight.minimums is None else [weight.scales, weight.minimums]
    parts = [(alternating(part) if gated else part).repeat_interleave(repeats, 1) for part in parts]
    rows = torch.stack([part.abs().amax(1) for part in parts]).amax(0).clamp_(min=1e-30)
    scales = F.pad(rows, (0, -out % 32))
    header = 64 * len(parts)
    tiles = empty_bytes(blocks * groups * (header + group * weight.bits * 4)).view(blocks, groups, -1)
    for index, part in enumerate(parts):
        shares = F.pad(part / rows[:, None], (0, 0, 0, -out % 32)).half()
        tiles[..., 64 * index : 64 * (index + 1)] = (
            shares.view(blocks, 32, groups).transpose(1, 2).contiguous().view(torch.uint8)
        )
    order = alternating(torch.arange(out)) if gated else torch.arange(out)
    for first in range(0, out, 8192):  # a vocabulary at once would take its memory several times over
        codes = F.pad(weight.codes[order[first : first + 8192]], (0, 0, 0, -min(8192, out - first) % 32))
        lines = codes.view(-1, 2, 16, width // 4, 4).permute(0, 3, 1, 2, 4)  # block, line, half, output, column
        if weight.bits == 4:
            lines = lines[:, 0::2] | lines[:, 1::2] << 4
        made = lines.reshape(len(lines), groups, -1)
        tiles[first // 32 : first // 32 + len(made), :, header:] = made
    return tiles, scales, group


def int8_tiles(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packs `weight` (out, in) as int8 tiles (out / 32, in / 64, 2, 16, 16, 4), and each row's scale."""
    out, width = weight.shape
    tiles = empty_bytes(-(-out // 32) * 32 * width).view(torch.int8).view(-1, width // 64, 2, 16, 16, 4)
    scales = torch.empty(out)
    for first in range(0, out, 8192):  # a vocabulary in float32 at once would take four times the memory
        part = weight[first : first + 8192].float()
        scale = part.abs().amax(1).clamp_(min=1e-30) / 127
        scales[first : first + 8192] = scale
        whole = F.pad((part / scale[:, None]).round_().to(torch.int8), (0, 0, 0, -len(part) % 32))
        blocks = whole.view(-1, 2, 16, width // 64, 16, 4).permute(0, 3, 1, 4, 2, 5)
        tiles[first // 32 : first // 32 + len(blocks)] = blocks
    return tiles, scales


def alternating(joined: Tensor) -> Tensor:
    """Rearranges gate above up to blocks of 16 of each in turn."""
    return joined.unflatten(0, (2, -1, 16)).transpose(0, 1).flatten(0, 2)


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
