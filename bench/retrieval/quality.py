"""Measures how good retrieval is: each stage on a judged set, the share of an answer's text that is found, and how well
evidence separates.

Sets are read from `PONDER_SHARED` (README of that folder: where they come from). Nothing here chooses a parameter,
except `thresholds`, which reads paragraphs of our own alone.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reasoning.evaluate.measure import wilson
from retrieval import Library, Query, Text, judged_search, sources
from retrieval.embedding import Embedder
from retrieval.evidence import weigh
from retrieval.sentence_ranking import ANSWERS, RankedSentence, with_context
from training.text import essays, paragraphs, quotable

Json = dict[str, Any]  # Any: plain JSON
Tell = Callable[[str], None]
USER = "bench"


@dataclass(frozen=True, slots=True)
class JudgedQuestion:
    """A question with the source that answers it and the answer's text, or the ranges of its source that contain it."""

    text: str
    source: str
    answer: str = ""
    ranges: tuple[tuple[int, int], ...] = ()


def stages(folder: Path, embedder: Embedder, work: Path, tell: Tell, *, by_document: bool = False) -> list[Json]:
    """Cranfield, or any set in the layout of BEIR, with one stage after the other switched on.

    `by_document` asks with whole documents, as `judged_search.Judged.asked_by_document` says.
    """
    made = []
    for name, options in {
        "BM25": {"dense_share": 0.0},
        "dense": {"dense_share": 1.0},
        "fused": {},
        "fused, reranked by late interaction": {"rerank": True},
    }.items():
        tell(f"{folder.name}{', long questions' * by_document}: {name}")
        q = judged_search.run(
            folder,
            embedder=embedder,
            workplace=work / folder.name,
            by_document=by_document,
            **options,  # type: ignore[arg-type]  # names of options
        )
        made.append(
            {"stage": name, "ndcg@10": q.ndcg_10, "mrr@10": q.mrr_10, "p50_ms": q.p50_ms, "p99_ms": q.p99_ms}
            | {f"recall@{k}": value for k, value in q.recall.items()}
        )
    return made


