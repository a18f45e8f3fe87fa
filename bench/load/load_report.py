"""The load's figures as the tables of docs/load.md."""

from __future__ import annotations

from bench.load.claims import PARTS as CLAIMS
from bench.load.faults import PARTS as FAULTS
from bench.parts import Json
from bench.report import ROOT, between

PAGE = ROOT / "docs" / "load.md"

# Published figures for the same idea, on GPUs and larger models, for comparison.
PUBLISHED = {
    "continuous batching": "2–10×, up to 23× with paging (Orca, Yu et al. 2022; Anyscale 2023)",
    "continuous batching, what is done costs nothing": "–",
    "paged KV": "2–4×; waste of 60–80% against under 4% (Kwon et al. 2023)",
    "prefix cache": "up to 6.4× (SGLang, Zheng et al. 2024)",
    "chunked prefill": "2.6–5.6× the load under an objective for gaps (Sarathi-Serve, Agrawal et al. 2024)",
    "mixed steps": "as above",
}


def write(made: Json) -> None:
    """Bring the measured part of the page up to date with every part that is there."""
    text = "\n\n".join(part for part in (_said(made), _policies(made), _burst(made), _claims(made), _growth(made),
                                         _overload(made), _faults(made), _soak(made)) if part)  # fmt: skip
    between(PAGE, f"{text}\n")


def _said(made: Json) -> str:
    hw = made["hardware"]
    return (
        f"Measured on {made['date']} with `{made['command']}`: {hw['cpu']}, {hw['cores']} cores, "
        f"{hw['cpu_capability']}{' with AMX' if hw['amx'] else ''}, torch {hw['torch']}, Python {hw['python']}, "
        "the bundled model."
    )


