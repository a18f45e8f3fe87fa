"""Images over HTTP, in every API's own form: served right or refused with a reason, never an error of the server."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from app.answering.request_images import LIMITS, RequestImages
from app.cli.terminal import RemoteChat, converse, image_parts
from app.config import BadSetting
from tests.app.chatting import begun_elsewhere
from tests.app.conftest import Server, serving
from tests.engine.multimodal import seeing
from tests.engine.multimodal.seeing import picture, png
from tools.web import Fetcher


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = seeing.build(text={"tie_word_embeddings": False, "max_position_embeddings": 2048})
    path = seeing.write(tmp_path_factory.mktemp("models") / "seer", model)
    with serving(path, tmp_path_factory.mktemp("data"), ollama_api=True) as server:
        yield server


@pytest.fixture(scope="module")
def web(seer: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=seer.url, timeout=60) as client:
        yield client


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def chat(*parts: Any, text: str = "What is it?", **more: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": text}]
    return {"model": "default", "messages": [{"role": "user", "content": content}], "max_tokens": 4, **more}


def ask(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


# -- the forms of each API


def test_the_model_list_says_who_sees(web: httpx.Client, http: httpx.Client) -> None:
    assert {each["id"]: each["sees"] for each in web.get("/v1/models").json()["data"]}["seer"] is True
    assert not any(each["sees"] for each in http.get("/v1/models").json()["data"])
    assert "vision" in web.post("/api/show", json={"model": "seer"}).json()["capabilities"]


def test_usage_counts_the_tokens_of_images_and_a_second_question_finds_them(web: httpx.Client) -> None:
    plain = ask(web, chat())["usage"]["prompt_tokens"]
    url = data_url(png(90, 51, seed=70))
    first, second = ask(web, chat(part(url))), ask(web, chat(part(url), text="And now?"))
    assert first["usage"]["prompt_tokens"] - plain > 5 * seeing.FEATURES
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 5 * seeing.FEATURES
    metrics = dict(line.rsplit(" ", 1) for line in web.get("/metrics").text.splitlines() if line[0] != "#")
    assert float(metrics["ponder_encoded_image_tokens_total"]) >= 5 * seeing.FEATURES
    assert float(metrics["ponder_encoder_seconds_total"]) > 0


def test_low_detail_takes_fewer_tokens(web: httpx.Client) -> None:
    url = data_url(png(90, 51))
    counts = [ask(web, chat(part(url, detail=detail)))["usage"]["prompt_tokens"] for detail in ("low", "high", "auto")]
    assert counts[0] < counts[1] == counts[2]
    reply = web.post("/v1/chat/completions", json=chat(part(url, detail="huge")))
    assert reply.status_code == 400 and "detail" in reply.text and "low" in reply.text


def test_every_api_gives_the_image_to_the_model(web: httpx.Client) -> None:
    data = png(64, 48, seed=5)
    encoded, url = base64.b64encode(data).decode(), data_url(data)
    greedy: dict[str, Any] = {"temperature": 0}
    content = ask(web, chat(part(url), **greedy))
    expected = content["choices"][0]["message"]["content"]
    text = {"type": "text", "text": "What is it?"}
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    anthropic = web.post("/v1/messages", json={
        "model": "default", "max_tokens": 4, **greedy,
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}, text]}],
    })  # fmt: skip
    assert anthropic.status_code == 200, anthropic.text
    items = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is it?"}]
    body = {"model": "default", "max_output_tokens": 4, "input": [{"role": "user", "content": items}], **greedy}
    responses = web.post("/v1/responses", json=body)
    assert responses.status_code == 200, responses.text
    message = {"role": "user", "content": "What is it?", "images": [encoded]}
    options = {"num_predict": 4, "temperature": 0}
    ollama = web.post("/api/chat", json={"model": "seer", "messages": [message], "stream": False, "options": options})
    assert ollama.status_code == 200, ollama.text
    generated = web.post("/api/generate", json={
        "model": "seer", "prompt": "What is it?", "images": [encoded], "stream": False, "options": options,
    })  # fmt: skip
    assert generated.status_code == 200, generated.text
    prompt = content["usage"]["prompt_tokens"]
    assert anthropic.json()["content"][0]["text"] == expected
    assert anthropic.json()["usage"]["input_tokens"] + anthropic.json()["usage"]["cache_read_input_tokens"] == prompt
    assert responses.json()["output"][-1]["content"][0]["text"] == expected
    assert ollama.json()["message"]["content"] == expected and generated.json()["response"] == expected
    assert ollama.json()["prompt_eval_count"] == prompt


def test_sequences_and_tokenize_take_images(web: httpx.Client) -> None:
    messages = chat(part(data_url(png(64, 64))))["messages"]
    tokens = web.post("/v1/tokenize", json={"messages": messages}).json()["tokens"]
    opened = web.post("/api/sequences", json={"messages": messages})
    assert opened.status_code == 201, opened.text
    shown = web.get(f"/api/sequences/{opened.json()['id']}").json()
    assert shown["tokens"] == tokens and max(tokens) < 400
    assert tokens.count(max(set(tokens), key=tokens.count)) >= 5 * seeing.FEATURES


def test_streams_have_images_too(web: httpx.Client) -> None:
    reply = web.post("/v1/chat/completions", json=chat(part(data_url(png(40, 40))), stream=True))
    assert reply.status_code == 200 and reply.text.strip().endswith("data: [DONE]")


# -- refusals


def test_a_model_that_cannot_see_says_so_and_names_who_can(http: httpx.Client, seer: Server) -> None:
    url = data_url(png(9, 9))
    reply = http.post("/v1/chat/completions", json=chat(part(url)))
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["code"] == "model_cannot_see"
    assert "reads text alone" in error["message"] and "SmolVLM" in error["message"]
    assert error["param"] == "messages[0].content[0].image_url"
    source = {"type": "url", "url": url}
    content = [{"type": "image", "source": source}]
    claude = http.post(
        "/v1/messages", json={"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    )
    assert claude.status_code == 400 and "messages[0].content[0].source" in claude.text
    images = RequestImages(["owl", "hawk"])
    server_engine = seer.engine
    processor, server_engine.image_processor = server_engine.image_processor, None
    try:
        message = {"content": "", "images": [{"at": 0, "url": url, "detail": "auto", "where": "here"}]}
        with pytest.raises(Exception, match="'owl', 'hawk'"):
            seer.on_loop(images.in_parts([message], server_engine, "mole"))
    finally:
        server_engine.image_processor = processor


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_images_belong_to_the_user(web: httpx.Client, role: str) -> None:
    body = chat(part(data_url(png(9, 9))))
    body["messages"].insert(0, {**body["messages"][0], "role": role})
    reply = web.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and "user's message" in reply.text


def test_there_may_be_so_many(web: httpx.Client) -> None:
    reply = web.post("/v1/chat/completions", json=chat(*[part(data_url(png(9, 9)))] * 17))
    assert reply.status_code == 400 and "at most 16" in reply.text


def test_images_that_do_not_fit_the_context_are_refused_with_numbers(web: httpx.Client) -> None:
    parts = [part(data_url(png(64, 64, seed))) for seed in range(16)] * 1
    body = chat(*parts, text="x" * 1700)
    reply = web.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and "16 images" in reply.text


# -- hostile files


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def bare_png(width: int, height: int, rows: bytes | None = None, *, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG by hand, whose header may lie."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = zlib.compress(b"\0" * 10 if rows is None else rows)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def animation(form: str) -> bytes:
    frames = [picture(30, 20, seed) for seed in range(3)]
    return saved(frames[0], form, save_all=True, append_images=frames[1:])


def with_text(size: int) -> bytes:
    """A PNG whose compressed text would inflate."""
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "a" * size, zip=True)
    return saved(picture(20, 20), "PNG", pnginfo=info)


PNG, JPEG = png(60, 40), saved(picture(60, 40), "JPEG")
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><script>alert(1)</script></svg>'
HOSTILE: dict[str, bytes] = {
    "empty": b"", "one byte": b"\x89", "text": b"hello, I am no image" * 9, "zeros": bytes(5000),
    "png signature alone": PNG[:8], "png header alone": PNG[:33], "png cut in half": PNG[: len(PNG) // 2],
    "png with a broken checksum": PNG[:40] + b"\xff\xff" + PNG[42:],
    "png without pixels": bare_png(8, 8, b""), "png with too few pixels": bare_png(64, 64),
    "png of zero width": bare_png(0, 9), "png of zero height": bare_png(9, 0), "png of no size": bare_png(0, 0),
    "bomb of a billion pixels": bare_png(32_000, 32_000), "bomb of 4 gigapixels": bare_png(65_500, 65_500),
    "png of 2^31 pixels a side": bare_png(2**31 - 1, 2**31 - 1), "png 100000 x 1": bare_png(100_000, 1),
    "png of an impossible depth": bare_png(8, 8, depth=3), "png of an impossible colour": bare_png(8, 8, colour=5),
    "png whose text inflates": with_text(80_000_000),
    "jpeg signature alone": JPEG[:3], "jpeg cut in half": JPEG[: len(JPEG) // 3], "jpeg header alone": JPEG[:20],
    "jpeg without tables": JPEG[:20] + JPEG[-60:], "gif header alone": b"GIF89a" + bytes(7),
    "gif of no size": b"GIF89a" + struct.pack("<HH", 0, 0) + bytes(3), "gif cut": animation("GIF")[:60],
    "gif bomb": b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + bytes(3) + b",",
    "webp header alone": b"RIFF\x10\0\0\0WEBPVP8 ", "webp cut": saved(picture(60, 40), "WEBP")[:80],
    "svg": SVG, "html": b"<!doctype html><img src=x onerror=alert(1)>", "pdf": b"%PDF-1.7\n1 0 obj <<>> endobj\n",
    "zip": b"PK\x03\x04" + bytes(60), "bmp": saved(picture(9, 9), "BMP"), "tiff": saved(picture(9, 9), "TIFF"),
    "ico": saved(picture(32, 32), "ICO"), "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "elf": b"\x7fELF" + bytes(80), "ppm": saved(picture(9, 9), "PPM"),
    "jpeg 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(60),
}  # fmt: skip
ODD: dict[str, bytes] = {
    "one pixel": png(1, 1), "60000 x 1": saved(Image.new("RGB", (60_000, 1), "red"), "PNG"),
    "1 x 60000": saved(Image.new("RGB", (1, 60_000), "red"), "PNG"),
    "cmyk jpeg": saved(picture(30, 20).convert("CMYK"), "JPEG"), "grey": saved(picture(30, 20).convert("L"), "PNG"),
    "16 bits": saved(Image.fromarray((np.arange(600, dtype=np.uint16) * 100).reshape(20, 30)), "PNG"),
    "one bit": saved(picture(30, 20).convert("1"), "PNG"), "palette": saved(picture(30, 20).convert("P"), "PNG"),
    "transparent palette": saved(picture(30, 20).convert("P"), "PNG", transparency=3),
    "alpha": saved(picture(30, 20).convert("RGBA"), "PNG"), "grey and alpha": saved(picture(9, 9).convert("LA"), "PNG"),
    "animated gif": animation("GIF"), "animated webp": animation("WEBP"), "animated png": animation("PNG"),
    "progressive jpeg": saved(picture(60, 40), "JPEG", progressive=True), "webp": saved(picture(60, 40), "WEBP"),
    "png without its last chunk": PNG[:-12],
    "png and zip in one": PNG + b"PK\x03\x04" + bytes(60), "jpeg and html in one": JPEG + b"<script>alert(1)</script>",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images_are_refused_with_a_reason(web: httpx.Client, name: str) -> None:
    reply = web.post("/v1/chat/completions", json=chat(part(data_url(HOSTILE[name]))))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == "messages[0].content[0].image_url" and "accepted: " in error["message"]
    assert len(error["message"]) < 400


def test_there_are_forty_of_them() -> None:
    assert len(HOSTILE) >= 40


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_odd_images_are_served(web: httpx.Client, name: str) -> None:
    assert ask(web, chat(part(data_url(ODD[name])), max_tokens=1))["usage"]["prompt_tokens"] > seeing.FEATURES


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/svg+xml;base64," + base64.b64encode(SVG).decode(), "svg"),
        ("data:text/html;base64,AAAA", "text/html"), ("data:image/png,%89PNG", "without base64"),
        ("data:image/png;base64,@@@@", "base64"), ("data:image/png;base64", "without base64"),
        ("file:///etc/passwd", "accepted"), ("ftp://example.org/a.png", "accepted"), ("", "accepted"),
        ("http://127.0.0.1/a.png", "cannot be fetched"), ("http://169.254.169.254/latest", "cannot be fetched"),
        ("https://localhost/a.png", "cannot be fetched"), ("http://[::1]/a.png", "cannot be fetched"),
    ],
)  # fmt: skip
def test_addresses_that_are_none_are_refused(web: httpx.Client, url: str, why: str) -> None:
    reply = web.post("/v1/chat/completions", json=chat(part(url)))
    assert reply.status_code == 400 and why in reply.json()["error"]["message"]


@pytest.mark.parametrize("value", [None, 5, {}, {"url": 5}, [], {"url": None}])
def test_parts_of_another_form_are_refused(web: httpx.Client, value: Any) -> None:
    reply = web.post("/v1/chat/completions", json=chat({"type": "image_url", "image_url": value}))
    assert reply.status_code == 400 and "image_url" in reply.json()["error"]["param"]


def test_a_lying_type_is_told_by_the_bytes(web: httpx.Client) -> None:
    urls = [data_url(JPEG, "image/png"), data_url(JPEG, "image/jpeg")]
    counts = {ask(web, chat(part(url), temperature=0))["choices"][0]["message"]["content"] for url in urls}
    assert len(counts) == 1


def test_orientation_is_applied_and_metadata_left_behind(seer: Server) -> None:
    upright = picture(60, 30)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    exif[0x010E] = "taken at home"
    turned = saved(upright.rotate(90, expand=True), "PNG", exif=exif)
    one = seer.on_loop(seer.engine.image(turned))
    other = seer.on_loop(seer.engine.image(saved(upright, "PNG")))
    assert one.digest == other.digest and b"taken at home" not in one.pixels


# -- addresses


@pytest.fixture
def site() -> Iterator[Callable[[str, bytes, str], str]]:
    pages: dict[str, tuple[bytes, str]] = {}

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, kind = pages[self.path]
            self.send_response(302 if kind == "redirect" else 200)
            self.send_header(*(("Location", body.decode()) if kind == "redirect" else ("Content-Type", kind)))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()

        def put(path: str, body: bytes, kind: str) -> str:
            pages[path] = body, kind
            return f"http://pictures.example.org:{server.server_port}{path}"

        put.port = server.server_port  # type: ignore[attr-defined]  # for the fetcher
        yield put
        server.shutdown()


@pytest.mark.slow
async def test_addresses_are_fetched_where_the_operator_allows_it(
    seer: Server, site: Callable[[str, bytes, str], str]
) -> None:
    from tools.web import FetchConfig

    def fetcher() -> Fetcher:
        async def here(host: str, port: int) -> list[str]:
            return ["10.0.0.1" if host == "inside.example.org" else "127.0.0.1"]

        def refusal(address: Any) -> str | None:
            return None if str(address) == "127.0.0.1" else "private"

        return Fetcher(FetchConfig(ports=(site.port,)), resolve=here, refusal=refusal)  # type: ignore[attr-defined]

    async def read(url: str, *, web: bool = True) -> Any:
        images = RequestImages(web=web, fetcher=fetcher())
        message = {"content": "?", "images": [{"at": 0, "url": url, "detail": "auto", "where": "here"}]}
        (made,) = await images.in_parts([message], seer.engine, "seer")
        return made["content"][0]["image"]

    good = site("/a.png", PNG, "image/png")
    expected = seer.on_loop(seer.engine.image(PNG)).digest
    assert seer.on_loop(read(good)).digest == expected
    assert seer.on_loop(read(site("/moved", good.encode(), "redirect"))).digest == expected
    for url, why in (
        (site("/page", b"<p>", "text/html"), "text/html"),
        (site("/large", bytes(LIMITS.max_bytes + 1), "image/png"), "more than"),
        (site("/inside", b"http://inside.example.org:%d/" % site.port, "redirect"), "private"),  # type: ignore[attr-defined]
    ):
        with pytest.raises(Exception, match=why):
            seer.on_loop(read(url))
    with pytest.raises(Exception, match="setting web"):
        seer.on_loop(read(good, web=False))


def test_the_files_of_a_model_that_sees_are_whole(tmp_path: Path) -> None:
    """A checkpoint without its processor's file is refused by name at the start."""
    from engine.errors import CheckpointError
    from engine.model.loader import read_json
    from engine.multimodal.image_processor import ImageProcessor

    path = seeing.write(tmp_path, seeing.build())
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match="preprocessor_config"):
        ImageProcessor.load(path, read_json(path / "config.json"))


