"""Structured output: constraints on the logits (spec.py), and the matchers that enforce them (matcher.py).

Importing this, or anything of the engine's, does not load the backend's library: that comes with the first constraint.
"""

from engine.structured_output.layout import Constrained, Layout
from engine.structured_output.matcher import CompileTimeout, ConstraintFailed, ConstraintRefused
from engine.structured_output.spec import JSON_OBJECT, Constraint, Grammar, JsonSchema, Regex, choice, sequence

__all__ = [
    "JSON_OBJECT",
    "CompileTimeout",
    "Constrained",
    "Constraint",
    "ConstraintFailed",
    "ConstraintRefused",
    "Grammar",
    "JsonSchema",
    "Layout",
    "Regex",
    "choice",
    "sequence",
]
