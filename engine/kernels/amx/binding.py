"""How Python calls the kernels: the C structures, and weights packed into tiles.

The structures mirror decoder.cpp and linear.h. Knows shapes and pointers, nothing of checkpoints or requests.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.pages import empty_bytes


class WeightStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tiles", "bias", "scales")),
        *((name, ctypes.c_int64) for name in ("out", "in")),
    ]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        *((name, WeightStruct) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_pre", "attention_post", "mlp_pre", "mlp_post")),
        *((name, ctypes.c_void_p) for name in ("head_norm", "query_norm", "key_norm")),
        *((name, ctypes.c_int64) for name in ("window", "rotation")),
    ]


class ModelStruct(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("layers", "hidden", "heads", "kv_heads", "width", "intermediate", "gated")
        ),
        *((name, ctypes.c_float) for name in ("eps", "scale", "residual")),
        ("layer", ctypes.POINTER(LayerStruct)),
    ]


class StepStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "rows", "table_stride", "block_size", "threads")),
        *((name, ctypes.c_void_p) for name in ("slots", "starts", "contexts", "tables")),
        *((name, ctypes.c_void_p) for name in ("rotations", "states", "caches")),
        ("cache_elements", ctypes.c_int64),
    ]


class TiledWeight:
    """A linear layer of the kernels: `weight` (out, in) bfloat16, in a multiple of 32, and `bias` (out,) or None.

    A `gated` one joins gate and up, each of out / 2 rows, alternating in blocks of 16, as the kernels want them.
    """

    def __init__(
        self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False
    ) -> None:
        self._library = library
        self.out, self.width = weight.shape
        if gated:
            weight, bias = alternating(weight), None if bias is None else alternating(bias)
        weight = weight.contiguous()
        self._bias = None if bias is None else bias.float().contiguous()
        self._tiles = empty_bytes(library.ponder_packed_bytes(ctypes.c_int64(self.out), ctypes.c_int64(self.width)))
        library.ponder_pack(
            ctypes.c_void_p(weight.data_ptr()),
            ctypes.c_int64(self.out),
            ctypes.c_int64(self.width),
            ctypes.c_void_p(self._tiles.data_ptr()),
        )
        self.struct = WeightStruct(self._tiles.data_ptr(), pointer(self._bias), None, self.out, self.width)

    def __call__(self, x: Tensor) -> Tensor:
        """(tokens, in) bfloat16 -> (tokens, out) bfloat16."""
        return self._apply(x, None, 0.0, torch.bfloat16)

    def logits(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """RMSNorm with weight `norm` (in,) float32, then the product: (tokens, in) -> (tokens, out) float32."""
        return self._apply(x, norm, eps, torch.float32)

    def _apply(self, x: Tensor, norm: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
        x = x.contiguous()
        to = torch.empty(len(x), self.out, dtype=dtype)
        if len(x):
            code = self._library.ponder_linear(
                ctypes.c_void_p(x.data_ptr()),
                ctypes.c_int64(len(x)),
                ctypes.c_void_p(pointer(norm)),
                ctypes.c_float(eps),
                ctypes.byref(self.struct),
                ctypes.c_void_p(to.data_ptr()),
                ctypes.c_int(dtype == torch.float32),
                ctypes.c_int(torch.get_num_threads()),
            )
            if code:
                raise MemoryError("No memory for the activations of a step.")
        return to


def alternating(joined: Tensor) -> Tensor:
    """Gate and up one below the other, to blocks of 16 of each in turn."""
    return joined.unflatten(0, (2, -1, 16)).transpose(0, 1).flatten(0, 2)


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
