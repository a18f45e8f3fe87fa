"""A list of tools as one chat offers it: wanted ones and others that are easy to confuse with them.

No two tools of one list could answer the same request (see rivals.toml). Knows nothing of turns.
"""

from __future__ import annotations

from random import Random

from training.conversation import Phrasing
from training.tool_bank import Concept, composed, concepts, frames, made, rivals, thing
from training.tool_bank.offered import Offered, offer, schema_type


def draw_concept(rng: Random, phrasing: Phrasing, progress: float) -> Concept:
    """A written or a made-up tool; at the very beginning one with a single string."""
    while True:
        concept = _shaped(rng, phrasing, "", "") if rng.random() < 0.5 else rng.choice(concepts(phrasing))
        required = [param for param in concept.params if param.required]
        if progress >= 0.1 or (len(required) == 1 and schema_type(required[0].kind) == {"type": "string"}):
            return concept


def alike(rng: Random, phrasing: Phrasing, concept: Concept) -> Concept:
    """One that is easily taken for `concept`: of the same thing, of the same shape, or of the same domain."""
    if not concept.about:
        siblings = [
            other for other in concepts(phrasing) if other.domain == concept.domain and other.key != concept.key
        ]
        return rng.choice(siblings or concepts(phrasing))
    if rng.random() < 0.6:
        return _shaped(rng, phrasing, "", concept.about)
    return _shaped(rng, phrasing, concept.key.split(".")[1], "")


def _shaped(rng: Random, phrasing: Phrasing, shape: str, noun: str) -> Concept:
    """The made-up tool of a shape about a thing, each sampled where it is "". Evaluation has none that are composed."""
    family, _, of = shape.partition("_")
    if not shape and phrasing == "train" and rng.random() < 0.6:
        family = rng.choice(("action", "action", "action", "question"))
    if family == "action":
        return composed.action(rng, phrasing, noun or thing(rng, phrasing), of)
    if family == "question":
        return composed.question(rng, phrasing, noun or thing(rng, phrasing), of)
    return made(rng, phrasing, shape or rng.choice(frames(phrasing)), noun or thing(rng, phrasing))


def fits(concept: Concept, offered: list[Offered]) -> bool:
    """Returns whether `concept` may stand beside these: neither could answer for the other."""
    return not any(rivals(concept, other.concept) for other in offered)


def missing(rng: Random, phrasing: Phrasing, progress: float, offered: list[Offered]) -> Concept:
    """One that no tool of the list can do, though it may be near to one of them."""
    while True:
        near = progress > 0.25 and rng.random() < 0.5
        concept = alike(rng, phrasing, rng.choice(offered).concept) if near else draw_concept(rng, phrasing, progress)
        if fits(concept, offered):
            return concept


def toolbox(rng: Random, phrasing: Phrasing, progress: float, count: int) -> list[Offered]:
    """`count` tools in random order, at least one of which can be asked for."""
    offered: list[Offered] = []
    while len(offered) < count:
        near = offered and rng.random() < 0.5
        concept = alike(rng, phrasing, rng.choice(offered).concept) if near else draw_concept(rng, phrasing, progress)
        if not fits(concept, offered):
            continue
        tool = offer(rng, concept, phrasing, progress, ask_for=not offered or rng.random() < 0.4)
        if tool.name in {other.name for other in offered} or not tool.answerable():
            continue
        offered.append(tool)
    rng.shuffle(offered)
    return offered
