"""Finding and copying, in lines and in procedural sequences, and judging by yes and no."""

from __future__ import annotations

import re
from random import Random

import pytest

from app.api.search import QUESTION
from training import mixture, procedural
from training.phrases import read
from training.tasks import grounded, lookup, relevance
from training.text.passages import stems

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_an_answer_is_a_line_with_its_label(progress: float) -> None:
    missing = 0
    for seed in range(150):
        made = lookup.conversation(Random(seed), "train", progress)
        assert made == lookup.conversation(Random(seed), "train", progress)
        prompt = made.messages[0].content
        for question, answer in zip(made.messages[-2::-2], made.messages[::-2], strict=False):
            if answer.content == grounded.MISSING:
                missing += 1
                continue
            label, line = re.fullmatch(r"\[(S\d+)\] (.+)", answer.content, re.DOTALL).groups()  # type: ignore[union-attr]
            source = re.search(rf"\b{label}\b\W*{re.escape(line)}", prompt)
            assert source, (prompt, answer)
            asked = question.content.removeprefix(prompt) if question.content != prompt else prompt
            assert label.lower() in asked.lower() or stems(asked) & stems(line) or line.split()[0] in asked
    assert missing


def test_words_of_a_missing_line_are_in_no_line() -> None:
    found = 0
    for seed in range(100):
        made = lookup.conversation(Random(seed), "train", 1.0)
        if made.messages[0].role != "system":
            continue
        lines = made.messages[0].content.partition("\n")[2]
        for question, answer in zip(made.messages[1::2], made.messages[2::2], strict=True):
            if answer.content == grounded.MISSING:
                words = re.findall(r"[A-Z]\w+|\w{9,}", question.content[1:])
                assert not any(re.search(rf"\b{word}\b", lines) for word in words)
                found += 1
    assert found > 20


def test_about_half_of_the_judgements_are_yes_at_every_difficulty() -> None:
    for progress in (0.0, 0.3, 1.0):
        rng = Random(1)
        said = [
            message.content
            for _ in range(200)
            for message in relevance.conversation(rng, "train", progress).messages
            if message.role == "assistant"
        ]
        assert set(said) == {"yes", "no"}
        assert 0.35 < said.count("yes") / len(said) < 0.65


def test_a_text_that_answers_is_the_answer_and_another_is_not() -> None:
    for seed in range(100):
        rng = Random(seed)
        page = grounded.sample_page(rng, "train", 1.0)
        asked = page.asked[0]
        right = relevance.right_text(rng, page, asked) if asked.answer else None
        wrong = relevance.wrong_text(rng, "train", 1.0, page, asked)
        assert right is None or asked.answer in right
        assert asked.answer != wrong
        assert not asked.answer or asked.answer not in wrong


@pytest.mark.parametrize("tool", [False, True])
def test_a_case_is_judged_by_its_word(tool: bool) -> None:
    for right in (True, False):
        case = relevance.case(Random(3), tool, right)
        assert case.wanted[0].content == ("yes" if right else "no")
        assert case.judge(case.wanted) == {"right": True}


def test_the_first_wording_is_the_one_that_reranking_asks() -> None:
    assert QUESTION.format(query="{q}", text="{t}") in read("relevance")["text"].train


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_what_is_learned_stands_in_a_segment_before(progress: float) -> None:
    rng = Random(int(progress * 10))
    for _ in range(200):
        ids, weights = procedural.row(rng, 6144, progress)
        assert len(ids) == len(weights) and min(ids) >= procedural.ORDINARY and max(ids) < 6144
        begins = next(at for at, weight in enumerate(weights) if weight)
        spans, at = list[tuple[int, int]](), begins
        while at < len(ids):
            end = next((other for other in range(at, len(ids)) if not weights[other]), len(ids))
            spans.append((at, end))
            at = next((other for other in range(end, len(ids)) if weights[other]), len(ids))
        mark = ids[0]
        for first, end in spans:
            wanted = ids[first:end]
            assert wanted[-1] == mark  # the segment's end is learned, too
            copied = wanted[:-1]
            places = [at for at in range(begins) if ids[at : at + len(copied)] == copied]
            assert places and all(weights[at] == 0 for at in range(begins))


def test_few_different_tokens_at_first_and_all_of_them_later() -> None:
    def largest(progress: float) -> int:
        rng = Random(0)
        return max(max(procedural.row(rng, 6144, progress)[0]) for _ in range(100))

    assert largest(0.0) < procedural.FEW
    assert procedural.FEW < largest(0.5) < 3000
    assert largest(1.0) > 6000


def test_their_share_falls() -> None:
    shares = [mixture.procedural_share(at / 10) for at in range(11)]
    assert (shares[0], shares[10]) == pytest.approx(mixture.PROCEDURAL)
    assert shares == sorted(shares, reverse=True)
