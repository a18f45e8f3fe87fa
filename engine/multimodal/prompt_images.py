"""Images in a chat's prompt: found in its messages, and put where the chat template has a mark for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from engine.errors import ChatTemplateError, ContextLengthExceeded, InvalidParameter
from engine.multimodal.image_input import ImageInput, ImageSpans, offset_of

IMAGE = "<image>"  # as templates write it, once for each image


def images_of(messages: Iterable[Mapping[str, Any]]) -> Iterator[ImageInput]:
    """Yields the images of messages' parts, in order. Any: messages are JSON but for these."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and isinstance(image := part.get("image"), ImageInput):
                yield image


def with_images(
    ids: list[int], mark: int | None, images: Sequence[ImageInput], max_tokens: int | None = None
) -> list[int]:
    """Returns the prompt with each image's tokens in the place of its mark.

    Raises:
        ChatTemplateError: the template wrote another number of marks than there are images.
        ContextLengthExceeded: the prompt has more than `max_tokens` with them.
    """
    if not images:
        return ids
    marks = 0 if mark is None else ids.count(mark)
    if marks != len(images):
        raise ChatTemplateError(
            f"the model's chat template has a place for {marks} of the messages' {len(images)} images; accepted: "
            "images in messages of the user."
        )
    rest, whole = iter(images), list[int]()
    for id in ids:
        if id == mark:
            whole.extend(next(rest).token_ids)
        else:
            whole.append(id)
    if max_tokens is not None and len(whole) > max_tokens:
        tokens = sum(len(image.token_ids) for image in images)
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_tokens} tokens, and the prompt has {len(whole)}, {tokens} of "
            f"them of {len(images)} images; accepted: at most {max_tokens - 1}, as an answer needs some."
        )
    return whole


def check_whole(tokens: Sequence[int], size_of: Callable[[int], int]) -> None:
    """Checks the images among the tokens of a model whose images' tokens attend to each other: a part of one would be
    another thing than in the whole. `size_of` gives the tokens of the image that one of its ids is of.

    Raises:
        InvalidParameter: there is a part of one.
    """
    for start, end in ImageSpans().among(tokens):
        size = size_of(tokens[start])
        if offset_of(tokens[start]) or end - start != size:
            raise InvalidParameter(
                "tokens", f"tokens {start} to {end - 1} are a part of an image, whose tokens attend to each other in "
                f"this model; accepted: all {size} of an image, or none.",
            )  # fmt: skip