# -- chats


def test_a_chat_keeps_its_images_and_lets_them_go(web: httpx.Client) -> None:
    exif = Image.Exif()
    exif[0x010E] = "taken at home"
    url = data_url(saved(picture(64, 40), "JPEG", exif=exif), "image/jpeg")
    chat_id = web.post("/api/chats", json={}).json()["id"]
    begun = web.post(f"/api/chats/{chat_id}/runs", json={"content": "What is it?", "images": [url], "max_tokens": 4})
    assert begun.status_code == 202, begun.text
    events = web.get(f"/api/runs/{begun.json()['run_id']}/events").text
    assert "run.completed" in events or "answer.done" in events, events[-600:]
    question = web.get(f"/api/chats/{chat_id}").json()["messages"][0]
    (kept,) = question["images"]
    assert kept.startswith("data:image/jpeg;base64,")
    assert b"taken at home" not in base64.b64decode(kept.partition(",")[2])
    again = web.post(f"/api/chats/{chat_id}/runs", json={"content": "And now?", "max_tokens": 4}).json()
    assert "answer.done" in web.get(f"/api/runs/{again['run_id']}/events").text
    exported = web.get("/api/chats/export").json()
    mine = next(each for each in exported["chats"] if each["messages"] and each["messages"][0]["images"] == [kept])
    page = web.get(f"/api/chats/{chat_id}/export?format=html").text
    assert f'src="{kept}"' in page and "img-src data:" in page
    copies = web.post("/api/chats/import", json=begun_elsewhere({**exported, "chats": [mine]}))
    assert copies.status_code in (200, 201), copies.text
    (copy_id,) = copies.json()["chat_ids"]
    assert web.get(f"/api/chats/{copy_id}").json()["messages"][0]["images"] == [kept]
    mine["messages"][0]["images"] = ["https://example.org/a.png"]
    assert web.post("/api/chats/import", json={**exported, "chats": [mine]}).status_code == 400
    assert web.delete(f"/api/chats/{chat_id}").status_code == 200
    assert web.get(f"/api/chats/{chat_id}").status_code == 404


