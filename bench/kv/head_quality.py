"""K/V that heads would keep by their attention patterns, and the answers that are left.

A prompt is read as usual. Its answer is then given, token by token, to a model that sees of the prompt's K/V what each
head keeps: the answers are the same where the likeliest token is at each. Answers that are not are decoded so, and
judged. The layouts are chosen by the prompt's last queries, by every eighth, or, as a bound that no profile can pass,
by the answer's own; layouts that are alike in all heads stand beside them.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from bench import report
from bench.kv.head_patterns import (
    POLICIES,
    PUNCTUATION,
    HeadLayout,
    LayerAttention,
    PatternReader,
    Policy,
    TokenKinds,
    layout_of,
    profile,
)
from bench.report import interval
from engine.kv_cache.quality_gate import write_texts
from engine.model.decoder import load_decoder
from engine.model.tokenizer import Tokenizer
from training import reply
from training.conversation import Case, Conversation, Message
from training.evaluate import wilson
from training.tasks import chat, grounded

ANSWER = 80  # tokens, unless it ends before
OBSERVED = 32  # last queries of a prompt that choose its layouts
MAX_KL, MIN_SAME = 0.02, 0.99  # limits that reused chunks are held to, see `engine.config.ChunkReuseConfig`
LENGTHS = (0, 256, 512, 1024, 4096)  # tokens of prompts, for results by length
EXCHANGES = (0, 8, 16, 32)  # between the fact that is told and the question
STORY, STORY_ANSWER = 256, 60  # tokens


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """Choice of layouts: the policy with fewest tokens that recovers `mass` over `queries` ("end", "all" or "answer"),
    or `policy` in all heads. `judged`: answers that differ are decoded."""

    ratio: float
    mass: float = 0.0
    queries: str = "end"
    policy: Policy | None = None
    judged: bool = False

    @property
    def name(self) -> str:
        if self.policy is not None:
            return f"{'+'.join(self.policy)} in all heads, r {self.ratio:g}"
        return f"{self.queries}, T {self.mass:g}, r {self.ratio:g}"


CHOICES = (
    *(LayoutChoice(ratio, mass, judged=True) for ratio in (0.3, 0.1) for mass in (0.95, 0.98, 0.99)),
    *(LayoutChoice(0.3, mass, "all") for mass in (0.95, 0.99)),
    *(LayoutChoice(0.3, mass, "answer") for mass in (0.95, 0.99, 0.999)),
    *(LayoutChoice(0.1, mass, "answer") for mass in (0.95, 0.99, 0.999)),
    LayoutChoice(0.3, policy=POLICIES[-2], judged=True),
    LayoutChoice(0.3, policy=(*PUNCTUATION, "local")),
    LayoutChoice(0.3, policy=POLICIES[-1]),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt; `case` judges its answer, where it has one."""

    tokens: list[int]
    case: Case | None = None


@dataclass(slots=True)
class ChoiceOutcomes:
    """Outcomes of one choice, an entry for each prompt. `right`: before and after, where both are known."""

    prompt: list[int] = field(default_factory=list)  # tokens
    kept: list[float] = field(default_factory=list)  # share of the prompt's attention K/V
    kl: list[float] = field(default_factory=list)  # nats, summed over the answer
    tokens: list[int] = field(default_factory=list)  # of the answer, without the first, which the whole prompt decides
    same: list[bool] = field(default_factory=list)
    right: list[tuple[bool, bool]] = field(default_factory=list)
    policies: Counter[Policy] = field(default_factory=Counter)


def _greedy(reader: PatternReader, prompt: Sequence[int], after: Tensor, layouts: Sequence[HeadLayout] | None,
            ends: frozenset[int], limit: int) -> list[int]:  # fmt: skip
    """Answers greedily; `after` are the log-probabilities after the prompt."""
    said = [int(after.argmax())]
    while said[-1] not in ends and len(said) < limit:
        tokens = [*prompt, *said]
        said.append(int(reader.read(tokens, len(tokens) - 1, layouts)[-1].argmax()))
    return said


def _right(case: Case, tokenizer: Tokenizer, said: Sequence[int], ends: frozenset[int]) -> bool:
    text = tokenizer.decode([id for id in said if id not in ends], skip_special=False)
    made = reply.read(text, ended=said[-1] in ends)
    return not made.broken and all(value is True for value in case.judge([made]).values())


def _layouts(choice: LayoutChoice, attention: dict[str, list[LayerAttention]], kinds: TokenKinds) -> list[HeadLayout]:
    seen = attention[choice.queries]
    if choice.policy is None:
        return [profile(layer, kinds, choice.mass, choice.ratio) for layer in seen]
    policy = choice.policy
    return [layout_of([policy] * len(layer.received), kinds, layer.received, choice.ratio) for layer in seen]


