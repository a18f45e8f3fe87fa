"""Yes or no: does this text answer the question, does this tool fit the request.

    user: Does this text answer the question? Reply yes or no.   user: Does this tool fit the request? Reply yes or no.
          Question: which year did they finish the dam?                Tool: getWeather: Weather of a town. (town, unit)
          Text: The dam was finished in 1931.                          Request: will it rain in Oslo?
    answer: yes                                                  answer: yes

The first wording is that of `app.api.search.Relevance`. A wrong text comes from the same page, often from the same
passage; a wrong tool from the same list. Each turn asks anew, so that no answer follows from the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from training.conversation import Case, Conversation, Message, ModelReply, Phrasing, Tool, Verdict
from training.phrases import read
from training.tasks import grounded, tool_choice
from training.text.passages import Asked, Page
from training.tool_bank.toolbox import toolbox

RIGHT = 0.55  # share of yes where there is an answer


def text_question(rng: Random, phrasing: Phrasing, question: str, text: str) -> str:
    """Asks whether `text` answers `question`."""
    return read("relevance")["text"].ask(rng, phrasing).replace("{q}", question, 1).replace("{t}", text, 1)


def tool_question(rng: Random, phrasing: Phrasing, request: str, tool: Tool) -> str:
    """Asks whether `tool` fits `request`."""
    function = tool["function"]
    keys = ", ".join(function["parameters"]["properties"])
    described = ": ".join(filter(None, (function["name"], function.get("description", ""))))
    shown = f"{described} ({keys})" if keys else described
    return read("relevance")["tool"].ask(rng, phrasing).replace("{r}", request, 1).replace("{t}", shown, 1)


def right_text(rng: Random, page: Page, asked: Asked) -> str:
    """Returns the sentence that answers, rarely its whole passage."""
    return asked.answer if rng.random() < 0.8 else page.passages[asked.passage].text


def wrong_text(rng: Random, phrasing: Phrasing, progress: float, page: Page, asked: Asked) -> str:
    """Returns a sentence, rarely a passage, that does not answer: of the same passage, the same page or another."""
    others = [passage for at, passage in enumerate(page.passages) if at != asked.passage]
    if not others or rng.random() < 0.1:
        others = list(grounded.sample_page(rng, phrasing, progress).passages)
    near = [one for one in page.passages[asked.passage].sentences if one != asked.answer] if asked.answer else []
    if near and rng.random() < 0.6:
        return rng.choice(near)
    passage = rng.choice(others)
    return rng.choice(passage.sentences) if rng.random() < 0.8 else passage.text


def _texts(rng: Random, phrasing: Phrasing, progress: float, count: int) -> list[tuple[str, bool]]:
    made: list[tuple[str, bool]] = []
    while len(made) < count:
        page = grounded.sample_page(rng, phrasing, progress)
        for asked in rng.choices(page.asked, k=min(count - len(made), 2 * len(page.asked))):
            right = bool(asked.answer) and rng.random() < RIGHT
            text = right_text(rng, page, asked) if right else wrong_text(rng, phrasing, progress, page, asked)
            if right or asked.answer != text:
                made.append((text_question(rng, phrasing, asked.text, text), right))
    return made


def _tools(rng: Random, phrasing: Phrasing, progress: float, count: int) -> list[tuple[str, bool]]:
    offered = toolbox(rng, phrasing, progress, 2 if progress < 0.2 else 6)
    made = []
    for _ in range(count):
        wanted, text = tool_choice.sample_request(rng, phrasing, offered)
        right = rng.random() < RIGHT
        shown = wanted if right else rng.choice([tool for tool in offered if tool is not wanted])
        made.append((tool_question(rng, phrasing, text, shown.tool), right))
    return made


def conversation(rng: Random, phrasing: Phrasing, progress: float) -> Conversation:
    """Two to six judgements, all of texts or all of tools; short texts at `progress` 0."""
    make = _tools if rng.random() < 0.35 else _texts
    messages: list[Message] = []
    for text, right in make(rng, phrasing, progress, rng.randint(2, 6)):
        messages += [Message("user", text), Message("assistant", "yes" if right else "no")]
    return Conversation(tuple(messages), enable_thinking=rng.random() < 0.2)


def case(rng: Random, tool: bool, right: bool) -> Case:
    """One judgement in held-out words, of a sentence of made-up facts or real prose, or of a tool."""
    made: list[tuple[str, bool]] = []
    while not made:
        made = [one for one in (_tools if tool else _texts)(rng, "held_out", 1.0, 2) if one[1] == right]
    text = made[0][0]
    wanted = "yes" if right else "no"

    def judge(replies: Sequence[ModelReply]) -> Verdict:
        return {"right": bool(replies) and replies[-1].content.strip().lower().rstrip(".") == wanted}

    prompt = Conversation((Message("user", text),), enable_thinking=False)
    return Case(prompt, judge, (ModelReply("", wanted, ()),))
