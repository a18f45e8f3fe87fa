"""Turns events of strategies into events of a run. Knows nothing of how a run is made."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel

from app.answering.model_cascade import ModelChosen
from app.answering.reasoning_config import WaitInserted
from app.answering.remote_model import SentToRemote
from app.answering.sub_agents import SubAgentDone, SubAgentStarted
from app.runs import events
from reasoning.candidate import CandidateChosen, CandidateDone
from reasoning.route import Routed, Tried
from reasoning.strategy import Event, Spent
from reasoning.tree import NodeAdded, NodeChosen, NodeMerged, NodePruned, NodeScored, SearchEnded

_KINDS: dict[type[Event], type[BaseModel]] = {
    WaitInserted: events.ThinkingWait,
    NodeAdded: events.SearchNode,
    NodeMerged: events.SearchMerge,
    NodeScored: events.SearchScore,
    NodePruned: events.SearchPrune,
    NodeChosen: events.SearchSelect,
    CandidateDone: events.CandidateDone,
    CandidateChosen: events.CandidateChosen,
    SubAgentStarted: events.AgentStarted,
    SubAgentDone: events.AgentDone,
}
MAX_LENGTH = 10_000  # characters of one event of a plugin


def without_text(event: BaseModel) -> BaseModel:
    """The same, where thinking is not shown: a step of a search may be thinking, and a plugin's event contain it."""
    match event:
        case events.SearchNode() | events.SearchMerge():
            return event.model_copy(update={"text": ""})
        case events.StrategyEvent():
            return event.model_copy(update={"fields": {}})
    return event


def map_event(event: Event) -> BaseModel | None:
    """The run's event; None for events covered by usage or other events. A plugin's fields are left out where they are
    too long or no JSON.
    """
    if isinstance(event, Spent | Routed):
        return None
    if isinstance(event, ModelChosen):
        return events.RouteAnswering(model=event.plan.served.name)
    if isinstance(event, SentToRemote):
        fields = {name: getattr(event, name) for name in events.RemoteSent.model_fields if name != "type"}
        return events.RemoteSent(**fields) if event.sending else None
    if isinstance(event, Tried):
        return events.RouteTried(
            model=event.model, passed=event.passed, why=event.why, tokens=event.tokens, cost=event.cost,
            seconds=event.seconds,
        )  # fmt: skip
    if isinstance(event, SearchEnded):
        fields = asdict(event)
        del fields["answer"]
        return events.SearchDone(**fields)
    if (kind := _KINDS.get(type(event))) is not None:
        return kind(**asdict(event))
    return events.StrategyEvent(name=type(event).__name__, fields=_short_json(event))


def _short_json(event: Event) -> dict[str, Any]:
    """A plugin's fields; none where they are too long or no JSON."""
    try:
        fields = asdict(event)
        return fields if len(json.dumps(fields, allow_nan=False)) <= MAX_LENGTH else {}
    except (ValueError, TypeError):  # a plugin may put anything there, also values that cannot be copied
        return {}
