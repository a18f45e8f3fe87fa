"""The steps of an answer as it is made: what the model wrote, the calls that followed and what they gave.

A call that never returned is no step, as nobody read its result. Knows nothing of how calls run.
"""

from __future__ import annotations

from app.data.steps import RESULT_CHARACTERS, Step, StepCall, StepResult
from tools.outcome import Call
from tools.result import shorten


class StepRecorder:
    def __init__(self) -> None:
        self._closed: list[Step] = []
        self._text: list[str] = []
        self._calls: list[StepCall] = []
        self._results: list[StepResult] = []

    def wrote(self, text: str) -> None:
        self.next()
        self._text.append(text)

    def returned(self, call: Call, text: str, *, untrusted: bool) -> None:
        """A call's result as the model reads it."""
        self._calls.append(StepCall(id=call.id, name=call.name, arguments=str(call.arguments)))
        kept, _ = shorten(text, RESULT_CHARACTERS)
        self._results.append(StepResult(call_id=call.id, text=kept, untrusted=untrusted))

    def next(self) -> None:
        """Closes a step that has results: the text and calls to come were made after them."""
        if self._results:
            self._closed.append(Step(content="".join(self._text), calls=self._calls, results=self._results))
            self._text, self._calls, self._results = [], [], []

    def steps(self) -> list[Step]:
        """All steps, the answer's own as the last; none where nothing was called."""
        self.next()
        return [*self._closed, Step(content="".join(self._text))] if self._closed else []
