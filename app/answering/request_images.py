"""Images of a request's messages: found, fetched, decoded and processed for the model that is asked.

`data:` URLs always; `http` and `https` by the guarded fetcher, where the operator lets tools read public pages. A model
that reads text alone refuses them by name. A remote model gets each picture encoded anew, without the file's metadata.
Knows nothing of any API: each makes its own parts into `image_url`s.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from app.errors import invalid
from app.remote.wire_formats import SentImage
from engine.errors import InvalidImage
from engine.multimodal.image_file import ImageLimits, read_image
from engine.multimodal.image_input import ImageInput
from tools.web import Fetcher, FetchError

if TYPE_CHECKING:
    from engine import Engine

LIMITS = ImageLimits(max_bytes=8 << 20)
MAX_SENT = 32 << 20  # characters of base64 of all images that one request sends to a remote model
AT_ONCE = 2  # images that are decoded at the same time: each takes its pixels of memory
_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
_QUALITIES = (95, 85, 70)  # of a JPEG; the next one where it has too many bytes
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
        places = self.checked(messages, name, sees=engine.image_processor is not None)
        read = {id(place): await self._read(place, engine, name) for place in places}
        return [_parted(message, read) for message in messages]

    async def as_sent(self, messages: Sequence[Json]) -> list[Json]:
        """Returns messages that were `checked`, with their images between their texts as `SentImage`s: each picture
        read as for a model of this server, and encoded anew.

        Raises:
            ApiError: 400, naming the image: it cannot be had or read, or all together are too large.
        """
        read, encoded, sent = dict[int, SentImage](), dict[str, SentImage](), 0
        for place in _places(messages):
            url, where = place["url"], place["where"]
            if url not in encoded:
                encoded[url] = await self._encoded(await self._data(url, where), where)
            image = read[id(place)] = replace(encoded[url], detail=place["detail"])
            sent += len(image.data)
            if sent > MAX_SENT:
                raise invalid(
                    where, f"With {where} the request's images have {sent} characters in base64, encoded as they are "
                    f"sent; accepted: at most {MAX_SENT} for a remote model.",
                )  # fmt: skip
        return [_parted(message, read) for message in messages]

    def checked(self, messages: Sequence[Json], name: str, *, sees: bool) -> list[Json]:
        """Returns the images of messages to the model `name`; none of them is read.

        Raises:
            ApiError: 400, naming the image: the model sees none, or there are too many.
        """
        from app.db.chat_exchange import MAX_IMAGES  # SQLAlchemy comes with it, and a worker asks for no such thing

        places = _places(messages)
        if places:
            self.check_seeing(places, places[0]["where"], name, sees=sees)
        if len(places) > MAX_IMAGES:
            where = places[MAX_IMAGES]["where"]
            raise invalid(where, f"The request has {len(places)} images; accepted: at most {MAX_IMAGES}.")
        return places

    def check_seeing(self, images: Sequence[object], where: str, name: str, *, sees: bool) -> None:
        """Raises ApiError where there are images and the model sees none: 400, naming models that do."""
        if images and not sees:
            seeing = ", ".join(map(repr, self.seeing))
            other = (
                f"the model {seeing}" if self.seeing else f"a model that sees, of {', '.join(seeing_architectures())}"
            )
            message = f"{where} has an image, and the model {name!r} reads text alone; accepted: text, or {other}."
            raise invalid(where, message, "model_cannot_see")

    async def stripped(self, url: str, where: str) -> str:
        """Returns a `data:` URL of the same picture, upright, without any metadata: what is kept of it.

        Raises:
            ApiError: 400: it is no such URL, or no image that is read.
        """
        if url[:5].lower() != "data:":
            raise invalid(where, f'{where} is {url!r:.60}; accepted: "data:image/png;base64,…" (png, jpeg, webp, gif).')
        return (await self._encoded(decoded(url, where), where)).url

    async def _encoded(self, data: bytes, where: str) -> SentImage:
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


def _rewritten(data: bytes) -> SentImage:
    """Returns an image file's picture alone: as JPEG where it was one or a PNG would be too large, else as PNG.

    Raises:
        InvalidImage: it cannot be read, or is too large even so.
    """
    image, length = read_image(data, LIMITS), 0
    image.info.clear()  # Pillow writes a comment and a colour profile that it finds there
    tries: list[Json] = [{"format": "jpeg", "quality": quality} for quality in _QUALITIES]
    for options in tries if data.startswith(b"\xff\xd8") else [{"format": "png"}, *tries]:
        written = io.BytesIO()
        image.save(written, **options)
        length = written.tell()
        if length <= LIMITS.max_bytes:
            return SentImage(f"image/{options['format']}", base64.b64encode(written.getvalue()).decode())
    raise InvalidImage(
        f"The image has {image.width} x {image.height} pixels and, as a JPEG of quality {_QUALITIES[-1]}, {length} "
        f"bytes; accepted: at most {LIMITS.max_bytes}."
    )


def seeing_architectures() -> tuple[str, ...]:
    """Returns the architectures here that read images."""
    from engine.families import FAMILIES  # torch comes with it

    return tuple(each for family in FAMILIES if family.sees for each in family.architectures)


def _places(messages: Sequence[Json]) -> list[Json]:
    return [image for message in messages for image in message.get("images") or ()]


def _parted(message: Mapping[str, Any], read: Mapping[int, ImageInput | SentImage]) -> Json:
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