@pytest.mark.parametrize("images", [[], ["https://example.org/a.png"], [data_url(b"none")], ["x"] * 17, [5]])
def test_images_of_a_question_are_checked_before_it_is_kept(web: httpx.Client, images: list[Any]) -> None:
    chat_id = web.post("/api/chats", json={}).json()["id"]
    reply = web.post(f"/api/chats/{chat_id}/runs", json={"content": "What?", "images": images})
    assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("images"), reply.text
    assert web.get(f"/api/chats/{chat_id}").json()["messages"] == []


def test_a_question_with_images_to_a_model_that_reads_text_is_not_kept(http: httpx.Client) -> None:
    chat_id = http.post("/api/chats", json={}).json()["id"]
    reply = http.post(f"/api/chats/{chat_id}/runs", json={"content": "What?", "images": [data_url(PNG)]})
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "model_cannot_see"


@pytest.mark.slow
def test_the_terminal_shows_images_with_the_first_question(
    seer: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, answered = list[Any](), list[str]()
    answer = RemoteChat.answer

    async def recorded(self: RemoteChat, messages: Any) -> Any:
        asked.append(messages)
        async with aclosing(answer(self, messages)) as pieces:
            async for part, text in pieces:
                yield part, text
                if part == "answer" and text:
                    answered.append(text)
                    break  # a random model may write until its context is full

    def lines() -> Iterator[str]:
        while not answered:  # its first token may end the answer
            yield "What is it?"
        yield "And now?"
        yield "/exit"

    monkeypatch.setattr(RemoteChat, "answer", recorded)
    inputs = lines()
    monkeypatch.setattr("rich.console.Console.input", lambda self, prompt: next(inputs))
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    converse(seer.url, None, None, [file])
    assert "accepted" not in capsys.readouterr().out
    (*firsts, last), first = asked, asked[0]
    assert [part["type"] for part in first[-1]["content"]] == ["image_url", "text"] and all(x == first for x in firsts)
    assert last[:-2] == first and last[-2]["role"] == "assistant" and last[-1]["content"] == "And now?"
    with pytest.raises(BadSetting, match="cannot be read"):
        image_parts([tmp_path / "none.png"])
