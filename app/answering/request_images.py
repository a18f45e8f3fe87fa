"""Images of a request's messages: found, fetched, decoded and processed for the model that is asked.

`data:` URLs always; `http` and `https` by the guarded fetcher, where the operator lets tools read public pages. A model
that reads text alone refuses them by name. Knows nothing of any API: each makes its own parts into `image_url`s.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from app.db.chat_exchange import MAX_IMAGES
from app.errors import invalid
from engine.errors import InvalidImage
from engine.families import FAMILIES
from engine.multimodal.image_file import ImageLimits, read_image
from engine.multimodal.image_input import ImageInput
from tools.web import Fetcher, FetchError

if TYPE_CHECKING:
    from engine import Engine

LIMITS = ImageLimits(max_bytes=8 << 20)
AT_ONCE = 2  # images that are decoded at the same time: each takes its pixels of memory
SEEING = tuple(each for family in FAMILIES if family.sees for each in family.architectures)
_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
_ACCEPTED = 'accepted: "data:image/png;base64,…" (png, jpeg, webp, gif), or an http or https address'

Json = dict[str, Any]  # Any: a message as a chat template takes it


class RequestImages:
    """Reads the images of requests to the models of one server. `seeing` names those that can; `web`: whether addresses
    may be fetched."""

    def __init__(self, seeing: Sequence[str] = (), *, web: bool = False, fetcher: Fetcher | None = None) -> None:
        self.seeing = tuple(seeing)
        self._web = web
        self._fetcher = fetcher
        self._known: WeakValueDictionary[tuple[str, bytes, bool], ImageInput] = WeakValueDictionary()
        self._decoding = asyncio.Semaphore(AT_ONCE)

    async def in_parts(self, messages: Sequence[Json], engine: Engine, name: str) -> list[Json]:
        """Returns the messages with their images between their texts, ready for the template of `name`'s model.

        The images are known to its engine while the result is kept.

        Raises:
            ApiError: 400, naming the image: the model sees none, there are too many, or one cannot be had or read.
        """
        places = [image for message in messages for image in message.get("images") or ()]
        if not places:
            return list(messages)
        self.check_seeing(engine, name, places, places[0]["where"])
        if len(places) > MAX_IMAGES:
            where = places[MAX_IMAGES]["where"]
            raise invalid(where, f"The request has {len(places)} images; accepted: at most {MAX_IMAGES}.")
        read = {id(place): await self._read(place, engine, name) for place in places}
        return [_parted(message, read) for message in messages]

    def check_seeing(self, engine: Engine, name: str, images: Sequence[object], where: str) -> None:
        """Raises ApiError where there are images and the model sees none: 400, naming models that do."""
        if images and engine.image_processor is None:
            seeing = ", ".join(map(repr, self.seeing))
            other = f"the model {seeing}" if self.seeing else f"a model that sees, of {', '.join(SEEING)}"
            message = f"{where} has an image, and the model {name!r} reads text alone; accepted: text, or {other}."
            raise invalid(where, message, "model_cannot_see")

    async def stripped(self, url: str, where: str) -> str:
        """Returns a `data:` URL of the same picture, upright, without any metadata: what is kept of it.

        Raises:
            ApiError: 400: it is no such URL, or no image that is read.
        """
        if url[:5].lower() != "data:":
            raise invalid(where, f'{where} is {url!r:.60}; accepted: "data:image/png;base64,…" (png, jpeg, webp, gif).')
        data = decoded(url, where)
        try:
            async with self._decoding:
                return await asyncio.to_thread(_rewritten, data)
        except InvalidImage as error:
            raise invalid(where, f"{where}: {error}", error.code) from None

    async def _read(self, place: Json, engine: Engine, name: str) -> ImageInput:
        where, split = place["where"], place["detail"] != "low"
        data = await self._data(place["url"], where)
        key = (name, hashlib.blake2b(data, digest_size=16).digest(), split)
        if (known := self._known.get(key)) is not None:
            return known
        try:
            async with self._decoding:
                image = await engine.image(data, split=split, limits=LIMITS)
        except InvalidImage as error:
            raise invalid(where, f"{where}: {error}", error.code) from None
        self._known[key] = image
        return image

    async def _data(self, url: str, where: str) -> bytes:
        if url[:5].lower() == "data:":
            return decoded(url, where)
        if url[:8].lower().startswith(("http://", "https://")):
            return await self._fetched(url, where)
        raise invalid(where, f"{where} is {url!r:.60}; {_ACCEPTED}.")

    async def _fetched(self, url: str, where: str) -> bytes:
        if not self._web:
            message = f"{where} is an address, and this server reads no pages (setting web); accepted: a data: URL."
            raise invalid(where, message)
        self._fetcher = self._fetcher or Fetcher()
        try:
            return await self._fetcher.fetch_file(url, "image/", LIMITS.max_bytes)
        except FetchError as error:
            raise invalid(where, f"{where} cannot be fetched: {error}") from None


def decoded(url: str, where: str) -> bytes:
    """Returns the bytes of a `data:` URL of an image (RFC 2397).

    Raises:
        ApiError: 400: it is of another type, or not in base64.
    """
    head, comma, payload = url[5:].partition(",")
    kind, *parameters = head.lower().split(";")
    if not comma or "base64" not in (each.strip() for each in parameters):
        raise invalid(where, f"{where} is {url!r:.40}, a data: URL without base64; {_ACCEPTED}.")
    if kind.strip() not in _TYPES:
        raise invalid(where, f"{where} has the type {kind!r:.60}; {_ACCEPTED}.")
    if len(payload) > LIMITS.max_bytes * 4 // 3 + 4:
        raise invalid(where, f"{where} has {len(payload) * 3 // 4} bytes; accepted: at most {LIMITS.max_bytes}.")
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(where, f"{where} is not valid base64 ({error}); {_ACCEPTED}.") from None


def _rewritten(data: bytes) -> str:
    """Returns an image file's picture alone, as JPEG where it was one, else as PNG."""
    image, written = read_image(data, LIMITS), io.BytesIO()
    kind = "jpeg" if data.startswith(b"\xff\xd8") else "png"
    image.save(written, kind, **({"quality": 95} if kind == "jpeg" else {}))
    return f"data:image/{kind};base64,{base64.b64encode(written.getvalue()).decode()}"


def _parted(message: Mapping[str, Any], read: Mapping[int, ImageInput]) -> Json:
    """Returns a message whose content is a list of its texts and images, in order."""
    made = {name: value for name, value in message.items() if name != "images"}
    if not message.get("images"):
        return made
    text, parts, done = message["content"], list[Json](), 0
    for image in message["images"]:
        parts += _text(text[done : image["at"]])
        parts.append({"type": "image", "image": read[id(image)]})
        done = image["at"]
    return {**made, "content": [*parts, *_text(text[done:])]}


def _text(text: str) -> list[Json]:
    return [{"type": "text", "text": text}] if text else []