def _policies(made: Json) -> str:
    texts = []
    for trace, title in (("azure", "Azure, conversations 2023"), ("mooncake", "Mooncake, conversations that go on")):
        part = made.get(f"policies on {trace}")
        if part is None:
            continue
        lines = [
            f"### Policies on a recorded trace: {title}",
            "",
            f"{part['requests']} requests at {part['rate_per_s']:.1f} a second, {LOAD_TOLD} "
            f"Kept: the first token within {part['objective']['ttft_s'] * 1e3:.0f} ms and "
            f"{part['objective']['itl_s'] * 1e3:.0f} ms a token on average.",
            "",
            "| policy | first token, ms: p50 / p95 / p99 / longest | between tokens, ms: p50 / p95 / p99 "
            "| whole answer, s: p50 / p95 / p99 | kept | goodput, requests/s "
            "| of class 0 / 1 / 2, p95 of first token, ms |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, run in part["policies"].items():
            classes = " / ".join(f"{each['ttft_s']['p95'] * 1e3:.0f}" for each in run["classes"].values())
            lines.append(
                f"| {name} | {_ms(run['ttft_s'], 'p50', 'p95', 'p99', 'max')} "
                f"| {_ms(run['gap_s'], 'p50', 'p95', 'p99')} "
                f"| {' / '.join(format(run['e2e_s'][p], '.2f') for p in ('p50', 'p95', 'p99'))} "
                f"| {run['good']:.0%} | {run['goodput_per_s']:.1f} | {classes} |"
            )
        texts.append("\n".join([*lines, "", f"![Policies on {trace}](img/load-policies-{trace}.png)"]))
    return "\n\n".join(texts)


LOAD_TOLD = "65% of what the engine can do when all are asked at once."


def _burst(made: Json) -> str:
    if "burst" not in made:
        return ""
    lines = [
        "### A burst of prompts beside eight answers",
        "",
        "Prompts of 800 tokens come at 0.4 a second and at ten times of that. Goal: the gaps' p99 in the burst at most "
        "twice the idle one.",
        "",
        "| policy | gaps, ms, p50 / p99 / longest: idle | usual | burst | p99 over idle | prompts' first token in the "
        "burst, ms, p50 / p99 |",
        "|---|---|---|---|---|---|",
    ]
    for policy in ("decode-first", "prefill-first"):
        run = made["burst"][policy]
        cells = [
            " / ".join(f"{run[name][f'gap_{p}_s'] * 1e3:.1f}" for p in ("p50", "p99", "max"))
            for name in ("idle", "usual", "burst")
        ]
        ttft = " / ".join(f"{run['burst'][f'ttft_{p}_s'] * 1e3:.0f}" for p in ("p50", "p99"))
        lines.append(f"| {policy} | {' | '.join(cells)} | **{run['p99_ratio_to_idle']:.2f}×** | {ttft} |")
    return "\n".join(lines)


def _claims(made: Json) -> str:
    if not any(name in made for name in CLAIMS):
        return ""
    lines = [
        "### What the field is built on, switch by switch",
        "",
        "On over off, in turns; median (min–max) of three.",
        "",
        "| switch | published | what is compared | measured |",
        "|---|---|---|---|",
    ]
    told = {"tokens_per_s": "tokens/s", "ttft_p50_s": "first token, p50", "gap_p99_s": "gaps, p99",
            "gap_max_s": "longest gap"}  # fmt: skip
    for name in CLAIMS:
        if (part := made.get(name)) is None:
            continue
        first = True
        for key, words in told.items():
            if (ratio := part["on_over_off"].get(key)) is None:
                continue
            lines.append(
                f"| {name if first else ''} | {PUBLISHED[name] if first else ''} | {words} "
                f"| **{ratio['median']:.2f}×** ({ratio['min']:.2f}–{ratio['max']:.2f}) |"
            )
            first = False
        if "wasted" in part["on"][0]:
            on, off = (sum(each["wasted"] for each in part[way]) / len(part[way]) for way in ("on", "off"))
            lines.append(f"| | | memory that holds no token, on / off | {on:.1%} / {off:.1%} |")
    return "\n".join(lines)


def _growth(made: Json) -> str:
    if "growth of streams" not in made:
        return ""
    return "### Growth\n\n![What grows with what](img/load-growth.png)"


def _overload(made: Json) -> str:
    part = made.get("overload")
    if part is None:
        return ""
    over = part["overload"]
    first, last = part["held_by_minute"][0]["pss_mib"], part["held_by_minute"][-1]["pss_mib"]
    refused = over["statuses"].get("429", 0)
    rows = [
        ("goodput, requests/s: peak / at three times of it", "≥ 90%",
         f"{part['peak_goodput_per_s']:.1f} / {over['goodput_per_s']:.1f}: **{part['goodput_over_peak']:.0%}**"),
        ("first token of what was answered, ms, p50 / p99", "≤ 1,000",
         _ms(over["answered_ttft_s"], "p50", "p99")),
        ("refused with 429, of all", "every one that is not answered",
         f"{refused} of {over['requests']}; neither: {over['neither_answered_nor_refused']}"),
        ("a refusal takes, ms, p50 / p99", "fast", _ms(over["refusal_s"], "p50", "p99")),
        ("memory in the first and the last minute, MiB", "flat", f"{first:.0f} / {last:.0f}"),
        ("back at an idle server's pace after, s", "< 5", f"{part['recovery_s_after_the_last_answer']:.2f}"),
    ]  # fmt: skip
    return "\n".join([
        "### Three times as much as it can do, for five minutes", "",
        f"`ponder serve {' '.join(part['options'])}`; load and server on the same cores.", "",
        "| what | goal | measured |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in rows),
    ])  # fmt: skip


def _faults(made: Json) -> str:
    names = [name for name in FAULTS if name in made]
    if not names:
        return ""
    lines = [
        "### Faults under load",
        "",
        "Six clients ask for known answers all the time and compare every letter.",
        "",
        "| fault | times | streams | recovery, s, p50 / longest | after it: idle within, same answers "
        "| descriptors, threads, processes: before / after |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        part = made[name]
        if "told" in part:
            told = ", ".join(f"{count} {how}" for how, count in part["told"].items())
            lines.append(f"| {name} | {part['times']} | {told} | – | {part['sequences_after']} sequences open | – |")
            continue
        if "not_measured" in part:
            lines.append(f"| {name} | {part['not_measured']} | | | | |")
            continue
        streams = ", ".join(f"{count} {how}" for how, count in part["streams"].items())
        took = part["recovery_s"]
        recovery = f"{took['p50']:.2f} / {took['max']:.2f}" if took["n"] else "–"
        held = [
            ", ".join(str(part[when][key]) for key in ("descriptors", "threads", "processes"))
            for when in ("held_before", "held_after")
        ]
        same = "yes" if part["answers_after_are_the_same"] else "NO"
        lines.append(
            f"| {name} | {part['times']} | {streams} | {recovery} | {part['idle_after_s']:.2f} s, {same} "
            f"| {' / '.join(held)} |"
        )
    return "\n".join(lines)


def _soak(made: Json) -> str:
    part = made.get("soak")
    if part is None:
        return ""
    requests, growth = part["requests"], part["growth_per_hour"]
    settled = part["by_minute"][len(part["by_minute"]) // 3]
    return "\n".join([
        f"### {part['seconds'] / 60:.0f} minutes of everything at once", "",
        f"{requests['requests']} requests, of which {requests['answered']} were answered; beside them "
        + ", ".join(f"{count} × {what}" for what, count in sorted(part["beside_them"].items())) + ".",
        f"Lines of errors in the log: {part['log_lines_of_errors']}.", "",
        "| held | after a third of the time | at the end | slope since then, an hour |", "|---|---|---|---|",
        *(f"| {name} | {settled[key]:.0f} | {part['by_minute'][-1][key]:.0f} | {growth[key]:+.1f} |"
          for key, name in (("pss_mib", "memory, MiB"), ("descriptors", "descriptors"), ("threads", "threads"),
                            ("processes", "processes"))),
    ])  # fmt: skip


def _ms(values: Json, *percents: str) -> str:
    return " / ".join(f"{values[percent] * 1e3:.0f}" for percent in percents)
