"""The ways to answer from documents: which one a model has, what a quoting answer can say, and that none is garbled."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random

import httpx
import numpy as np
import pytest

from app.answering.served_model import ServedModel
from app.runs import document_answers
from app.runs.document_answers import EXTRACTIVE, DocumentAnswers, Probed
from app.runs.rag import GENERATIVE, REFUSAL, AnswerWay, RetrievedContext, quotations, quote
from engine import Engine, EngineConfig
from engine.model.tokenizer import Tokenizer
from engine.structured_output.llguidance_backend import Guidance
from engine.structured_output.matcher import words
from engine.structured_output.spec import Substring
from engine.structured_output.vocabulary import Vocabulary
from retrieval.prompt_context import PromptSource
from retrieval.sentence_ranking import SentenceRanker, with_context
from tests.app.conftest import PEBBLE, Server, serving
from tests.app.gate import GatedEmbedder
from tests.app.runs.test_grounded_runs import DAM, answered, of_type, upload
from tests.retrieval.words import WordEmbedder
from training.text import essays

pytestmark = pytest.mark.slow

LINE = re.compile(r"(?:[^\[\]\n]{0,60}: )?\[(S\d)\] (.+)")
SOURCES = [
    (
        "S1",
        'The "old" dam, built of stone (1931), is 40 m high. It was paid for by the city; nobody else gave any.',
    ),
    ("S2", "Größe: 3,5 km². In winter the ferry sails twice a day — in summer five times. The fare is 2 crowns."),
    ("S3", "A cave with\n two lines of text, and a tab\tin it. Its walls are white. Nobody lives there."),
]


@pytest.fixture(scope="module")
def guidance() -> Iterator[Guidance]:
    tokenizer = Tokenizer.load(PEBBLE)
    backend = Guidance(Vocabulary.of(tokenizer, tokenizer.vocab_size))
    yield backend
    backend.close()


def test_whatever_a_model_prefers_a_quoting_answer_is_made_of_its_sources(guidance: Guidance) -> None:
    """Walks at random over what the mask allows, as a model of random weights does."""
    tokenizer, rng = Tokenizer.load(PEBBLE), Random(1)
    compiled = guidance.compile(quotations(SOURCES))
    texts = {label: " ".join(text.split()) for label, text in SOURCES}
    eos, quoted = set(tokenizer.eos_token_ids), 0
    for _ in range(250):
        matcher, taken = compiled.matcher(), list[int]()
        while True:
            row = np.zeros(words(tokenizer.vocab_size), dtype=np.int32)
            matcher.fill(row)
            may = np.unpackbits(row.view(np.uint8), bitorder="little")[: tokenizer.vocab_size].nonzero()[0].tolist()
            token = rng.choice(may)
            if (ends := eos & set(may)) and len(taken) > rng.randrange(200):
                token = ends.pop()
            assert matcher.accept(token)
            if token in eos:
                break
            taken.append(token)
        text = tokenizer.decode(taken)
        if text == REFUSAL:
            continue
        for line in text.split("\n"):
            found = LINE.fullmatch(line)
            assert found is not None, text
            assert found[2] in texts[found[1]] and len(found[2]) >= 12
            quoted += 1
    assert quoted > 250


def test_a_substring_that_nothing_can_be_is_refused() -> None:
    with pytest.raises(ValueError, match="that has 3"):
        Substring("abc", 4)
    with pytest.raises(ValueError, match="no text to quote"):
        quotations([("S1", "  \n ")])


@pytest.fixture(scope="module")
def quoting(tmp_path_factory: pytest.TempPathFactory, embedder: GatedEmbedder) -> Iterator[Server]:
    with serving(PEBBLE, tmp_path_factory.mktemp("quoting"), embedder, document_answers="quoting") as server:
        yield server


def test_a_run_quotes_and_each_line_has_its_citation(quoting: Server) -> None:
    with httpx.Client(base_url=quoting.url, timeout=60) as client:
        upload(client, DAM)
        log = answered(client, "when was the dam of Orsk finished?")
        text = of_type(log, "answer.done")[0]["text"]
        assert of_type(log, "run.started") and log[-1]["type"] == "run.completed"
        if text.startswith(REFUSAL):
            return
        refs = of_type(log, "citation.ref")
        assert refs and all(ref["citations"] for ref in refs if ref["support"] == "supported")
        for ref in refs:
            for cited in ref["citations"]:
                assert DAM[cited["start"] : cited["end"]] == cited["text"]


def test_no_word_of_a_thousand_extractive_answers_is_garbled() -> None:
    rng = Random("garbled")
    pages = essays.paragraphs(rng, "train")
    texts = [" ".join(sentence for sentence, *_ in page) for page in pages]
    asked = [(question, at) for at, page in enumerate(pages) for _, *questions in page for question in questions]
    ranker = SentenceRanker(WordEmbedder())
    for question, at in rng.choices(asked, k=1_000):
        source = PromptSource("S1", at, "", 0, len(texts[at]), texts[at], 1.0)
        best = ranker.rank(question, [source], lambda stem: 1.0, 1)[0]
        found = RetrievedContext((source,), "answer", 1.0, quoted=(with_context(question, best),))
        ((text, ref),) = quote(found)
        assert text.removesuffix(" [S1]") in texts[at] and ref.support == "supported"


@pytest.fixture
async def served(model: Path) -> AsyncIterator[ServedModel]:
    async with await Engine.start(EngineConfig(model=str(model), device="cpu", threads=1)) as engine:
        yield ServedModel(engine, "tiny")


def ways(folder: Path, setting: str = "auto") -> DocumentAnswers:
    return DocumentAnswers(setting, folder, SentenceRanker(WordEmbedder()))  # type: ignore[arg-type]  # of the settings


def test_a_server_measures_its_model_when_it_is_first_asked_about_documents(
    model: Path, tmp_path: Path, embedder: GatedEmbedder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ponder")
    measuring = "Measuring how tiny answers from documents."
    with (
        serving(model, tmp_path, embedder, document_answers="auto") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        upload(client, DAM)
        answered(client, "Thanks!")
        assert measuring not in caplog.messages
        for _ in range(2):
            answered(client, "when was the dam of Orsk finished?")
        assert caplog.messages.count(measuring) == 1


@pytest.mark.parametrize("setting", ["extractive", "quoting", "generative"])
async def test_a_setting_decides(served: ServedModel, tmp_path: Path, setting: str) -> None:
    assert ways(tmp_path, setting).way(served).kind == setting
    assert list(tmp_path.iterdir()) == []


async def test_what_its_authors_say_is_not_measured(tmp_path: Path) -> None:
    async with await Engine.start(EngineConfig(model=str(PEBBLE), device="cpu", threads=1)) as engine:
        assert ways(tmp_path).way(ServedModel(engine, "pebble")) == EXTRACTIVE
    assert list(tmp_path.iterdir()) == []


async def test_a_model_is_measured_once_and_the_result_is_kept(
    served: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ways(tmp_path)
    assert first.way(served) == EXTRACTIVE, "by its size, until it is measured"
    await asyncio.gather(*first._probing.values())
    (kept,) = tmp_path.glob("document-answers-*.json")
    measured = first.way(served)
    again = ways(tmp_path)
    assert again.way(served) == measured and not again._probing
    kept.write_text(kept.read_text().replace(measured.kind, "neither"), encoding="utf-8")
    damaged = ways(tmp_path)
    damaged.way(served)
    assert damaged._probing, "a damaged result is made again"
    await damaged.close()
    monkeypatch.setattr(document_answers, "PROBE_VERSION", 2)
    older = ways(tmp_path)
    older.way(served)
    assert older._probing, "so is one of another version"
    await older.close()


@pytest.mark.parametrize(
    ("evidence", "right", "chosen"),
    [
        (0.9, (0.2, 0.3), EXTRACTIVE),
        (0.9, (0.9, 0.95), AnswerWay("quoting")),
        (0.9, (0.95, 0.95), GENERATIVE),
    ],
)
def test_the_best_way_is_chosen_and_the_evidence_alone_where_the_model_is_worse(
    evidence: float, right: tuple[float, float], chosen: AnswerWay
) -> None:
    assert Probed(evidence, ((GENERATIVE, right[0]), (AnswerWay("quoting"), right[1]))).way == chosen
