"""Stop strings: found wherever the stream is split, and never streamed past."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.model.detokenizer import StopMatcher

words = st.text("ab", min_size=1, max_size=4)


@given(
    text=st.text("abc", max_size=30), stop=st.lists(words, max_size=3), cuts=st.lists(st.integers(0, 30), max_size=8)
)
def test_every_split_gives_the_text_before_the_first_stop_string(text: str, stop: list[str], cuts: list[int]) -> None:
    ends = sorted({min(c, len(text)) for c in cuts} | {len(text)})
    matcher, shown, matched, start = StopMatcher(stop), "", None, 0
    for end in ends:
        piece, matched = matcher.push(text[start:end])
        shown, start = shown + piece, end
        assert text.startswith(shown)
        assert not any(s in shown for s in stop)
        if matched is not None:
            break
    first_ends = {s: text.find(s) + len(s) for s in stop if s in text}
    if matched is None:
        assert not first_ends
        assert shown + matcher.release() == text
    else:
        assert shown == text[: text.find(matched)]
        # the stream was cut no later than the piece in which the first stop string was complete
        assert start - len(piece) <= min(first_ends.values()) or start == min(
            e for e in ends if e >= min(first_ends.values())
        )


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("hello") == ("hello", None)
    assert matcher.push("\n") == ("", None)
    assert matcher.push("x") == ("\nx", None)


def test_the_longest_of_two_that_begin_together_is_reported() -> None:
    assert StopMatcher(["ab", "abc"]).push("xabc") == ("x", "abc")
