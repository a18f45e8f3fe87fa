"""The families of checkpoints that the engine runs, found by config.json.

To add a family, write its file and name it here; the tests in tests/engine/models/ then hold it to `transformers`.
"""

from __future__ import annotations

from engine.errors import CheckpointError, UnsupportedArchitecture
from engine.families import (
    cohere,
    deepseek,
    glm4,
    granite,
    llama,
    llama4,
    ministral3,
    mistral,
    mixtures,
    olmo,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from engine.families.family import Family
from engine.families.gemmas import gemma, gemma2, gemma3, gemma4
from engine.families.hybrids import falcon_h1, granite_hybrid, lfm2, nemotron_h, qwen3_next
from engine.model.loader import Json

FAMILIES = (
    *(each.FAMILY for each in (llama, mistral, ministral3, qwen2, qwen3, smollm3, phi3)),
    *(each.FAMILY for each in (gemma, gemma2, gemma3, granite, olmo)),
    *(olmo.THIRD, glm4.FAMILY, cohere.FAMILY, lfm2.FAMILY, lfm2.MIXED),
    *mixtures.FAMILIES,
    *deepseek.FAMILIES,
    glm4.MIXED,
    *qwen3_next.FAMILIES,
    granite_hybrid.FAMILY,
    falcon_h1.FAMILY,
    nemotron_h.FAMILY,
    *(llama.IDEFICS3, llama.SMOLVLM, gemma3.WITH_VISION, ministral3.WITH_VISION, glm4.FIRST, cohere.FIRST),
    *(gemma4.FAMILY, gemma4.WITH_VISION, llama4.FAMILY, llama4.WITH_VISION),
)
SUPPORTED = tuple(name for family in FAMILIES for name in family.architectures)

MASKED_DIFFUSION = "Qwen3MaskedDiffusionLM"  # no family: `engine.diffusion` runs it, and nothing that decodes in order

__all__ = ["FAMILIES", "MASKED_DIFFUSION", "SUPPORTED", "Family", "family_of"]


def family_of(config: Json) -> Family:
    """Returns the family that `architectures[0]` names, or `model_type` where a configuration lists no architectures.

    Raises:
        UnsupportedArchitecture: none does; the message lists those supported.
        CheckpointError: the configuration says neither, or is that of a masked-diffusion model.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise CheckpointError(f"config.json: architectures is {architectures!r}; a list is needed.")
    name = architectures[0] if architectures else config.get("model_type")
    if name is None:
        raise CheckpointError("config.json has neither 'architectures' nor 'model_type': it does not describe a model.")
    if name == MASKED_DIFFUSION:
        raise CheckpointError(
            f"{name} fills masked places in any order, so it cannot chat, call tools, follow a schema or draft; run it "
            "with `ponder diffuse`."
        )
    for family in FAMILIES:
        if name in family.architectures or (not architectures and name == family.model_type):
            return family
    raise UnsupportedArchitecture(str(name), SUPPORTED)
