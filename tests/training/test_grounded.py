"""Grounded answers: every quote stands in its source, answers called absent are absent, and held-out stays held out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from training import phrases
from training.conversation import Conversation, ModelReply
from training.tasks import grounded
from training.text import cloze, entities, essays, paragraphs, quotable
from training.text.passages import MAX_WORDS_LENGTH, Asked, Page, QuotedPassage, shape

pytestmark = pytest.mark.slow

MAKERS = (paragraphs.page, essays.page, quotable.page)


def _pages(count: int, **options: float) -> Iterator[Page]:
    for seed in range(count):
        for make in MAKERS:
            rng = Random(seed)
            phrasing = "train" if seed % 2 else "held_out"
            yield make(rng, phrasing, shape(rng, 1.0), 1.0, 4, options.get("absent", 0.3))  # type: ignore[arg-type]


def _prompt(conversation: Conversation) -> str:
    return "\n".join(message.content for message in conversation.messages if message.role != "assistant")


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
def test_same_seed_gives_the_same_conversation(progress: float) -> None:
    for seed in range(20):
        made = [grounded.conversation(Random(seed), "train", progress) for _ in range(2)]
        assert made[0] == made[1]


def test_answers_are_quoted_word_for_word_from_the_passage_of_their_label() -> None:
    answers = 0
    for seed in range(200):
        made = grounded.conversation(Random(seed), "train", 1.0)
        prompt = _prompt(made)
        for message in made.messages:
            if message.role != "assistant" or message.content in (grounded.MISSING, "You're welcome!"):
                continue
            label, quote = re.fullmatch(r"\[(S\d+)\] (.+)", message.content, re.DOTALL).groups()  # type: ignore[union-attr]
            opening = re.search(rf"[\[(\"\n ]?{label}[\]):\"]", prompt)
            assert opening is not None
            source = re.split(r"\n+(?=[\[(]?S\d+[\]):]|<source)", prompt[opening.start() + 1 :])[0]
            assert quote in source
            answers += 1
    assert answers > 200


def test_a_fact_asked_for_is_in_its_answer() -> None:
    for seed in range(100):
        for one in paragraphs.page(Random(seed), "train", [3, 3], 1.0, 4, 0.0).asked:
            assert one.value.lower() in one.answer.lower()


def test_a_sentence_answers_only_when_its_page_has_it() -> None:
    for page in _pages(60):
        for asked in page.asked:
            if asked.answer:
                assert asked.answer in page.passages[asked.passage].sentences
            else:
                assert asked.passage == -1


def test_absent_facts_are_not_on_the_page() -> None:
    """No wording of the relation that was asked about stands beside the entity that was asked about."""
    kinds = paragraphs.relations("train")
    for seed in range(150):
        page = paragraphs.page(Random(seed), "train", [3, 3], 1.0, 4, 1.0)
        sentences = [sentence for passage in page.passages for sentence in passage.sentences]
        for asked in page.asked:
            for relation in (relation for kind in kinds.values() for relation in kind):
                for form in relation.asks:
                    head, tail = form.split("{e}", 1)
                    if not (asked.text.startswith(head) and asked.text.endswith(tail) and len(head) + len(tail) > 12):
                        continue
                    entity = asked.text[len(head) : len(asked.text) - len(tail)]
                    for say in relation.says:
                        known = re.escape(say.replace("{e}", entity)).replace(r"\{v\}", ".+")
                        assert not any(re.search(known, sentence, re.IGNORECASE) for sentence in sentences)


def test_absent_questions_on_prose_share_little_with_every_sentence() -> None:
    for seed in range(60):
        page = quotable.page(Random(seed), "train", [3, 3], 0.0, 3, 1.0)
        sentences = [sentence for passage in page.passages for sentence in passage.sentences]
        assert all(max(quotable.scores(one.text, sentences)) < 0.5 for one in page.asked)


def test_a_question_singles_out_its_sentence() -> None:
    sentences = ["The queue is closed by the writer.", "The reader waits for the queue.", "Errors are logged to disk."]
    assert quotable.points_to("who closed the queue, which writer?", sentences, 0)
    assert not quotable.points_to("what about the queue?", sentences, 0)


def test_about_a_quarter_of_the_questions_have_no_answer() -> None:
    answers = [
        message.content
        for seed in range(300)
        for message in grounded.conversation(Random(seed), "train", 1.0).messages
        if message.role == "assistant"
    ]
    assert 0.15 < sum(answer == grounded.MISSING for answer in answers) / len(answers) < 0.35


def test_the_first_conversations_are_short_and_answerable() -> None:
    for seed in range(100):
        made = grounded.conversation(Random(seed), "train", 0.0)
        assert grounded.MISSING not in [message.content for message in made.messages]
        assert len(_prompt(made)) < 700


def test_pages_keep_to_the_longest_context() -> None:
    for page in _pages(60):
        words = sum(len(passage.text.split()) for passage in page.passages)
        assert words <= MAX_WORDS_LENGTH or len(page.passages) == 1


def test_relations_and_their_wordings_do_not_cross_over() -> None:
    wordings = {
        phrasing: {
            text for kind in paragraphs.relations(phrasing).values() for one in kind for text in one.says + one.asks
        }
        for phrasing in ("train", "held_out")
    }
    assert not wordings["train"] & wordings["held_out"]
    assert sum(len(kind) for kind in paragraphs.relations("train").values()) >= 60
    assert all("{e}" in text for texts in wordings.values() for text in texts)


def test_essays_phrases_synonyms_and_names_do_not_cross_over() -> None:
    texts = {
        part: {text for essay in essays._DATA[part] for one in essay["told"] for text in one} for part in essays._DATA
    }
    assert not texts["train"] & texts["held_out"]
    for name, kind in phrases.read("grounded").items():
        assert name == "missing" or not set(kind.train) & set(kind.held_out) - {"{q}"}
    words = {part: {word for words in cloze._SYNONYMS[part].values() for word in words} for part in cloze._SYNONYMS}
    assert not words["train"] & words["held_out"]
    for kind_of_name in entities.KINDS:
        rng = Random(kind_of_name)
        trained = {entities.name(rng, kind_of_name, "train") for _ in range(50)}
        assert not trained & {entities.name(rng, kind_of_name, "held_out") for _ in range(50)}
    assert not set(quotable._modules("train")) & set(quotable._modules("held_out"))


@pytest.mark.parametrize("make", [grounded.case, grounded.prose_case])
@pytest.mark.parametrize("present", [True, False])
def test_judges_accept_what_is_wanted_and_nothing_else(make: object, present: bool) -> None:
    assert callable(make)
    for seed in range(20):
        case = make(Random(seed), 1 + seed % 4, present)
        wanted = case.wanted[0].content
        assert all(case.judge(case.wanted).values())
        wrong = ["", "[S1]", "S1 S2", "Something else entirely. [S1]", "yes", _prompt(case.prompt)]
        if present:
            number = int(re.findall(r"\[S(\d+)\]", wanted)[-1])
            wrong += [grounded.MISSING, wanted.split(" ", 1)[1], wanted.replace(f"[S{number}]", f"[S{number + 1}]")]
            wrong += [f"{wanted} [S{number + 1}]"]
        for reply in wrong:
            assert not all(case.judge([ModelReply("", reply, ())]).values()), reply
        assert not all(case.judge([]).values())


def test_a_restated_value_with_its_label_is_right_and_without_it_wrong() -> None:
    judge = grounded._present_judge(
        Page((QuotedPassage("Dam", ("The dam was finished in 1931.", "It is high.")),), ()),
        Asked("when was the dam finished?", "The dam was finished in 1931.", 0, "1931"),
        "S1",
    )
    assert all(judge([ModelReply("", "In 1931. [S1]", ())]).values())
    for wrong in ("In 1931.", "In 19310. [S1]", "In 1931. [S2]", "The dam was finished in 1931. It is high. [S1]"):
        assert not judge([ModelReply("", wrong, ())])["right sentence with its label"]


def test_cases_from_a_squad_file_have_the_answer_in_the_labelled_paragraph(tmp_path: Path) -> None:
    texts = [f"Paragraph {number} says that the mast of ship {number} is {number} metres high." for number in range(4)]
    found = [
        {"context": text, "qas": [{"question": "How high is it?", "answers": [{"text": f"{number} metres"}]}]}
        for number, text in enumerate(texts)
    ]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": found}]}), encoding="utf-8")
    cases = grounded.xquad_cases(path, 4, Random(0))
    assert len(cases) == 4
    for case in cases:
        label, answer = re.fullmatch(r"\[(S\d)\] (.+)", case.wanted[0].content).groups()  # type: ignore[union-attr]
        assert re.search(rf"\[{label}\] Paragraph .* is {answer}", _prompt(case.prompt))
        assert _prompt(case.prompt).count("Paragraph") == 3
        assert all(case.judge(case.wanted).values())
        assert not any(case.judge([ModelReply("", "", ())]).values())
        assert not case.judge([ModelReply("", _prompt(case.prompt) * 2, ())])["quotes the answer"]
