"""The server's own tools in a response, beside the client's functions, in one loop of the model's.

A call of the server's tools is run here; one of the client's ends the loop, as its result comes with a later request.
Nobody can be asked meanwhile, so what needs a person's approval fails. Knows nothing of events or items.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from app import tracing
from tools.outcome import Call, Outcome
from tools.session import Session

if TYPE_CHECKING:
    from tools.executor import Executor
    from tools.tool import Tool


class HandedOver(Exception):
    """A turn called a function of the client's: it is the client's turn now."""


class ServedTools:
    """Runner of the calls of a model's loop. `outcomes` are those of the server's calls, by call id."""

    def __init__(
        self, executor: Executor, offered: Sequence[Tool], *, response: str, user: str, read_from: Collection[str],
        alone: bool,
    ) -> None:  # fmt: skip
        """`read_from`: tools whose results the conversation has already. `alone`: the client has no functions."""
        self.outcomes: dict[str, Outcome] = {}
        self._executor = executor
        self._offered = {tool.name: tool for tool in offered}
        self._session = Session(user, response, tainted_by=set(read_from), offered=tuple(offered))
        self._alone = alone

    def only_reads(self, call: Call) -> bool:
        # Beside the client's functions no call begins early: the loop may end with this turn, and would end it too.
        tool = self._offered.get(call.name)
        return self._alone and tool is not None and not tool.has_effects and tool.permission in ("none", "read")

    async def run(self, calls: Sequence[Call]) -> list[str]:
        """
        Raises:
            HandedOver: some of the calls are the client's; the others were run.
        """
        wanted = [call for call in calls if call.name in self._offered]
        outcomes = await self._executor.run(wanted, self._session, tracing.calls(lambda _: None))
        self.outcomes |= {outcome.call_id: outcome for outcome in outcomes}
        if len(wanted) < len(calls):
            raise HandedOver
        return [outcome.text for outcome in outcomes]
