"""Answers from given passages: the one sentence that answers, word for word, with the label of its passage.

    system: Answer from the sources.        user: which year did they finish the dam?
            [S1] The dam was begun in …     answer: [S2] The dam was finished in 1931.
            [S2] … The dam was finished …   user: who paid for it?
                                            answer: I don't know. The sources do not say.

The passages come from `paragraphs` (made-up entities), `essays` (as people have them) and `quotable` (real prose);
often several questions are asked on the same ones. Knows how passages are laid out in a chat and how replies are
judged, nothing of how pages are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from training import phrases
from training.conversation import Case, Conversation, Message, ModelReply, Phrasing, Verdict
from training.text import essays, paragraphs, quotable
from training.text.noise import casual
from training.text.passages import Asked, Page, QuotedPassage, shape

Judge = Callable[[Sequence[ModelReply]], Verdict]

MISSING = phrases.read("grounded")["missing"].train[0]
MAX_REPLY_LENGTH = 60  # words; more is no answer but the passage

LAYOUTS = (
    *("[{s}] {text}", "[{s}] {text}", "[{s}] {text}", "[{s}] {text}", "{s}: {text}", "[{s}] {title}\n{text}"),
    *("({s}) {text}", '<source id="{s}">{text}</source>', "[{s}] ({title}) {text}"),
)
_LABEL = re.compile(r"(?<![\w-])S(\d+)\b")  # not the end of "DVB-S2"
_REFUSAL = re.compile(
    r"\b(do not know|don't know|don’t know|not say|does not mention|do not mention|cannot find|can't find|no answer)\b",
    re.IGNORECASE,
)


def sample_labels(rng: Random, count: int, plain: float = 0.9) -> list[str]:
    """Labels for passages: counted from one with probability `plain`, else any numbers, so they must be looked up."""
    if rng.random() < plain:
        return [f"S{number}" for number in range(1, count + 1)]
    numbers = rng.sample(range(1, 13), count)
    return [f"S{number}" for number in (numbers if rng.random() < 0.4 else sorted(numbers))]


def sources(rng: Random, passages: Sequence[QuotedPassage], labels: Sequence[str], layout: str) -> str:
    """Lays passages out under their labels; `layout` has {s}, {text} and perhaps {title}."""
    parts = (
        layout.replace("{s}", label).replace("{title}", passage.title).replace("{text}", passage.text)
        for passage, label in zip(passages, labels, strict=True)
    )
    return rng.choice(("\n", "\n", "\n\n")).join(parts)


def _ask(rng: Random, phrasing: Phrasing, asked: Asked) -> str:
    wording = phrases.read("grounded")["question"].ask(rng, phrasing)
    text = wording.replace("{q}", asked.text)
    text = text[0].upper() + text[1:] if rng.random() < 0.6 else text
    return casual(rng, text, typos=0.03)


def quoted(asked: Asked, label: str) -> str:
    """Returns the answer: first the label of its passage, or that none has it, then the sentence.

    One decision after the other is learned sooner than a sentence's first word, which would hold them all.
    """
    return f"[{label}] {asked.answer}" if asked.answer else MISSING


def _answer(asked: Asked, labels: Sequence[str]) -> str:
    return quoted(asked, labels[asked.passage])


def _laid_out(rng: Random, phrasing: Phrasing, page: Page, labels: Sequence[str], layout: str) -> list[Message]:
    """The page and its questions as a chat: sources in the system message, or in the first question."""
    laid = sources(rng, page.passages, labels, layout)
    instruction = phrases.read("grounded")["instruction"].ask(rng, phrasing)
    opening = f"{instruction}{rng.choice((chr(10), chr(10) * 2))}{laid}" if rng.random() < 0.85 else laid
    place = rng.random()
    messages = [Message("system", opening)] if place < 0.65 else []
    for at, asked in enumerate(page.asked):
        text = _ask(rng, phrasing, asked)
        if at == 0 and 0.65 <= place < 0.9:
            text = f"{opening}\n\n{text}"
        elif at == 0 and place >= 0.9:
            text = f"{text}\n\n{laid}"
        messages += [Message("user", text), Message("assistant", _answer(asked, labels))]
    return messages


def sample_page(rng: Random, phrasing: Phrasing, progress: float) -> Page:
    """Samples passages and questions on them, one at least."""
    rich = min(1.0, progress / 0.5)
    counts = shape(rng, progress)
    questions = 1 if rng.random() < 0.2 else rng.randint(2, 4 if sum(counts) < 6 else 8)
    absent = 0.28 if progress >= 0.06 else 0.0
    while True:
        make = rng.choices((paragraphs.page, essays.page, quotable.page), (45, 20, 35))[0]
        page = make(rng, phrasing, counts, rich, questions, absent)
        if page.asked:
            return page


def conversation(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    """One to eight questions on one to six passages; short and simple at `progress` 0, all of it from 0.5 on."""
    page = sample_page(rng, phrasing, progress)
    labels = sample_labels(rng, len(page.passages), plain=0.4)
    messages = _laid_out(rng, phrasing, page, labels, rng.choice(LAYOUTS))
    if rng.random() < 0.04:
        thanks = phrases.read("grounded")["manners"].ask(rng, phrasing)
        messages += [Message("user", thanks), Message("assistant", "You're welcome!")]
    return Conversation(tuple(messages))


def _cited(reply: str) -> set[str]:
    return {f"S{number}" for number in _LABEL.findall(reply)}


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w]+", " ", text.lower()).split())


def _holds(reply: str, value: str) -> bool:
    return bool(value) and f" {_plain(value)} " in f" {_plain(reply)} "


def _present_judge(page: Page, asked: Asked, label: str) -> Judge:
    """The whole sentence or the value asked for, with the right label and no other, and no other sentence."""
    others = [one for passage in page.passages for one in passage.sentences if not _holds(asked.answer, one)]

    def judge(replies: Sequence[ModelReply]) -> Verdict:
        said = replies[-1].content if replies else ""
        brief = len(said.split()) <= max(MAX_REPLY_LENGTH, len(asked.answer.split()) + 4)
        brief = brief and not any(_holds(said, one) for one in others)
        right = brief and _cited(said) == {label} and (_holds(said, asked.answer) or _holds(said, asked.value))
        refused = not said or (_REFUSAL.search(said) is not None and not right)  # a quote may have such words
        return {"right sentence with its label": right, "no false refusal": not refused}

    return judge


def _absent_judge(replies: Sequence[ModelReply]) -> Verdict:
    said = replies[-1].content if replies else ""
    return {"says it does not know": bool(_REFUSAL.search(said)) and not _cited(said)}


def _case(rng: Random, phrasing: Phrasing, page: Page) -> Case:
    labels = [f"S{number}" for number in range(1, len(page.passages) + 1)]
    asked = page.asked[0]
    layout = rng.choice(LAYOUTS[:5])
    messages = _laid_out(rng, phrasing, Page(page.passages, (asked,)), labels, layout)
    judge = _present_judge(page, asked, labels[asked.passage]) if asked.answer else _absent_judge
    return Case(Conversation(tuple(messages[:-1])), judge, (ModelReply("", messages[-1].content, ()),))


def case(rng: Random, passages: int = 3, present: bool = True, phrasing: Phrasing = "held_out") -> Case:
    """A question on made-up entities; with `present` false, one that no passage answers."""
    counts = [rng.randint(2, 5) for _ in range(passages)]
    return _case(rng, phrasing, paragraphs.page(rng, phrasing, counts, 1.0, 1, 0.0 if present else 1.0))


def prose_case(rng: Random, passages: int = 3, present: bool = True, phrasing: Phrasing = "held_out") -> Case:
    """The same on docstrings, by default ones that were not trained on."""
    while True:
        counts = [rng.randint(2, 5) for _ in range(passages)]
        page = quotable.page(rng, phrasing, counts, 1.0, 1, 0.0 if present else 1.0)
        if page.asked and len(page.passages) == passages:
            return _case(rng, phrasing, page)


def _xquad_judge(answers: Sequence[str], label: str) -> Judge:
    def judge(replies: Sequence[ModelReply]) -> Verdict:
        said = replies[-1].content if replies else ""
        quotes = len(said.split()) <= MAX_REPLY_LENGTH and any(answer.lower() in said.lower() for answer in answers)
        return {"quotes the answer": quotes, "right label": _cited(said) == {label}}

    return judge


def xquad_cases(path: Path, count: int, rng: Random) -> list[Case]:
    """People's questions in the layout of SQuAD, each with its paragraph among three of the article."""
    articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    asked = [
        (article["paragraphs"], at, question)
        for article in articles
        for at, paragraph in enumerate(article["paragraphs"])
        for question in paragraph["qas"]
        if len(question["answers"][0]["text"].split()) < MAX_REPLY_LENGTH
    ]
    cases = []
    for found, at, question in rng.sample(asked, min(count, len(asked))):
        others = rng.sample([other for other in range(len(found)) if other != at], min(2, len(found) - 1))
        order = rng.sample([at, *others], 1 + len(others))
        passages = [QuotedPassage("", (found[one]["context"],)) for one in order]
        labels = [f"S{number}" for number in range(1, len(order) + 1)]
        right = labels[order.index(at)]
        instruction = phrases.read("grounded")["instruction"].ask(rng, "held_out")
        prompt = Conversation(
            (
                Message("system", f"{instruction}\n{sources(rng, passages, labels, LAYOUTS[0])}"),
                Message("user", question["question"]),
            )
        )
        answers = [answer["text"] for answer in question["answers"]]
        wanted = ModelReply("", f"[{right}] {answers[0]}", ())
        cases.append(Case(prompt, _xquad_judge(answers, right), (wanted,)))
    return cases
