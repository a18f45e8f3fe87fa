"""Constraints as keys: equal where they say the same, and never else."""

from __future__ import annotations

from itertools import combinations

from engine.structured_output.spec import Grammar, JsonSchema, Literal, OneOf, Optional, Regex, Repeat, Sequence, Until

A, B = Literal("a"), Literal("b")
DIFFERENT = (
    Sequence(()),
    Sequence((A,)),
    Sequence((A, B)),
    Sequence((B, A)),
    Sequence((Sequence((A, B)),)),
    Sequence((Sequence((A,)), B)),
    Sequence((A, Sequence((B,)))),
    Sequence((Sequence(()), A, B)),
    OneOf((A, B)),
    Optional(A),
    Optional(Sequence((A,))),
    Repeat(A, ""),
    Repeat(A, "b"),
    Repeat(Sequence((A, B)), ""),
    Sequence((Regex("a"),)),
    Sequence((Grammar("a"),)),
    Sequence((Until("a"),)),
    Sequence((JsonSchema("a"),)),
    Sequence((JsonSchema("a", compact=True),)),
    A,
)


def test_what_is_put_together_otherwise_is_another_constraint() -> None:
    assert all(one != other for one, other in combinations(DIFFERENT, 2))
    assert len(set(DIFFERENT)) == len(DIFFERENT)


def test_what_is_put_together_alike_is_the_same() -> None:
    assert Sequence((OneOf((Literal("a"), B)),)) == Sequence((OneOf((A, Literal("b"))),))
    assert hash(Repeat(Literal("a"), ",")) == hash(Repeat(A, ","))
