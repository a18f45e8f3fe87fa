"""Holds a model to its tools' schemas: a plan of the calls, compiled, or a refusal by the keyword's name."""

from __future__ import annotations

from collections.abc import Sequence

from app.errors import ApiError, invalid
from app.served import Served
from engine.structured_output.matcher import CompileTimeout, ConstraintRefused
from engine.tool_parsers import Named, Tool, ToolChoice, ToolPlan


async def plan_of(
    served: Served, tools: Sequence[Tool], chosen: ToolChoice, parallel: bool, user: str = ""
) -> ToolPlan:
    """A plan that compiles. A tool that is not strict and whose schema no backend holds takes any JSON object; one that
    takes too long to compile is refused, as what an answer is held to must not depend on what else the server does."""
    assert served.dialect is not None
    try:
        plan = served.dialect.plan(tools, chosen, parallel)
        await served.engine.compile(plan.body, tenant=user)
        return plan
    except CompileTimeout as late:
        raise refused("tools", late) from None
    except ConstraintRefused as refusal:
        whole = refusal
    loose = set()
    for at, tool in enumerate(tools):
        if isinstance(chosen, Named) and tool.name != chosen.name:
            continue
        try:
            await served.engine.compile(served.dialect.plan([tool], Named(tool.name)).body, tenant=user)
        except ConstraintRefused as refusal:
            if tool.strict or isinstance(refusal, CompileTimeout):
                raise refused(f"tools[{at}].function.parameters", refusal) from None
            loose.add(tool.name)
    if not loose:
        raise refused("tools", whole) from None
    plan = served.dialect.plan(tools, chosen, parallel, frozenset(loose))
    try:
        await served.engine.compile(plan.body, tenant=user)
    except ConstraintRefused as refusal:
        raise refused("tools", refusal) from None
    return plan


def refused(field: str, refusal: ConstraintRefused, *, loosely: bool = False) -> ApiError:
    """A constraint that cannot be held, as a 400 that names the field. `loosely`: a superset could be."""
    accepted = "something simpler" if isinstance(refusal, CompileTimeout) else "what docs/constraints.md lists"
    accepted += ', or "strict": false' if loosely and not isinstance(refusal, CompileTimeout) else ""
    return invalid(field, f"{field} cannot be held exactly: {refusal}; accepted: {accepted}.", refusal.code)
