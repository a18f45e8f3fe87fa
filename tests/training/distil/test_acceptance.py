from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.conftest import TINY
from training.distil.acceptance import (
    Acceptance,
    HeldOutAnswer,
    by_case,
    draft_guesses,
    head_guesses,
    interval,
    simulate,
    table,
    total,
)
from training.distil.heads import HeadStack
from training.torch_model import Model


def random_model(seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model(TINY)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


def greedy(model: Model, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_step_keeps_what_stands_before_the_first_wrong_guess() -> None:
    right = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 0, 0], [0, 1, 1], [1, 0, 1]], dtype=torch.bool)
    # The first step keeps two of three and samples a third token, the next none, the last the one that ends it.
    assert simulate(right, 3) == Acceptance(steps=3, tokens=5, drafted=3 + 3 + 1, kept=(2, 1, 0, 0))
    assert simulate(right, 1) == Acceptance(steps=4, tokens=5, drafted=4, kept=(2, 0, 0, 0))


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 4))
def test_the_steps_are_those_of_a_run(certain: list[bool], k: int) -> None:
    """A drafter that is right at some tokens, whatever stands before."""
    drafted = kept = steps = at = 0
    while at < len(certain):
        steps += 1
        for place in range(k):
            if at + place == len(certain):
                break  # the turn's end was guessed
            drafted += 1
            if not certain[at + place]:
                drafted += k - place - 1
                break
        run = 0
        while run < k and at + run < len(certain) and certain[at + run]:
            run += 1
        kept, at = kept + run, at + run + 1
    rows = [[at + j < len(certain) and certain[at + j] for j in range(4)] for at in range(len(certain))]
    found = simulate(torch.tensor(rows), k)
    assert (found.steps, found.drafted, sum(found.kept), found.tokens) == (steps, drafted, kept, len(certain))


def test_the_drafts_guesses_are_those_that_it_would_write() -> None:
    target, draft = random_model(1), random_model(2)
    with torch.inference_mode():
        prompt = [5, 60, 70]
        tokens = greedy(target, prompt, 6)
        tokens[2:4] = greedy(draft, [*prompt, *tokens[:2]], 2)  # right guesses somewhere
        (right,) = draft_guesses(draft, [HeldOutAnswer("a", 0, 0.0, prompt, tokens)])
        assert right.shape == (5, 4)
        for known in range(1, 6):
            guessed = greedy(draft, [*prompt, *tokens[:known]], 4)
            run = next((at for at, (a, b) in enumerate(zip(guessed, tokens[known:], strict=False)) if a != b), None)
            wanted = min(4, len(tokens) - known) if run is None else run
            assert int(right[known - 1].long().cumprod(0).sum()) == wanted
        assert right.any()


def test_the_heads_guesses_are_read_from_the_state_before_the_last_known_token() -> None:
    base = random_model(3)
    heads = HeadStack(TINY.hidden_size, 2)
    for parameter in heads.linears[1].parameters():
        torch.nn.init.normal_(parameter)
    with torch.inference_mode():
        prompt, tokens = [5, 60, 70], [8, 9, 10, 11]
        # Untrained, the first head guesses what the base's own head does: the token sampled from the state, again.
        again = greedy(base, prompt, 1)[0]
        (right,) = head_guesses(base, heads, [HeldOutAnswer("a", 0, 0.0, prompt, [tokens[0], again, *tokens[2:]])])
        assert right.shape == (3, 2) and bool(right[0, 0]) and not right[2, 1]
        hidden = base.hidden(torch.tensor([prompt]))[0, -1]
        second = int((heads(hidden)[1] @ base.model.embed_tokens.weight.T).argmax())
        (right,) = head_guesses(base, heads, [HeldOutAnswer("a", 0, 0.0, prompt, [*tokens[:2], second, 11])])
        assert bool(right[0, 1])


def test_cases_are_counted_over_their_turns_and_written_in_a_table() -> None:
    answers = [HeldOutAnswer("chat: memory", case, 0.0, [1], [2, 3, 4]) for case in (0, 0, 1)]
    rights = [torch.ones(2, 4, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.bool)] * 2
    cases = by_case(answers, rights[:3], 2)
    assert [case.steps for case in cases] == [1 + 2, 1]
    assert total(cases).share == pytest.approx(4 / 8)
    low, high = interval(cases)
    assert low < 0.5 < high
    written = table(answers, rights[:3], 2, abilities=True)
    assert "| all | 2 | 2 | 4 | 50.0% |" in written and "| chat: memory | 2 | 2 |" in written
