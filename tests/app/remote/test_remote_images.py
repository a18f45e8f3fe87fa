"""Images to remote models: sent where the remote sees, read and encoded anew first, and refused everywhere else."""

from __future__ import annotations

import base64
import io
from typing import Any

import httpx
import pytest
from PIL import Image, PngImagePlugin

from app.answering.remote_model import RemoteModel
from app.answering.request_images import LIMITS, RequestImages
from app.config.remote_settings import RemoteSettings
from app.errors import ApiError
from app.remote.wire_formats import IMAGE_TOKENS, RemotePrompt, SentImage
from tests.app.chatting import change, log_of, new_chat, read
from tests.app.remote.planted import Json, Planted

CHAT = "/v1/chat/completions"
SECRETS = (b"taken at home", b"by Ada", b"profile of Ada's camera")


def picture(kind: str = "PNG", colour: str = "red", size: tuple[int, int] = (12, 8)) -> bytes:
    """Returns a file with secrets in each kind of metadata that its format has."""
    description, comment, profile = SECRETS
    exif, data, more = Image.Exif(), io.BytesIO(), dict[str, Any]()
    exif[0x010E] = description.decode()
    if kind == "PNG":
        more["pnginfo"] = PngImagePlugin.PngInfo()
        more["pnginfo"].add_text("Author", comment.decode())
    elif kind in ("JPEG", "GIF"):
        more["comment"] = comment
    Image.new("RGB", size, colour).save(data, kind, exif=exif, icc_profile=profile, **more)
    return data.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(data: bytes, **more: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def text(said: str) -> Json:
    return {"type": "text", "text": said}


def asking(*parts: Json, model: str = "eagle", **fields: Any) -> Json:
    return {"model": model, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 20, **fields}


def file_of(part: Json) -> bytes:
    """Returns the file in a part as either API has it."""
    if part["type"] == "image":
        return base64.b64decode(part["source"]["data"])
    return base64.b64decode(part["image_url"]["url"].partition(";base64,")[2])


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def is_bare(data: bytes) -> bool:
    """Returns whether nothing but the picture is in a file."""
    image = opened(data)
    marked = [each for each in ("icc_profile", "comment", "exif", "Author", "xmp") if each in image.info]
    return not marked and not image.getexif() and not any(secret in data for secret in SECRETS)


@pytest.mark.parametrize("model", ["eagle", "owl"])
def test_images_are_sent_between_the_texts_in_order(http: httpx.Client, planted: Planted, model: str) -> None:
    parts = [text("First:"), part(picture()), text("then:"), part(picture(colour="blue")), text("Which is red?")]
    reply = http.post(CHAT, json=asking(*parts, model=model))
    assert reply.status_code == 200, reply.text
    sent = planted.body["messages"][0]["content"]
    image = "image" if model == "owl" else "image_url"
    assert [each["type"] for each in sent] == ["text", image, "text", image, "text"]
    assert [each["text"] for each in sent if each["type"] == "text"] == ["First:", "then:", "Which is red?"]
    assert [opened(file_of(each)).getpixel((3, 3)) for each in sent[1::2]] == [(255, 0, 0), (0, 0, 255)]
    if model == "owl":
        assert sent[1]["source"].keys() == {"type", "media_type", "data"}
        assert (sent[1]["source"]["type"], sent[1]["source"]["media_type"]) == ("base64", "image/png")
    else:
        assert sent[1]["image_url"].keys() == {"url"} and sent[1]["image_url"]["url"].startswith(
            "data:image/png;base64,"
        )
    remote = reply.json()["routing"]["remote"]
    assert (remote["images"], remote["characters"]) == (2, len("First:then:Which is red?"))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_picture_leaves_without_its_metadata(http: httpx.Client, planted: Planted, kind: str) -> None:
    data = picture(kind)
    assert not is_bare(data)
    reply = http.post(CHAT, json=asking(part(data)))
    assert reply.status_code == 200, reply.text
    (sent,) = planted.body["messages"][0]["content"]
    assert is_bare(file_of(sent)) and opened(file_of(sent)).size == (12, 8)
    assert opened(file_of(sent)).format == ("JPEG" if kind == "JPEG" else "PNG")


def test_the_detail_is_sent_where_the_api_has_it(http: httpx.Client, planted: Planted) -> None:
    for detail in ("low", "high"):
        assert http.post(CHAT, json=asking(part(picture(), detail=detail))).status_code == 200
        assert planted.body["messages"][0]["content"][0]["image_url"]["detail"] == detail
    planted.requests.clear()
    reply = http.post(CHAT, json=asking(part(picture(), detail="low"), model="owl"))
    assert reply.status_code == 400 and reply.json()["error"]["param"].endswith("image_url.detail"), reply.text
    assert not planted.requests
    assert http.post(CHAT, json=asking(part(picture(), detail="high"), model="owl")).status_code == 200


def test_every_api_sends_its_images(http: httpx.Client, planted: Planted) -> None:
    data = picture("JPEG")
    encoded = base64.b64encode(data).decode()
    source = {"type": "base64", "media_type": "image/jpeg", "data": encoded}
    content = [{"type": "image", "source": source}, text("What is it?")]
    items = [{"type": "input_image", "image_url": data_url(data, "image/jpeg")}, {"type": "input_text", "text": "?"}]
    shown = {"role": "user", "content": "What is it?", "images": [encoded]}
    for model in ("eagle", "owl"):
        bodies: dict[str, Json] = {
            "/v1/messages": {"max_tokens": 20, "messages": [{"role": "user", "content": content}]},
            "/v1/responses": {"input": [{"role": "user", "content": items}]},
            "/api/chat": {"messages": [shown], "stream": False},
            "/api/generate": {"prompt": "What is it?", "images": [encoded], "stream": False},
        }
        for path, body in bodies.items():
            planted.requests.clear()
            reply = http.post(path, json={"model": model, **body})
            assert reply.status_code == 200, (path, reply.text)
            image, said = planted.body["messages"][-1]["content"]
            assert is_bare(file_of(image)) and opened(file_of(image)).format == "JPEG" and said["text"], path


def test_the_list_of_models_says_who_sees(http: httpx.Client) -> None:
    sees = {each["id"]: each["sees"] for each in http.get("/v1/models").json()["data"]}
    assert sees["eagle"] is sees["owl"] is True and sees["big"] is sees["claude"] is sees["auto"] is False


@pytest.mark.parametrize("model", ["big", "claude", "pebble"])
def test_a_model_that_reads_text_alone_refuses_and_names_who_sees(
    http: httpx.Client, planted: Planted, model: str
) -> None:
    reply = http.post(CHAT, json=asking(text("?"), part(picture()), model=model))
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["code"] == "model_cannot_see", reply.text
    assert error["param"] == "messages[0].content[1].image_url"
    assert repr(model) in error["message"] and "'eagle', 'owl'" in error["message"]
    assert not planted.requests


HOSTILE = {
    "no image": b"<svg onload=alert(1)>", "empty": b"", "cut short": picture("JPEG", size=(200, 200))[:-400],
    "too many pixels": picture(size=(7000, 6000)),
}  # fmt: skip


@pytest.mark.parametrize("model", ["eagle", "owl"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_and_nothing_is_sent(
    http: httpx.Client, planted: Planted, name: str, model: str
) -> None:
    reply = http.post(CHAT, json=asking(part(picture()), part(HOSTILE[name]), text("?"), model=model))
    assert reply.status_code == 400 and "accepted" in reply.text, reply.text
    assert reply.json()["error"]["param"] == "messages[0].content[1].image_url"
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(HOSTILE[name]).decode() or "="}
    content = [{"type": "image", "source": source}, text("?")]
    messages = [{"role": "user", "content": content}]
    reply = http.post("/v1/messages", json={"model": model, "max_tokens": 20, "messages": messages})
    assert reply.status_code == 400 and "content[0].source" in reply.text, reply.text
    assert not planted.requests


def test_addresses_are_not_fetched_unless_the_operator_lets_it(http: httpx.Client, planted: Planted) -> None:
    for url in (f"{planted.url}/a.png", "file:///etc/passwd", "data:image/svg+xml;base64,PHN2Zz4="):
        reply = http.post(CHAT, json=asking({"type": "image_url", "image_url": {"url": url}}))
        assert reply.status_code == 400 and "accepted" in reply.text, reply.text
    assert not planted.requests


def test_there_may_be_as_many_as_for_a_model_of_here(http: httpx.Client, planted: Planted) -> None:
    assert http.post(CHAT, json=asking(*[part(picture())] * 16)).status_code == 200
    assert len(planted.body["messages"][0]["content"]) == 16
    planted.requests.clear()
    reply = http.post(CHAT, json=asking(*[part(picture())] * 17))
    assert reply.status_code == 400 and "at most 16" in reply.text and not planted.requests


def test_images_of_a_private_request_stay(http: httpx.Client, planted: Planted) -> None:
    for model in ("eagle", "owl"):
        reply = http.post(CHAT, json=asking(part(picture()), model=model, private=True))
        assert reply.status_code == 403 and reply.json()["error"]["code"] == "private_stays_local", reply.text
    assert not planted.requests


# -- runs of the page


def run(http: httpx.Client, chat: str, **fields: Any) -> list[Json]:
    reply = http.post(f"/api/chats/{chat}/runs", json=fields)
    assert reply.status_code == 202, reply.text
    return log_of(http, reply.json()["run_id"])


@pytest.mark.parametrize("model", ["eagle", "owl"])
def test_a_run_sends_the_images_of_its_chat(http: httpx.Client, planted: Planted, model: str) -> None:
    chat = new_chat(http)
    log = run(http, chat, content="What is it?", images=[data_url(picture("JPEG"), "image/jpeg")], model=model)
    assert log[-1]["type"] == "run.completed", log
    sent = next(each for each in log if each["type"] == "remote.sent")
    assert (sent["images"], sent["characters"]) == (1, len("What is it?"))
    image, said = planted.body["messages"][0]["content"]
    assert is_bare(file_of(image)) and said["text"] == "What is it?"
    (kept,) = read(http, chat)["messages"][0]["images"]
    assert is_bare(base64.b64decode(kept.partition(",")[2]))
    log = run(http, chat, content="And now?", model=model)
    assert log[-1]["type"] == "run.completed" and file_of(planted.body["messages"][0]["content"][0])
    assert next(each for each in log if each["type"] == "remote.sent")["images"] == 1


def test_a_run_refuses_images_before_anything_is_kept_or_sent(http: httpx.Client, planted: Planted) -> None:
    chat = new_chat(http)
    for model, url, code in (
        ("big", data_url(picture()), "model_cannot_see"), ("eagle", data_url(b"<svg/>"), "invalid_image"),
        ("owl", f"{planted.url}/a.png", None),
    ):  # fmt: skip
        reply = http.post(f"/api/chats/{chat}/runs", json={"content": "?", "images": [url], "model": model})
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"].startswith("images"), reply.text
        assert code is None or error["code"] == code
    change(http, chat, private=True)
    body = {"content": "?", "images": [data_url(picture())], "model": "eagle"}
    reply = http.post(f"/api/chats/{chat}/runs", json=body)
    assert reply.status_code == 403 and reply.json()["error"]["code"] == "private_stays_local", reply.text
    assert read(http, chat)["messages"] == [] and not planted.requests


def test_a_chat_with_images_is_not_sent_to_a_remote_that_reads_text(http: httpx.Client, planted: Planted) -> None:
    chat = new_chat(http)
    run(http, chat, content="What is it?", images=[data_url(picture())], model="eagle")
    planted.requests.clear()
    log = run(http, chat, content="And now?", model="big")
    assert log[-1]["type"] == "run.failed" and log[-1]["code"] == "model_cannot_see", log
    assert "'eagle', 'owl'" in log[-1]["message"] and not planted.requests


# -- without a server


def place(url: str, at: int = 0) -> Json:
    return {"at": at, "url": url, "detail": "auto", "where": "here"}


def remote(images: RequestImages) -> RemoteModel:
    made = RemoteModel(RemoteSettings(name="eagle", url="http://127.0.0.1:1/v1", model="e", sees=True))
    made.images = images
    return made


class Pages:
    """A fetcher of one file, in the place of the guarded one."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[tuple[str, str, int]] = []

    async def fetch_file(self, url: str, kind: str, max_bytes: int) -> bytes:
        self.asked.append((url, kind, max_bytes))
        return self.data


async def test_an_address_is_fetched_here_and_its_picture_sent() -> None:
    pages: Any = Pages(picture("JPEG"))  # a Fetcher, as far as it is used
    message = {"role": "user", "content": "Look: so", "images": [place("https://example.org/a.jpg", 6)]}
    (made,) = await remote(RequestImages(web=True, fetcher=pages)).with_images([message])
    first, image, last = made["content"]
    assert (first["text"], last["text"]) == ("Look: ", "so") and "images" not in made
    assert image["image"].media_type == "image/jpeg" and is_bare(base64.b64decode(image["image"].data))
    assert pages.asked == [("https://example.org/a.jpg", "image/", LIMITS.max_bytes)]


async def test_a_file_from_an_address_is_checked_as_any_other() -> None:
    message = {"role": "user", "content": "?", "images": [place("https://example.org/a.png")]}
    for data, why in ((bytes(LIMITS.max_bytes + 1), "at most"), (b"<p>", "no known format")):
        pages: Any = Pages(data)
        with pytest.raises(ApiError, match=f"here: .*{why}"):
            await remote(RequestImages(web=True, fetcher=pages)).with_images([message])


async def test_all_images_of_a_request_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.answering.request_images.MAX_SENT", 150)
    message = {"role": "user", "content": "?", "images": [place(data_url(picture())), place(data_url(picture()))]}
    with pytest.raises(ApiError, match=r"characters in base64.*at most 150"):
        await remote(RequestImages()).with_images([message])


async def test_a_picture_that_a_png_makes_too_large_is_a_jpeg() -> None:
    data = io.BytesIO()
    noise = Image.merge("RGB", [Image.effect_noise((2400, 2400), 90) for _ in "RGB"])
    noise.save(data, "WEBP", quality=60)
    sent = await RequestImages().stripped(data_url(data.getvalue(), "image/webp"), "here")
    assert sent.startswith("data:image/jpeg;base64,") and len(sent) <= LIMITS.max_bytes * 4 // 3 + 40


def test_estimates_count_images_and_not_their_base64() -> None:
    image = SentImage("image/png", "A" * 1_000_000)
    plain = RemotePrompt([{"role": "user", "content": "Hello!"}], 10)
    seen = RemotePrompt([{"role": "user", "content": [text("Hello!"), {"type": "image", "image": image}]}], 10)
    assert seen.estimated_tokens - plain.estimated_tokens == IMAGE_TOKENS
    assert seen.characters == plain.characters == 6 and (plain.images, seen.images) == (0, 1)
    assert seen.most_tokens > plain.most_tokens + 50_000
