"""Watch over what a hostile frame must not reach: another server, windows, downloads; and over the page."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field

from playwright.sync_api import Dialog, Page, expect

from tests.e2e.support.fake_server import FakeServer


@dataclass
class Away:
    """Another server, which notes what reaches it: the first line of each connection, "" of one that says nothing.

    A test that uses it fails where anything did.
    """

    url: str
    reached: list[str] = field(default_factory=list)


@contextmanager
def another_server() -> Iterator[Away]:
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, closing(datagrams):
        datagrams.bind(listener.getsockname())
        datagrams.setblocking(False)
        server = Away(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    client.settimeout(2)
                    try:
                        server.reached.append(client.recv(4096).decode("latin-1").partition("\r\n")[0])
                        client.sendall(
                            b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\nContent-Length: 0\r\n\r\n"
                        )
                    except OSError:
                        server.reached.append("")

        threading.Thread(target=accept, daemon=True).start()
        yield server
        with suppress(BlockingIOError):
            server.reached.append(f"datagram {datagrams.recv(4096)!r}")
        assert server.reached == []
        listener.shutdown(socket.SHUT_RDWR)


@dataclass
class Seen:
    """Events beside the page: windows, dialogs, downloads, and requests that were answered."""

    what: list[str] = field(default_factory=list)

    def over(self, page: Page, away: Away) -> None:
        page.on("dialog", self._asked)
        page.on("download", lambda download: self.what.append(f"download {download.suggested_filename}"))
        page.context.on("page", lambda other: self.what.append(f"window {other.url}"))
        page.on("framenavigated", lambda frame: self._moved(frame.url, away))
        page.on("response", lambda response: self._moved(response.url, away))

    def _asked(self, dialog: Dialog) -> None:
        self.what.append(f"dialog {dialog.message}")
        dialog.dismiss()

    def _moved(self, url: str, away: Away) -> None:
        if url.startswith(away.url):
            self.what.append(f"reached {url}")


def prepared(text: str, fake: FakeServer, away: Away) -> str:
    host = away.url.partition("//")[2]
    return text.replace("AWAY", away.url).replace("HOST", host).replace("OURS", fake.url)


def usable(page: Page, fake: FakeServer) -> None:
    """The page is where it was, and takes a question."""
    expect(page).to_have_title("Go on · Ponder")
    assert page.url.startswith(f"{fake.url}/c/")
    box = page.get_by_role("textbox", name="Message")
    box.fill("still here")
    expect(box).to_have_value("still here")
    assert page.evaluate("[document.cookie, localStorage.getItem('x'), sessionStorage.getItem('x')]") == [
        "",
        None,
        None,
    ]