def chunk_recall(folder: Path, embedder: Embedder, work: Path, k: int = 5) -> Json:
    """The share of the answering characters in the best `k` passages, over questions; by corpus and over all."""
    corpora = {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.md"))}
    asked = [
        JudgedQuestion(
            row["question"], row["corpus_id"], "", tuple((r["start_index"], r["end_index"]) for r in references)
        )
        for row in csv.DictReader((folder / "questions.csv").open(encoding="utf-8"))
        if (references := json.loads(row["references"])) and row["corpus_id"] in corpora
    ]
    with Library.open(work / "chunking", embedder) as library:
        mine = library.collection(USER)
        if not mine.documents:
            library.add(USER, mine.id, [Text(name, text) for name, text in corpora.items()])
        shares: dict[str, list[float]] = {name: [] for name in corpora}
        for one in asked:
            hits = library.search(Query(USER, one.text, k)).hits
            found = [(h.passage.start, h.passage.end) for h in hits if h.passage.source == one.source]
            shares[one.source].append(_held(one.ranges, found))
    every = [share for some in shares.values() for share in some]
    return {"k": k, "questions": len(every), "recall": float(np.mean(every)), "stderr": _stderr(every)} | {
        name: float(np.mean(some)) for name, some in shares.items()
    }


def _held(wanted: Sequence[tuple[int, int]], found: Sequence[tuple[int, int]]) -> float:
    held = {at for start, end in found for at in range(start, end)}
    asked = {at for start, end in wanted for at in range(start, end)}
    return len(asked & held) / len(asked)


def xquad(path: Path) -> tuple[list[Text], list[JudgedQuestion]]:
    """Paragraphs as documents, and the questions on each."""
    texts, asked = list[Text](), list[JudgedQuestion]()
    for a, article in enumerate(json.loads(path.read_text("utf-8"))["data"]):
        title = article.get("title", "").replace("_", " ")
        for p, paragraph in enumerate(article["paragraphs"]):
            texts.append(Text(f"{a}-{p}", paragraph["context"], title))
            asked += [JudgedQuestion(qa["question"], f"{a}-{p}", qa["answers"][0]["text"]) for qa in paragraph["qas"]]
    return texts, asked


def weighed(
    texts: Sequence[Text], asked: Sequence[JudgedQuestion], embedder: Embedder, folder: Path
) -> Iterator[tuple[float, float, bool]]:
    """For each question the score with its answering text, the score without, and whether that was the first hit."""
    with Library.open(folder, embedder) as library:
        mine = library.collection(USER)
        if not mine.documents:
            library.add(USER, mine.id, texts)
        for one in asked:
            present = library.search(Query(USER, one.text, 5)).hits
            removed = library.search(Query(USER, one.text, 5, filters={"source": {"ne": one.source}})).hits
            with_it, without = (
                weigh(one.text, hits, embedder, library.rarity(USER)).score for hits in (present, removed)
            )
            yield with_it, without, bool(present) and present[0].passage.source == one.source


def evidence(
    path: Path, embedder: Embedder, work: Path, thresholds: tuple[float, float], asked: Sequence[JudgedQuestion]
) -> Json:
    """Gold paragraph present against removed: the area under the curve, its points, and the rates at the thresholds."""
    texts, _ = xquad(path)
    scores = np.array([pair for *pair, _ in weighed(texts, asked, embedder, work / "xquad")])
    present, removed = scores[:, 0], scores[:, 1]
    answer, partial = thresholds
    return {
        "questions": len(asked),
        "auroc": auroc(present, removed),
        "interval": _bootstrapped(scores),
        "present": [round(x, 4) for x in present.tolist()],
        "removed": [round(x, 4) for x in removed.tolist()],
        "thresholds": {"answer": answer, "partial": partial},
        "present_refused": float((present < partial).mean()),
        "present_partial": float(((present >= partial) & (present < answer)).mean()),
        "removed_refused": float((removed < partial).mean()),
        "removed_partial": float(((removed >= partial) & (removed < answer)).mean()),
    }


def thresholds(embedder: Embedder, work: Path, most: int = 250) -> Json:
    """Returns how questions on paragraphs of our own score: `PARTIAL` and `ANSWER` were set by it."""
    rng = Random("thresholds")
    pages = essays.paragraphs(rng, "train")
    texts = [Text(str(n), " ".join(sentence for sentence, *_ in page), "") for n, page in enumerate(pages)]
    every = [JudgedQuestion(q, str(n)) for n, page in enumerate(pages) for _, *questions in page for q in questions]
    asked = rng.sample(every, min(most, len(every)))
    scores = np.array(list(weighed(texts, asked, embedder, work / "essays")))
    first = scores[scores[:, 2] > 0, 0]  # "what happened to her?" finds nothing among forty people
    return {
        "questions": len(asked),
        "found_first": len(first),
        "auroc": auroc(scores[:, 0], scores[:, 1]),
        "found_first_quantiles": {str(q): float(np.quantile(first, q)) for q in (0.02, 0.05, 0.1, 0.25)},
        "removed_quantiles": {str(q): float(np.quantile(scores[:, 1], q)) for q in (0.5, 0.75, 0.9, 0.95)},
    }


OTHERS = 2000  # documents that answer none of the questions


def other_documents(data: Path) -> list[Text]:
    """Returns Cranfield's abstracts, and pieces of the chunking set's corpora as documents."""
    lines = (data / "cranfield" / "corpus.jsonl").read_text("utf-8").splitlines()
    made = [Text(f"cranfield-{one['_id']}", one["text"], one.get("title", "")) for one in map(json.loads, lines)]
    for path in sorted((data / "chunking").glob("*.md")):
        text = path.read_text("utf-8")
        made += [Text(f"{path.stem}-{at}", text[at : at + 1500]) for at in range(0, min(len(text), 450_000), 1500)]
    return [text for text in made if text.text.strip()][:OTHERS]


def sentences(path: Path, embedder: Embedder, work: Path) -> Json:
    """Returns the ranking of sentences on XQuAD, alone and among other documents, and on our own essays, each question
    with its answer there and without.

    The ranker's probability was fitted on these essays, by the best sentence's MaxSim.
    """
    starts = {
        (f"{a}-{p}", qa["question"]): qa["answers"][0]["answer_start"]
        for a, article in enumerate(json.loads(path.read_text("utf-8"))["data"])
        for p, paragraph in enumerate(article["paragraphs"])
        for qa in paragraph["qas"]
    }

    def holds(one: JudgedQuestion, best: RankedSentence) -> bool:
        start = best.source.start
        return start + best.start <= starts[one.source, one.text] < start + best.end

    rng = Random("thresholds")
    pages = essays.paragraphs(rng, "train")
    own = [Text(str(n), " ".join(sentence for sentence, *_ in page), "") for n, page in enumerate(pages)]
    every = [JudgedQuestion(q, str(n), told) for n, page in enumerate(pages) for told, *asked in page for q in asked]
    some = rng.sample(every, min(400, len(every)))
    texts, asked = xquad(path)
    return {
        "xquad": _ranked(texts, asked, holds, embedder, work / "xquad"),
        "xquad_among_others": _ranked(
            [*texts, *other_documents(path.parent)], asked, holds, embedder, work / "xquad-among-others"
        ),
        "essays": _ranked(own, some, lambda one, best: best.text in one.answer or one.answer in best.text, embedder,
                          work / "ranked-essays"),
    }  # fmt: skip


def evaluation_pages(embedder: Embedder, work: Path, count: int = 300) -> Json:
    """Returns the shares of extractive answers that are right, wrong and refused on the pages that the bundled model is
    evaluated on: 1 to 6 passages of made-up facts or of real prose, each page a collection."""
    made: Json = {}
    for name, make in (("made-up facts", paragraphs.page), ("real prose", quotable.page)):
        rng, found = Random(name), list[str]()
        with Library.open(work / f"pages-{name.replace(' ', '-')}", embedder) as library:
            while len(found) < count:
                page = make(rng, "held_out", [rng.randint(2, 5) for _ in range(rng.randint(1, 6))], 1.0, 1, 0.0)
                if not page.asked:
                    continue
                one, mine = page.asked[0], library.collection(USER, str(len(found))).id
                if not library.store.documents(USER, mine):
                    library.add(USER, mine, [Text(str(n), each.text) for n, each in enumerate(page.passages)])
                hits = library.search(Query(USER, one.text, 6, frozenset({mine}))).hits
                shown = sources(library.store, USER, hits, 4000, lambda text: len(text) // 4, parents=False)
                ranked = library.ranker.rank(one.text, shown, library.rarity(USER))
                if not ranked or ranked[0].probability < ANSWERS:
                    found.append("refused")
                else:
                    same = one.answer in ranked[0].text or ranked[0].text in one.answer
                    found.append("right" if same else "wrong")
        made[name] = {"questions": count} | {each: found.count(each) / count for each in ("right", "wrong", "refused")}
        made[name]["interval"] = wilson(found.count("right"), count)
    return made


def _ranked(
    texts: Sequence[Text],
    asked: Sequence[JudgedQuestion],
    holds: Callable[[JudgedQuestion, RankedSentence], bool],
    embedder: Embedder,
    folder: Path,
) -> Json:
    there, gone, seconds = list[list[tuple[float, bool]]](), list[list[tuple[float, bool]]](), list[float]()
    longer = list[tuple[bool, bool]]()
    with Library.open(folder, embedder) as library:
        mine = library.collection(USER)
        if not mine.documents:
            library.add(USER, mine.id, texts)
        named = {document.id: document.source for document in library.store.documents(USER)}
        rarity = library.rarity(USER)

        def right(one: JudgedQuestion, each: RankedSentence) -> bool:
            return named[each.source.document] == one.source and holds(one, each)

        for one in asked:
            for kept, filters in ((there, {}), (gone, {"source": {"ne": one.source}})):
                hits = library.search(Query(USER, one.text, 6, filters=filters)).hits
                found = sources(library.store, USER, hits, 4000, lambda text: len(text) // 4, parents=False)
                began = time.perf_counter()
                ranked = library.ranker.rank(one.text, found, rarity)
                seconds.append(time.perf_counter() - began)
                kept.append([(each.probability, right(one, each)) for each in ranked])
                if kept is there and ranked:
                    quoted = with_context(one.text, ranked[0])
                    longer.append((right(one, quoted) and quoted.probability >= ANSWERS, quoted != ranked[0]))
    first = [ranked[0] if ranked else (0.0, False) for ranked in there]
    return {
        "questions": len(asked),
        "first": float(np.mean([ok for _, ok in first])),
        "among_five": float(np.mean([any(ok for _, ok in ranked) for ranked in there])),
        "auroc": auroc(np.array([p for p, _ in first]), np.array([r[0][0] if r else 0.0 for r in gone])),
        "right": float(np.mean([ok and p >= ANSWERS for p, ok in first])),
        "right_with_neighbour": float(np.mean([ok for ok, _ in longer])),
        "with_neighbour": float(np.mean([extended for _, extended in longer])),
        "wrong": float(np.mean([not ok and p >= ANSWERS for p, ok in first])),
        "refused_though_there": float(np.mean([p < ANSWERS for p, _ in first])),
        "answered_when_removed": float(np.mean([bool(r) and r[0][0] >= ANSWERS for r in gone])),
        "p50_ms": float(np.median(seconds) * 1e3),
        "risk_coverage": _risk_coverage(first, [r[0][0] if r else 0.0 for r in gone]),
    }


BARS = 40  # of the probability, evenly from 0 to 1
REFUSED = 0.05  # at most, of questions whose answer is there


def _risk_coverage(first: Sequence[tuple[float, bool]], gone: Sequence[float]) -> Json:
    """Returns the cost of each bar of the probability (El-Yaniv and Wiener 2010).

    Coverage is the share of questions that get an answer, risk the share of wrong ones among these. `chosen` is the
    highest bar that refuses at most `REFUSED`.
    """
    p, ok, removed = np.array([p for p, _ in first]), np.array([right for _, right in first]), np.array(gone)

    def at(bar: float) -> dict[str, float]:
        given = p >= bar
        return {
            "bar": round(bar, 4),
            "coverage": float(given.mean()),
            "risk": float((~ok & given).sum() / max(1, given.sum())),
            "answered_when_removed": float((removed >= bar).mean()),
        }

    return {
        "curve": [at(step / BARS) for step in range(BARS + 1)],
        "chosen": at(float(np.sort(p)[int(REFUSED * len(p))])),
        "used": at(ANSWERS),
    }


def auroc(present: NDArray[np.float64], removed: NDArray[np.float64]) -> float:
    """Returns how often a score of the first kind is above one of the second (ties count half)."""
    above = (present[:, None] > removed[None, :]).mean()
    return float(above + 0.5 * (present[:, None] == removed[None, :]).mean())


def _bootstrapped(scores: NDArray[np.float64], draws: int = 500) -> list[float]:
    """A 95% interval over questions."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(draws):
        some = scores[rng.integers(0, len(scores), len(scores))]
        made.append(auroc(some[:, 0], some[:, 1]))
    return [float(x) for x in np.percentile(made, (2.5, 97.5))]


def _stderr(values: Sequence[float]) -> float:
    return float(np.std(values) / np.sqrt(len(values)))