def ask(
    reader: PatternReader, tokenizer: Tokenizer, asked: AskedPrompt, choices: Sequence[LayoutChoice],
    outcomes: Sequence[ChoiceOutcomes], limit: int = ANSWER,
) -> None:  # fmt: skip
    """Measures one prompt under each choice, and adds what it found to `outcomes`."""
    prompt, ends = asked.tokens, frozenset(tokenizer.eos_token_ids)
    n, kinds = len(prompt), TokenKinds.of(tokenizer, prompt)
    end, every = reader.watch(prompt, 0, (slice(-OBSERVED, None), slice(None, None, 8)))
    exact = _greedy(reader, prompt, reader.read(prompt, n - 1)[-1], None, ends, limit)
    given = [*prompt, *exact[:-1]]
    if len(exact) < 2:  # nothing is read after the prompt
        return
    (answer,) = reader.watch(given, n, (slice(None),))
    attention = {"end": end, "all": every, "answer": answer}
    before = reader.read(given, n)
    right = None if asked.case is None else _right(asked.case, tokenizer, exact, ends)
    for choice, outcome in zip(choices, outcomes, strict=True):
        layouts = _layouts(choice, attention, kinds)
        after = reader.read(given, n, layouts)
        same = after.argmax(-1).tolist() == exact[1:]
        outcome.prompt.append(n)
        kept = torch.cat([each.kept for each in layouts]).double()
        outcome.kept.append(float(kept.mean()) / n)
        outcome.kl.append(float((before.exp() * (before - after)).sum(dtype=torch.float64)))
        outcome.tokens.append(len(exact) - 1)
        outcome.same.append(same)
        outcome.policies.update(policy for layer in layouts for policy in layer.policies)
        if right is not None and asked.case is not None and (same or choice.judged):
            said = exact
            if not same:
                differs = 1 + int((after.argmax(-1) != torch.tensor(exact[1:])).nonzero()[0])
                begun = [*exact[:differs], int(after[differs - 1].argmax())]
                said = begun + _rest(reader, [*prompt, *begun], layouts, ends, limit - len(begun))
            outcome.right.append((right, right if same else _right(asked.case, tokenizer, said, ends)))


def _rest(reader: PatternReader, tokens: list[int], layouts: Sequence[HeadLayout], ends: frozenset[int],
          limit: int) -> list[int]:  # fmt: skip
    """Continues an answer whose last token is not read yet, and those before it are."""
    if tokens[-1] in ends or limit < 1:
        return []
    return _greedy(reader, tokens, reader.read(tokens, len(tokens) - 1, layouts)[-1], layouts, ends, limit)


def long_chat(rng: Random, exchanges: int) -> Case:
    """Asks for a fact that was told so many exchanges before, beside those that `chat.case` has."""
    asked = chat.case(rng, "memory")
    between: list[Message] = []
    for _ in range(exchanges):
        one = chat.case(rng, rng.choice(("beyond", "identity", "smalltalk")))
        between += [*one.prompt.messages, Message("assistant", one.wanted[0].content)]
    told, later = asked.prompt.messages[:2], asked.prompt.messages[2:]
    return Case(Conversation((*told, *between, *later)), asked.judge, asked.wanted)


def prompts(tokenizer: Tokenizer, n: int) -> dict[str, list[AskedPrompt]]:
    """Returns `n` prompts of each kind."""
    rng = Random(33)
    cases = {
        "long chats": [long_chat(rng, EXCHANGES[at % len(EXCHANGES)]) for at in range(n)],
        "made-up facts, 6 passages": [grounded.case(rng, passages=6) for _ in range(n)],
        "real prose, 6 passages": [grounded.prose_case(rng, passages=6) for _ in range(n)],
    }
    xquad = Path(os.environ.get("PONDER_SHARED", report.ROOT.parent / "shared")) / "data/retrieval/xquad_en_dev.json"
    if xquad.is_file():
        cases["XQuAD, 3 paragraphs"] = grounded.xquad_cases(xquad, n, rng)
    return {
        kind: [
            AskedPrompt(tokenizer.apply_chat_template(case.prompt.as_json(), enable_thinking=False), case)
            for case in of_kind
        ]
        for kind, of_kind in cases.items()
    }


def stories(model: Path, n: int) -> list[AskedPrompt]:
    """Returns `n` beginnings of stories that a model wrote itself, at temperature 1."""
    begin = Tokenizer.load(model).encode("", bos=True)
    texts = write_texts(load_decoder(model, dtype=torch.float32), [begin] * n, STORY)
    return [AskedPrompt(row) for row in texts.tolist()]


