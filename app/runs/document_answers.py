"""The way in which a model answers from documents, by a setting or by what the model was measured to do.

Extractive: no model is asked, and the sentences that answer are shown. Quoting: the model writes under a constraint, so
that what it says is quoted from a source. Generative: it writes freely, and every sentence is checked. For `auto` a
probe asks a model some questions on made-up texts, once, with whole texts and with windows of them; its result is kept
with the model's fingerprint. Until it is there, small models are extractive and others generative. The authors of a
model may state the way in `ponder.json`, and then nothing is measured.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from app.answering.served_model import SMALL_BELOW
from app.errors import ApiError
from app.runs.probe_texts import QUESTIONS, TEXTS
from app.runs.prompt_builder import quoting
from app.runs.rag import GENERATIVE, AnswerWay, CheckedAnswer, RetrievedContext, WayKind
from engine.errors import EngineError
from engine.params import GREEDY, Span
from reasoning.thinking import think_and_answer
from retrieval.durable import Damaged, read_record, write_record
from retrieval.prompt_context import PromptSource
from retrieval.sentence_ranking import RankedSentence, windows

if TYPE_CHECKING:
    from app.answering.served_model import ServedModel
    from retrieval.sentence_ranking import SentenceRanker

log = logging.getLogger("ponder")

PROBE_VERSION = 1
MAX_TOKENS = 80  # of an answer to a question of the probe
WINDOWS = (100, 300)  # tokens of sources in a prompt with windows
SECONDS = 240.0  # that a probe may take; one that is not over by then decides nothing
PRIORITY = 100  # the last
EXTRACTIVE = AnswerWay("extractive")
_WRITING: tuple[WayKind, ...] = ("generative", "quoting")
TRIED = tuple(AnswerWay(kind, tokens) for tokens in (None, *WINDOWS) for kind in _WRITING)


@dataclass(frozen=True, slots=True)
class Probed:
    """The shares of the probe's questions that are answered right: by the evidence alone, and by each way tried."""

    evidence: float
    right: tuple[tuple[AnswerWay, float], ...]

    @property
    def way(self) -> AnswerWay:
        """Returns the best way, the first of equals; extractive where the evidence alone is better than the model."""
        best, share = max(self.right, key=lambda each: each[1])
        return best if share >= self.evidence else EXTRACTIVE


@dataclass(slots=True)
class DocumentAnswers:
    """Tells each model's way. `folder` keeps results. Used from the event loop."""

    setting: Literal["auto", "extractive", "quoting", "generative"]
    folder: Path
    ranker: SentenceRanker
    _known: dict[str, AnswerWay] = field(default_factory=dict)  # by fingerprint
    _probing: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def way(self, served: ServedModel) -> AnswerWay:
        """Returns the way of a model; begins to measure it where that is not known."""
        if self.setting != "auto":
            return AnswerWay(self.setting)
        if served.about.document_answers is not None:
            return AnswerWay(served.about.document_answers)
        fingerprint = served.engine.fingerprint.hex()
        if fingerprint not in self._known and (kept := self._kept(fingerprint)) is not None:
            self._known[fingerprint] = kept
        if fingerprint in self._known:
            return self._known[fingerprint]
        if fingerprint not in self._probing:
            self._probing[fingerprint] = asyncio.create_task(self._probe(served, self.ranker, fingerprint))
        return EXTRACTIVE if served.parameters < SMALL_BELOW else GENERATIVE

    async def close(self) -> None:
        """Ends what is being measured."""
        for task in self._probing.values():
            task.cancel()
        await asyncio.gather(*self._probing.values(), return_exceptions=True)

    async def _probe(self, served: ServedModel, ranker: SentenceRanker, fingerprint: str) -> None:
        log.info("Measuring how %s answers from documents.", served.name)
        try:
            async with asyncio.timeout(SECONDS):
                found = await probe(served, ranker)
        except TimeoutError:
            log.info("%s is too slow to be measured in %d s; it answers from documents as its size says.",
                     served.name, int(SECONDS))  # fmt: skip
            return
        except EngineError as error:
            log.warning("It cannot be measured how %s answers from documents: %s", served.name, error)
            return
        self._known[fingerprint] = found.way
        record = {"version": PROBE_VERSION, "evidence": found.evidence, "way": asdict(found.way)}
        record["right"] = [{**asdict(way), "share": share} for way, share in found.right]
        await asyncio.to_thread(write_record, self._file(fingerprint), record)
        shares = ", ".join(f"{name(way)} {share:.0%}" for way, share in found.right)
        log.info(
            "%s answers from documents in the way %r: evidence alone %.0f%% right, %s.", served.name, name(found.way),
            100 * found.evidence, shares,
        )  # fmt: skip

    def _file(self, fingerprint: str) -> Path:
        return self.folder / f"document-answers-{fingerprint[:16]}.json"

    def _kept(self, fingerprint: str) -> AnswerWay | None:
        """Returns a result of this version; None where there is none that can be read, so that it is made again."""
        try:
            record = read_record(self._file(fingerprint))
        except (OSError, Damaged):
            return None
        way = record.get("way")
        if record.get("version") != PROBE_VERSION or not isinstance(way, dict):
            return None
        return _read_way(way)


