"""Fetching over real sockets: what is connected to, and where an answer that will not end is cut."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import tracemalloc
import zlib
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.tools.loopback_web import PUBLIC, Names, fetcher, redirect, response, served, served_twice
from tools.web import AddressRefused, FetchConfig, Fetcher, FetchFailed
from tools.web.fetch import Inflate


async def test_a_page_is_fetched_with_its_text_and_title() -> None:
    page = b"<title>On &amp; off</title><h1>Dams</h1><p>The dam of Orsk was finished in 1931.</p><script>no()</script>"
    async with served() as site:
        site.pages["/a?b=c"] = response(page, media_type="text/html; charset=utf-8")
        found = await fetcher(site.port).fetch(f"http://site.com:{site.port}/a?b=c#part")
    assert (found.status, found.title, found.truncated) == (200, "On & off", False)
    assert "finished in 1931" in found.text and "no()" not in found.text
    assert found.url == f"http://site.com:{site.port}/a?b=c"


async def test_a_request_carries_nothing_of_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with served() as site:
        site.pages["/"] = response(b"x", "Set-Cookie: a=b")
        fetch = fetcher(site.port).fetch
        await fetch(f"http://site.com:{site.port}/")
        await fetch(f"http://site.com:{site.port}/")
    names = [line.split(":")[0].lower() for line in site.requests[1].split("\r\n")[1:] if line]
    assert sorted(names) == ["accept", "accept-encoding", "connection", "host", "user-agent"]
    assert f"Host: site.com:{site.port}" in site.requests[1]


async def test_an_error_page_is_a_page_with_its_status() -> None:
    async with served() as site:
        found = await fetcher(site.port).fetch(f"http://site.com:{site.port}/none")
    assert (found.status, found.text) == (404, "nothing here")


@pytest.mark.parametrize(
    "answers",
    [["127.0.0.1"], [PUBLIC, "10.0.0.1"], ["::1"], ["fe80::1%eth0"], ["::ffff:127.0.0.1"], ["64:ff9b::a00:1"]],
)
async def test_a_host_with_one_private_address_is_refused(answers: list[str]) -> None:
    async with served() as site:
        with pytest.raises(AddressRefused, match="accepted: public addresses"):
            await fetcher(site.port, names=Names(site_com=[answers])).fetch(f"http://site.com:{site.port}/")
    assert site.requests == []


async def test_a_private_address_behind_a_name_is_not_told() -> None:
    with pytest.raises(AddressRefused) as caught:
        await fetcher(80, names=Names(site_com=[["::ffff:10.1.2.3"]])).fetch("http://site.com/")
    assert "10.1.2.3" not in str(caught.value)


async def test_a_host_without_an_address_is_a_failure() -> None:
    with pytest.raises(FetchFailed, match="no address"):
        await fetcher(80, names=Names(site_com=[[]])).fetch("http://site.com/")


async def test_the_address_that_was_checked_is_the_one_connected_to() -> None:
    names = Names(site_com=[[PUBLIC], ["127.0.0.1"]])
    async with served_twice() as (site, secret):
        site.pages["/"] = response(b"public")
        found = await fetcher(site.port, names=names).fetch(f"http://site.com:{site.port}/")
    assert found.text == "public" and names.asked == ["site.com"] and secret.requests == []


async def test_a_host_that_moves_to_a_private_address_between_hops_is_refused() -> None:
    names = Names(site_com=[[PUBLIC], ["127.0.0.1"]])
    async with served_twice() as (site, secret):
        site.pages["/"] = redirect("/secret")
        with pytest.raises(AddressRefused, match="loopback"):
            await fetcher(site.port, names=names).fetch(f"http://site.com:{site.port}/")
    assert secret.requests == []


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1/", "http://localhost/", "//127.0.0.1/", "http://[::1]/", "http://0x7f.1/", "http://2130706433/",
        "http://169.254.169.254/latest/meta-data/", "http://site.com:22/", "ftp://site.com/", "file:///etc/passwd",
        "http://user:word@site.com/", "http://[::ffff:7f00:1]/", "https://①②⑦.0.0.1/", "http:\\\\127.0.0.1", "gopher://a.com/",
        "http://inner.com/",
    ],
)  # fmt: skip
async def test_a_redirect_that_leads_inside_is_refused(location: str) -> None:
    async with served_twice() as (site, secret):
        site.pages["/"] = redirect(location)
        config = FetchConfig(ports=(80, 443, site.port))
        with pytest.raises(AddressRefused):
            names = Names(inner_com=[["192.168.0.1"]])
            await fetcher(config=config, names=names).fetch(f"http://site.com:{site.port}/")
    assert len(site.requests) == 1 and secret.requests == []


async def test_redirects_are_followed_and_then_no_more() -> None:
    async with served() as site:
        for number in range(7):
            site.pages[f"/{number}"] = redirect(f"{number + 1}")
        site.pages["/7"] = response(b"here")
        fetch = fetcher(site.port).fetch
        found = await fetch(f"http://site.com:{site.port}/2")
        assert (found.text, found.url) == ("here", f"http://site.com:{site.port}/7")
        with pytest.raises(AddressRefused, match="more than 5 times"):
            await fetch(f"http://site.com:{site.port}/1")


def _packed(data: bytes, kind: str) -> bytes:
    if kind == "gzip":
        return gzip.compress(data)
    packer = zlib.compressobj(wbits=-15 if kind == "raw" else 15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize("kind", ["gzip", "zlib", "raw"])
async def test_a_packed_page_is_unpacked(kind: str) -> None:
    encoding = "gzip" if kind == "gzip" else "deflate"
    async with served() as site:
        site.pages["/"] = response(_packed(b"word " * 1000, kind), f"Content-Encoding: {encoding}")
        found = await fetcher(site.port).fetch(f"http://site.com:{site.port}/")
    assert found.text == ("word " * 1000).strip() and not found.truncated


@pytest.mark.parametrize("kind", ["gzip", "zlib", "raw"])
async def test_a_bomb_is_cut_at_the_limit(kind: str) -> None:
    encoding = "gzip" if kind == "gzip" else "deflate"
    async with served() as site:
        site.pages["/"] = response(_packed(b"0" * 50_000_000, kind), f"Content-Encoding: {encoding}")
        config = FetchConfig(ports=(site.port,), max_bytes=5000)
        found = await fetcher(config=config).fetch(f"http://site.com:{site.port}/")
    assert found.text == "0" * 5000 and found.truncated


async def test_many_gzip_members_are_one_page_under_one_limit() -> None:
    async with served() as site:
        site.pages["/"] = response(gzip.compress(b"ab") * 1000, "Content-Encoding: gzip")
        short, whole = (FetchConfig(ports=(site.port,), max_bytes=most) for most in (100, 5000))
        cut = await fetcher(config=short).fetch(f"http://site.com:{site.port}/")
        found = await fetcher(config=whole).fetch(f"http://site.com:{site.port}/")
    assert cut.text == "ab" * 50 and cut.truncated
    assert found.text == "ab" * 1000 and not found.truncated


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "identity, gzip"])
async def test_an_encoding_that_was_not_asked_for_is_refused(encoding: str) -> None:
    async with served() as site:
        site.pages["/"] = response(b"xx", f"Content-Encoding: {encoding}")
        with pytest.raises(AddressRefused, match="accepted: gzip, deflate"):
            await fetcher(site.port).fetch(f"http://site.com:{site.port}/")


async def test_damaged_data_is_a_failure() -> None:
    async with served() as site:
        site.pages["/"] = response(b"not gzip", "Content-Encoding: gzip")
        with pytest.raises(FetchFailed, match="damaged"):
            await fetcher(site.port).fetch(f"http://site.com:{site.port}/")


async def test_a_page_without_an_end_is_cut() -> None:
    async def endless(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async with served() as site:
        site.pages["/"] = endless
        config = FetchConfig(ports=(site.port,), max_bytes=100_000, max_chars=70_000)
        found = await fetcher(config=config).fetch(f"http://site.com:{site.port}/")
    assert len(found.text) == 70_000 and found.truncated


async def test_data_that_holds_nothing_is_refused_after_so_many_bytes() -> None:
    async def endless(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Encoding: deflate\r\n\r\n\x78\x9c")
        while True:
            writer.write(b"\x00\x00\x00\xff\xff" * 10_000)  # blocks of length 0
            await writer.drain()

    async with served() as site:
        site.pages["/"] = endless
        config = FetchConfig(ports=(site.port,), max_bytes=100_000)
        with pytest.raises(AddressRefused, match="sent more than"):
            await fetcher(config=config).fetch(f"http://site.com:{site.port}/")


@pytest.mark.parametrize("kind", ["gzip", "zlib", "raw"])
def test_a_bomb_is_not_opened_in_memory(kind: str) -> None:
    bomb = _packed(b"0" * 50_000_000, kind)
    inflate = Inflate("gzip" if kind == "gzip" else "deflate", 5000)
    tracemalloc.start()
    try:
        inflate.feed(bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert inflate.full and peak < 1_000_000


async def test_headers_without_an_end_are_refused() -> None:
    async def endless(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"X-More: " + b"x" * 4000 + b"\r\n")
            await writer.drain()

    async with served() as site:
        site.pages["/"] = endless
        with pytest.raises((AddressRefused, FetchFailed)):
            await fetcher(site.port).fetch(f"http://site.com:{site.port}/")


async def test_large_headers_are_refused() -> None:
    async with served() as site:
        site.pages["/"] = response(b"x", *(f"X-{n}: {'y' * 900}" for n in range(50)))
        with pytest.raises(AddressRefused, match="bytes of headers; accepted: 32,000"):
            await fetcher(site.port).fetch(f"http://site.com:{site.port}/")


@pytest.mark.parametrize(
    "start", [b"", b"HTTP/1.1 200 OK\r\nContent-Type: te", b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nab"]
)
async def test_a_site_that_drips_is_left(start: bytes) -> None:
    left = asyncio.Event()

    async def drip(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        await writer.drain()
        await left.wait()

    async with served() as site:
        site.pages["/"] = drip
        config = FetchConfig(ports=(site.port,), timeout_s=0.3)
        with pytest.raises(FetchFailed, match="limit of 0.3 s|in time"):
            await fetcher(config=config).fetch(f"http://site.com:{site.port}/")
        left.set()


async def test_a_resolver_that_hangs_is_left() -> None:
    async def hang(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    with pytest.raises(FetchFailed, match="limit of 0.1 s"):
        await Fetcher(FetchConfig(timeout_s=0.1), resolve=hang).fetch("http://site.com/")


@pytest.mark.parametrize(
    "media_type", ["image/png", "application/octet-stream", "application/pdf", "video/mp4", "", "text"]
)
async def test_what_is_not_text_is_refused(media_type: str) -> None:
    async with served() as site:
        site.pages["/"] = response(b"x", media_type=media_type)
        with pytest.raises(AddressRefused, match="accepted: text, HTML, JSON"):
            await fetcher(site.port).fetch(f"http://site.com:{site.port}/")


async def test_what_is_not_http_is_a_failure() -> None:
    async with served() as site:
        site.pages["/"] = b"SSH-2.0-OpenSSH\r\n\r\n"
        with pytest.raises(FetchFailed, match="could not be read"):
            await fetcher(site.port).fetch(f"http://site.com:{site.port}/")


async def test_text_is_read_in_the_charset_it_is_in() -> None:
    async with served() as site:
        site.pages["/a"] = response("naïve".encode("latin-1"), media_type="text/plain; charset=ISO-8859-1")
        site.pages["/b"] = response("naïve".encode(), media_type="text/plain")
        site.pages["/c"] = response("naïve".encode("utf-16"), media_type="text/plain; charset=utf-8")
        site.pages["/d"] = response("naïve".encode("cp1252"), media_type="text/plain; charset=unicode_escape")
        fetch = fetcher(site.port).fetch
        assert [(await fetch(f"http://site.com:{site.port}/{p}")).text for p in "abcd"] == ["naïve"] * 4


def _certificate(folder: Path, name: str) -> ssl.SSLContext:
    x509 = pytest.importorskip("cryptography.x509", reason="certificates are made with cryptography")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    kind = x509.IPAddress(ip_address(name)) if name[0].isdigit() else x509.DNSName(name)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([kind]), critical=False).sign(key, hashes.SHA256())
    pem = made.public_bytes(serialization.Encoding.PEM)
    pem += key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "site.pem").write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "site.pem")
    return context


async def test_over_tls_the_name_is_sent_and_the_certificate_checked(tmp_path: Path) -> None:
    context = _certificate(tmp_path, "site.com")
    asked = list[str | None]()
    context.sni_callback = lambda _, name, __: asked.append(name)
    trusting = ssl.create_default_context(cafile=str(tmp_path / "site.pem"))
    async with served(tls=context) as site:
        site.pages["/"] = response(b"secure")
        found = await fetcher(site.port, tls=trusting).fetch(f"https://site.com:{site.port}/")
        assert found.text == "secure" and asked == ["site.com"]
        with pytest.raises(FetchFailed, match="(?i)hostname mismatch"):
            await fetcher(site.port, tls=trusting).fetch(f"https://other.com:{site.port}/")
        with pytest.raises(FetchFailed, match="(?i)self.signed"):
            await fetcher(site.port).fetch(f"https://site.com:{site.port}/")