def measure_kind(model: Path, asked: Sequence[AskedPrompt], limit: int = ANSWER) -> dict[str, Any]:  # Any: plain JSON
    """Measures prompts of one kind under every choice."""
    tokenizer = Tokenizer.load(model)
    reader = PatternReader(model, max(len(each.tokens) for each in asked) + limit)
    outcomes = [ChoiceOutcomes() for _ in CHOICES]
    for each in asked:
        ask(reader, tokenizer, each, CHOICES, outcomes, limit)
    share = reader.attending_share()
    return {
        "n": len(outcomes[0].same),
        "prompt_tokens": statistics.fmean(outcomes[0].prompt),
        "attending_share": share,
        "rows": [summary(choice, each, share) for choice, each in zip(CHOICES, outcomes, strict=True)],
    }


def summary(choice: LayoutChoice, found: ChoiceOutcomes, attending_share: float) -> dict[str, Any]:  # Any: plain JSON
    """Returns means with 95% intervals: Wilson's of shares, else by bootstrap over prompts; differences are paired."""
    n, same, heads = len(found.same), sum(found.same), found.policies.total()
    kl, kept = sum(found.kl) / sum(found.tokens), statistics.fmean(found.kept)
    row: dict[str, Any] = {
        "choice": choice.name, "kept": kept, "kept_of_block": 1 - attending_share * (1 - kept), "kl_nats": kl,
        "kl_of_answer_interval": interval([of / count for of, count in zip(found.kl, found.tokens, strict=True)]),
        "same_answers": same, "same_answers_interval": wilson(same, n),
        "let_through": kl <= MAX_KL and same / n >= MIN_SAME, "by_length": by_length(found),
        "policies": {"+".join(policy): found.policies[policy] / heads for policy in POLICIES if found.policies[policy]},
    }  # fmt: skip
    if choice.judged and found.right:
        gained = [100.0 * (after - before) for before, after in found.right]
        row |= {
            "right": sum(before for before, _ in found.right), "right_after": sum(after for _, after in found.right),
            "right_points": statistics.fmean(gained), "right_points_interval": interval(gained),
        }  # fmt: skip
    return row


def by_length(found: ChoiceOutcomes) -> list[dict[str, Any]]:  # Any: plain JSON
    """Returns what is kept, and the answers that are the same, by the length of prompts."""
    rows = []
    for low, high in itertools.pairwise(LENGTHS):
        some = [at for at, length in enumerate(found.prompt) if low <= length < high]
        if some:
            same = sum(found.same[at] for at in some)
            kept = statistics.fmean(found.kept[at] for at in some)
            rows.append({"tokens": [low, high], "n": len(some), "kept": kept, "same_answers": same})
    return rows


def measure(model: Path, n: int = 300) -> dict[str, Any]:  # Any: plain JSON
    """Measures a model on chats and questions on passages; pebble-draft, and stories260K where it is at hand, too."""
    torch.set_num_threads(1)  # most steps are single tokens, which other work beside would slow tenfold on more
    made: dict[str, Any] = {}
    for each in (model, report.ROOT / "models" / "pebble-draft"):
        for kind, asked in prompts(Tokenizer.load(each), n).items():
            made[f"{each.name}: {kind}"] = measure_kind(each, asked)
            print(f"{each.name}: {kind}", flush=True)
    teller = Path(os.environ.get("PONDER_SHARED", report.ROOT.parent / "shared")) / "data/models/stories260K/hf"
    if teller.is_dir():
        made["stories260K: its own stories"] = measure_kind(teller, stories(teller, n), STORY_ANSWER)
    return made


def tables(made: dict[str, Any]) -> list[str]:  # Any: plain JSON
    """Returns the result as lines of Markdown."""
    lines = []
    for kind, of_kind in made.items():
        mean = f"{of_kind['n']} prompts of {of_kind['prompt_tokens']:,.0f} tokens"
        lines += [f"| {kind}, {mean} | K/V kept | KL, nats | same answers | right: before, after | |", "|" + "---|" * 6]
        for row in of_kind["rows"]:
            low, high = row["same_answers_interval"]
            right = ""
            if "right" in row:
                least, most = row["right_points_interval"]
                points = f"{row['right_points']:+.1f} points, {least:+.1f} to {most:+.1f}"
                right = f"{row['right']}, {row['right_after']} ({points})"
            lines.append(
                f"| {row['choice']} | {row['kept']:.0%} | {row['kl_nats']:.1e} "
                f"| {row['same_answers'] / of_kind['n']:.1%} ({low:.1%}–{high:.1%}) | {right} "
                f"| {'let through' if row['let_through'] else 'refused'} |"
            )
        lines.append("")
    return lines