def _read_way(fields: dict[str, Any]) -> AnswerWay | None:
    kind, window = fields.get("kind"), fields.get("window_tokens")
    if kind not in get_args(WayKind) or not (window is None or type(window) is int):
        return None
    return AnswerWay(cast(WayKind, kind), window)


def name(way: AnswerWay) -> str:
    return way.kind if way.window_tokens is None else f"{way.kind}, windows of {way.window_tokens} tokens"


async def probe(served: ServedModel, ranker: SentenceRanker) -> Probed:
    """Asks the model the questions of `probe_texts` in every way of `TRIED`, one after another, at the lowest priority.

    Raises the engine's errors.
    """
    texts = [PromptSource(f"S{n}", n, "", 0, len(text), text, 1.0) for n, text in enumerate(TEXTS, 1)]
    ranked = [
        await asyncio.to_thread(ranker.rank, question, texts, lambda stem: 1.0, None) for question, _ in QUESTIONS
    ]
    evidence = [answer in each[0].text for each, (_, answer) in zip(ranked, QUESTIONS, strict=True)]
    right: list[tuple[AnswerWay, float]] = []
    for way in TRIED:
        shares = [
            await _is_right(served, way, question, answer, texts, each)
            for (question, answer), each in zip(QUESTIONS, ranked, strict=True)
        ]
        right.append((way, sum(shares) / len(shares)))
    return Probed(sum(evidence) / len(evidence), tuple(right))


async def _is_right(
    served: ServedModel, way: AnswerWay, question: str, answer: str, texts: Sequence[PromptSource],
    ranked: Sequence[RankedSentence],
) -> bool:  # fmt: skip
    """Returns whether a supported sentence has the answer, and every sentence has support."""

    def count(text: str) -> int:
        return len(served.engine.tokenizer.encode(text))

    shown = list(texts) if way.window_tokens is None else windows(question, ranked, way.window_tokens, count)
    found = RetrievedContext(tuple(shown), "answer", 1.0, quotes=way.kind == "quoting")
    asked = found.messages([{"role": "user", "content": question}])
    try:
        prompt = await served.chat_tokens(asked, {"enable_thinking": False})
    except ApiError:  # it is longer than the context
        return False
    span = Span(GREEDY, min(MAX_TOKENS, served.engine.max_model_len - len(prompt)))
    if found.quotable:
        span = quoting(span, served, found.quotable)
    checked, said = CheckedAnswer(found), list[tuple[str, str]]()
    async with await served.engine.open(prompt, tenant="probe", priority=PRIORITY) as seq:
        opened, closed = served.opens_thinking(prompt), served.closes_thinking(prompt)
        async with aclosing(think_and_answer(seq, span, served.markers, opened=opened, closed=closed)) as pieces:
            async for piece in pieces:
                if piece.part == "answer":
                    said += [(text, ref.support) for text, ref in checked.feed(piece.text)]
    said += [(text, ref.support) for text, ref in checked.finish()]
    has = any(answer in text and support in ("supported", "partial") for text, support in said)
    return has and not any(support == "unsupported" for _, support in said)
