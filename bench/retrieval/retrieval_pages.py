"""Writes the measurements of retrieval as tables of docs/retrieval.md and as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.report import ROOT, save

PAGE = ROOT / "docs" / "retrieval.md"
PICTURES = ROOT / "docs" / "img"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
Json = dict[str, Any]  # Any: plain JSON


def tables(made: Json) -> str:
    """Markdown of everything that was measured."""
    hw = made["hardware"]
    lines = [
        f"Measured on {made['date']} with `{made['command']}`: {hw['gpu'] or hw['cpu']}, {hw['cores']} cores, "
        f"{hw['cpu_capability']}, torch {hw['torch']};",
        f"embedder {made['embedder']}, model {made['model']}.",
        "",
    ]
    for name, stages in made["judged"].items():
        lines += [
            f"### {name}",
            "",
            "| stage | nDCG@10 | recall@100 | MRR@10 | p50 ms | p99 ms |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {s['stage']} | {s['ndcg@10']:.3f} | {s['recall@100']:.3f} | {s['mrr@10']:.3f} | {s['p50_ms']:.0f} "
            f"| {s['p99_ms']:.0f} |"
            for s in stages
        ]
        lines.append("")
    c, e, a = made["chunking"], made["evidence"], made["answers"]
    i, f, p = made["ingest"], made["embedding"], made["pdf"]
    lines += [
        "| what | measured | goal |",
        "|---|---|---|",
        f"| chunking set, recall@{c['k']} of the answering text, {c['questions']} questions | {c['recall']:.3f} "
        f"± {1.96 * c['stderr']:.3f} | .92 |",
        f"| evidence on XQuAD, paragraph there against removed, {e['questions']} questions: AUROC | {e['auroc']:.3f} "
        f"({e['interval'][0]:.3f}–{e['interval'][1]:.3f}) | .95 |",
        f"| … refused though there, and when removed | {e['present_refused']:.1%}, {e['removed_refused']:.1%} | |",
        f"| answers on XQuAD, {a['questions']} questions: the answer is in it | {a['answer_contained']:.1%} | |",
        f"| … citations: precision, recall | {a['citation_precision']:.1%}, {a['citation_recall']:.1%} | |",
        f"| … refused though there, and when removed | {a['refused_though_present']:.1%}, "
        f"{a['refused_when_removed']:.1%} | |",
        f"| … sentences marked as unsupported | {a['sentences_unsupported']:.1%} | |",
        f"| ingest, chunks/s end to end ({i['pieces_per_chunk']:.0f} word pieces each) | {i['chunks_per_s']:.1f} "
        f"| 80 a core with AMX |",
        f"| … the embedder alone, its limit | {f['chunks_per_s']:.1f} | |",
        f"| PDF, pages/s ({p['characters'] // p['pages']} characters each) | {p['pages_per_s']:.0f} | 200 |",
        f"| a document deleted from every view | {i['delete_ms']:.0f} ms | 1 s |",
        f"| prompt tokens found in the prefix cache: sources by score, in fixed order "
        f"| {made['fixed_order']['by score']:.1%}, {made['fixed_order']['by document']:.1%} | |",
        "",
        "Search without reranking; half of a hundred collections may be read:",
        "",
        "| chunks | p50 ms | p99 ms | p50 of embedding | dense | lexical | fetching | vectors | recall@10 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s['chunks']:,} | {s['all_p50_ms']:.1f} | {s['all_p99_ms']:.1f} | {s['embed_p50_ms']:.1f} "
        f"| {s['dense_p50_ms']:.1f} | {s['lexical_p50_ms']:.1f} | {s['fetch_p50_ms']:.1f} "
        f"| {s['dense_bytes'] / 1e6:.0f} MB | {s['recall@10']:.3f} |"
        for s in made["search"]
    ]
    return "\n".join(lines)


def draw(made: Json) -> None:
    """The evidence curve, risk against coverage of sentences, and search as it grows."""
    if "sentences" in made:
        draw_risk(made["sentences"])
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt

    PICTURES.mkdir(parents=True, exist_ok=True)
    present, removed = np.array(made["evidence"]["present"]), np.array(made["evidence"]["removed"])
    bars = np.sort(np.concatenate([present, removed, [0.0, 1.0]]))[::-1]
    figure, axes = plt.subplots(figsize=(4.5, 4.2))
    axes.plot([(removed >= bar).mean() for bar in bars], [(present >= bar).mean() for bar in bars], color="#2f5d50")
    for name, bar in made["evidence"]["thresholds"].items():
        at = (removed >= bar).mean(), (present >= bar).mean()
        axes.plot(*at, "o", color="#b4552d")
        axes.annotate(f"{name} ≥ {bar}", at, textcoords="offset points", xytext=(8, -12))
    axes.set(xlabel="let through though the paragraph was removed", ylabel="let through with the paragraph there")
    axes.set_title(f"Evidence: AUROC {made['evidence']['auroc']:.3f}")
    _save(figure, "evidence.png")
    sizes = [s["chunks"] for s in made["search"]]
    figure, axes = plt.subplots(figsize=(5.5, 4))
    for part in ("embed", "dense", "lexical", "fetch", "all"):
        axes.plot(sizes, [s[f"{part}_p99_ms"] for s in made["search"]], "o-", label=f"{part}, p99")
    axes.set(xscale="log", yscale="log", xlabel="chunks", ylabel="ms", title="Search as it grows")
    axes.legend()
    _save(figure, "retrieval-growth.png")


def draw_risk(sentences: Json) -> None:
    """Draws risk against coverage of answers that are sentences, and what of the removed is answered."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    PICTURES.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), sharex=True)
    names = {"xquad": "XQuAD", "xquad_among_others": "among 2,000 others", "essays": "essays of our own"}
    for (key, name), color in zip(names.items(), ("#2f5d50", "#b4552d", "#5a6c9c"), strict=True):
        if key not in sentences:
            continue
        made = sentences[key]["risk_coverage"]
        for axes, what in ((left, "risk"), (right, "answered_when_removed")):
            axes.plot(
                [at["coverage"] for at in made["curve"]], [at[what] for at in made["curve"]], color=color, label=name
            )
            axes.plot(made["used"]["coverage"], made["used"][what], "o", color=color)
    left.set(xlabel="answered, of those with an answer", ylabel="wrong sentence, of the answered", title="Risk")
    right.set(xlabel="answered, of those with an answer", ylabel="answered", title="The answer is taken away")
    left.legend()
    _save(figure, "risk-coverage.png")


def _save(figure: Any, name: str) -> None:  # Any: matplotlib is imported late
    figure.tight_layout()
    figure.savefig(PICTURES / name, dpi=120)


def write(made: Json) -> Path:
    """Keep the JSON and the pictures, and bring the page up to date."""
    path = save(made)
    draw(made)
    page = PAGE.read_text("utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{tables(made)}\n{END}{tail}", "utf-8")
    return path
