"""Reading a config.json strictly: typed fields, rope parameters of both generations, and the base that families share.

Knows the names that Hugging Face configurations use, and no single family. The idea: a field that changes the result
is either understood or refused by name; nothing is silently taken for its default. Written for transformers 5
(`rope_parameters`, `layer_types`) and 4 (`rope_scaling`, `rope_theta`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import CheckpointError
from engine.model.loader import Json
from engine.model.model_spec import Activation, Rope, WeightNames
from engine.model.rope import longrope_attention_factor, yarn_attention_factor

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
ROPE_KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")


def refuse(field: str, value: object, accepted: str) -> CheckpointError:
    """The error for an option that cannot be run exactly."""
    return CheckpointError(f"config.json: {field} is {value!r}; supported: {accepted}.")


def integer(config: Json, field: str, default: int | None = None, *, minimum: int = 1) -> int:
    """An integer field. Raises CheckpointError: missing without a default, or not one of `minimum` at least."""
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise refuse(field, value, "a positive integer" if minimum == 1 else f"an integer of at least {minimum}")
    return value


def number(config: Json, field: str, default: float | None = None) -> float:
    """A numeric field. Raises CheckpointError: missing without a default, or not one."""
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refuse(field, value, "a number")
    return float(value)


def optional_number(config: Json, field: str, default: float | None = None) -> float | None:
    """A numeric field that may be null; `default` is used only where the field is absent."""
    if field in config and config[field] is None:
        return None
    return None if field not in config and default is None else number(config, field, default)


def flag(config: Json, field: str, default: bool = False) -> bool:
    """A boolean field. Raises CheckpointError: not one."""
    value = config.get(field)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise refuse(field, value, "true or false")
    return value


def must_be(config: Json, field: str, *accepted: object) -> None:
    """Refuses a field that is present and not one of `accepted`."""
    if config.get(field) not in (None, *accepted):
        raise refuse(field, config[field], " or ".join(map(repr, accepted)) or "null")


def activation(config: Json, *fields: str, default: str = "silu") -> Activation:
    """The MLP's activation, from the first of `fields` that is present."""
    field = next((field for field in fields if config.get(field) is not None), fields[0])
    name = config.get(field) or default
    if name not in ACTIVATIONS:
        raise refuse(field, name, ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


def shape(config: Json, *, head_dim: int | None = None) -> dict[str, Any]:
    """The sizes and switches that every family names alike, as ModelSpec fields. Any: keyword arguments."""
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    head_dim = integer(config, "head_dim", head_dim or hidden // heads)
    kv_heads = integer(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise refuse("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    if head_dim % 2:
        raise refuse("head_dim", head_dim, "an even number")
    layers = integer(config, "num_hidden_layers")
    return {
        "vocab_size": integer(config, "vocab_size"),
        "hidden_size": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": integer(config, "intermediate_size"),
        "max_position_embeddings": integer(config, "max_position_embeddings"),
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
        "attention_scale": head_dim**-0.5,
        "windows": (None,) * layers,
    }


def text_part(names: WeightNames) -> WeightNames:
    """Returns the names in a checkpoint with vision: the text model lies under a root of its own, the rest is left
    alone."""
    return replace(
        names,
        root="language_model.model.",
        lm_head="language_model.lm_head.weight",
        ignored=("vision_tower.", "multi_modal_projector."),
    )


def windows(config: Json, layers: int, sliding: tuple[bool, ...], window: int | None) -> tuple[int | None, ...]:
    """Each layer's window: from `layer_types` where the configuration lists them, else from `sliding`."""
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise refuse("layer_types", kinds, f"a list of {layers}")
        unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if unknown:
            raise refuse("layer_types", unknown[0], "full_attention, sliding_attention")
        sliding = tuple(kind == "sliding_attention" for kind in kinds)
    if any(sliding) and window is None:
        raise refuse("sliding_window", None, "a positive integer, as some layers slide")
    return tuple(window if slides else None for slides in sliding)


def rope(
    config: Json,
    head_dim: int,
    *,
    theta: float | None = 10000.0,
    layer_type: str = "",
    partial: bool = False,
) -> Rope:
    """The rotary embedding of one kind of layer.

    `theta` is the family's default base (None: it must be given); `layer_type` picks the entry where `rope_parameters`
    is nested by layer type; `partial` allows rotating a part of each head.

    Raises:
        CheckpointError: an unknown rope_type, or parameters that it needs are missing.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise refuse("rope_parameters", parameters, "an object")
    nested = parameters.get(layer_type) if layer_type else None
    if isinstance(nested, dict):
        parameters = nested
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "su" or (kind == "yarn" and "short_factor" in parameters):
        kind = "longrope"  # the names that early Phi-3 checkpoints used
    if kind not in ROPE_KINDS:
        raise refuse("rope_type", kind, ", ".join(ROPE_KINDS))
    base = number(parameters, "rope_theta", number(config, "rope_theta", theta))
    share = number(parameters, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
    if kind == "proportional":
        rotating = 2 * int(share * head_dim // 2)
        if not 0 < rotating <= head_dim:
            raise refuse("partial_rotary_factor", share, "above 0, up to 1")
        return Rope(head_dim, base, kind, factor=number(parameters, "factor", 1.0), rotating=rotating)
    dim = int(head_dim * share)
    if share != 1.0 and (not partial or dim % 2 or not 0 < dim <= head_dim):
        raise refuse("partial_rotary_factor", share, "an even part of head_dim" if partial else "1")
    if kind in ("default", "dynamic"):  # dynamic scaling begins past max_position_embeddings, which is never passed
        return Rope(dim, base)
    return _scaled(kind, parameters, config, dim, base)


def _scaled(kind: str, parameters: Json, config: Json, dim: int, base: float) -> Rope:
    if kind == "linear":
        return Rope(dim, base, "linear", factor=number(parameters, "factor"))
    longest = integer(config, "max_position_embeddings")
    inner = integer(parameters, "original_max_position_embeddings", longest)
    original = integer(config, "original_max_position_embeddings", inner)
    if kind == "llama3":
        return Rope(
            dim,
            base,
            "llama3",
            factor=number(parameters, "factor"),
            original_context=original,
            low_freq_factor=number(parameters, "low_freq_factor"),
            high_freq_factor=number(parameters, "high_freq_factor"),
        )
    factor = number(parameters, "factor", longest / original)
    given = optional_number(parameters, "attention_factor")
    if kind == "yarn":
        mscale, mscale_all = optional_number(parameters, "mscale"), optional_number(parameters, "mscale_all_dim")
        return Rope(
            dim,
            base,
            "yarn",
            factor=factor,
            original_context=original,
            beta_fast=number(parameters, "beta_fast", 32.0),
            beta_slow=number(parameters, "beta_slow", 1.0),
            truncate=flag(parameters, "truncate", True),
            attention_factor=yarn_attention_factor(factor, mscale, mscale_all) if given is None else given,
        )
    factors = {}
    for field in ("short_factor", "long_factor"):
        values = parameters.get(field)
        numbers = isinstance(values, list) and all(isinstance(value, (int, float)) for value in values)
        if not isinstance(values, list) or not numbers or len(values) != dim // 2:
            raise refuse(f"rope_parameters.{field}", values, f"a list of {dim // 2} numbers")
        factors[field] = tuple(float(value) for value in values)
    return Rope(
        dim,
        base,
        "longrope",
        original_context=original,
        short_factors=factors["short_factor"],
        long_factors=factors["long_factor"],
        attention_factor=longrope_attention_factor(factor, original) if given is None else given,
    )
