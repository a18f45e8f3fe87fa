"""The host's side of a run: its user, and how to reach a person."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tools.call_policy import Decision, NeedsApproval
from tools.context import Ask, Delegate, FileContent
from tools.result import Artifacts
from tools.tool import Tool


@dataclass(slots=True)
class Session:
    """A run's side of its calls. `tainted_by` grows with the tools with untrusted output that the run has read.

    `approve` and `ask` reach a person; None where nobody can be reached, so that a call that needs approval is denied.
    `offered` are the tools in the model's prompt; None is any that there is. `own` are tools as this run alone has
    them, by name, in the place of the registry's. `delegate` has sub-agents of the run's model do a call's tasks; None
    where there is no model, or it is a sub-agent's. `keep_files` keeps the files of a call, named by its id; None where
    nobody does.
    """

    user: str
    run: str
    chat: str | None = None
    approve: Callable[[NeedsApproval], Awaitable[Decision]] | None = None
    ask: Ask | None = None
    delegate: Delegate | None = None
    tainted_by: set[str] = field(default_factory=set)
    offered: Collection[Tool] | None = None
    own: Mapping[str, Tool] = field(default_factory=dict)
    keep_files: Callable[[str, Sequence[FileContent]], Awaitable[Artifacts]] | None = None
