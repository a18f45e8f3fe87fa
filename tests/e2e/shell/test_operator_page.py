"""Signing in, a session that ends in the middle of something, and the operator's page: on the real server with keys."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from app.db.account_store import Accounts
from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.real_server import RealServer, running
from tests.e2e.support.scripted_model import write_scripted

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page, expect

from tests.e2e.support.real_pages import (
    ask,
    box,
    reply,
    settled,
    shown,
)
from tests.e2e.test_axe import AXE, violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TALE = " ".join(f"Sentence {i} of the tale." for i in range(200))
PARTS = ("", "/runs", "/users", "/tools")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("operator")
    model = write_scripted(folder / "model", {"tale": TALE, "hello": "Hello yourself."})
    with running(folder, "--model", str(model), "--dtype", "float32", "--auth", "keys") as server:
        server.http.headers["Authorization"] = f"Bearer {key_of(server, 'local')}"
        yield server


@pytest.fixture
def page(new_page: NewPage, server: RealServer) -> Page:
    return new_page(permissions=["clipboard-read", "clipboard-write"])


def key_of(server: RealServer, user: str, name: str = "a test") -> str:
    accounts = Accounts.open(server.folder / "data")
    try:
        accounts.ensure_user(user, None)
        return accounts.create_key(user, name)[1]
    finally:
        accounts.close()


def revoke(server: RealServer, key: str) -> None:
    (found,) = [each for each in server.http.get("/api/operator/keys").json()["keys"] if each["prefix"] == key[:13]]
    assert server.http.delete(f"/api/operator/keys/{found['id']}").status_code == 200


def sign_in(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_label("API key").press("Enter")
    expect(page.get_by_role("dialog", name="Sign in")).to_have_count(0)


def signed_in(page: Page, server: RealServer, user: str, path: str = "/") -> str:
    key = key_of(server, user)
    page.goto(server.url + path)
    sign_in(page, key)
    page.wait_for_load_state("networkidle")
    return key


def test_one_signs_in_with_a_key_and_out_again(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()
    page.goto(server.url)
    dialog = page.get_by_role("dialog", name="Sign in")
    field = dialog.get_by_label("API key")
    expect(field).to_be_focused()
    field.press("Enter")
    expect(dialog.get_by_role("alert")).to_have_text("Paste a key first.")
    field.fill("ponder_wrong")
    dialog.get_by_role("button", name="Sign in").click()
    expect(dialog.get_by_role("alert")).to_contain_text("not accepted")
    expect(field).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    expect(dialog).to_be_visible()
    sign_in(page, key_of(server, "ana"))
    expect(box(page)).to_be_focused()
    assert page.evaluate("document.cookie") == ""
    (cookie,) = page.context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    page.reload()
    expect(box(page)).to_be_focused()
    with page.expect_navigation():  # once the server has answered: another request of the page may be refused before
        page.get_by_role("button", name="Sign out (ana)").click()
    expect(dialog).to_be_visible()
    assert page.context.cookies() == []


def test_a_session_that_ends_loses_neither_the_draft_nor_the_answer(
    page: Page, server: RealServer, watch: Watch
) -> None:
    watch.expect_errors()
    key = signed_in(page, server, "bea")
    server.turn(step_s=0.004)
    ask(page, "tale")
    expect(reply(page)).to_contain_text("Sentence 3 ", timeout=20_000)
    box(page).fill("What I was writing")
    revoke(server, key)
    server.wire.drop()  # the stream is to be taken up again, and is refused
    dialog = page.get_by_role("dialog", name="Sign in")
    expect(dialog).to_contain_text("Your session has ended")
    expect(page.get_by_label("Message")).to_have_value("What I was writing")
    assert "Sentence 3 " in reply(page).inner_text()
    server.turn()
    sign_in(page, key_of(server, "bea"))
    settled(page)
    assert shown(page) == TALE
    expect(box(page)).to_have_value("What I was writing")


def test_what_is_sent_when_the_session_has_ended_is_sent_once_somebody_signs_in(
    page: Page, server: RealServer, watch: Watch
) -> None:
    watch.expect_errors()
    key = signed_in(page, server, "bea")
    page.goto(server.url, wait_until="networkidle")  # what came later would ask for the key before the question
    revoke(server, key)
    ask(page, "hello")
    expect(page.get_by_role("dialog", name="Sign in")).to_be_visible()
    sign_in(page, key_of(server, "bea"))
    expect(reply(page)).to_contain_text("Hello yourself.")
    expect(page.get_by_role("article", name="You")).to_have_count(1)


def test_somebody_else_does_not_see_what_was_on_the_page(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()
    key = signed_in(page, server, "bea")
    ask(page, "hello")
    expect(reply(page)).to_contain_text("Hello yourself.")
    page.wait_for_load_state("networkidle")
    revoke(server, key)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # what it shows is asked for again
    expect(page.get_by_role("dialog", name="Sign in")).to_be_visible()
    sign_in(page, key_of(server, "carl"))
    expect(page).to_have_url(f"{server.url}/")
    expect(page.get_by_role("article")).to_have_count(0)
    expect(page.get_by_role("navigation", name="Chats")).to_contain_text("Chats you begin will be listed here.")


def test_figures_are_shown_while_somebody_looks(page: Page, server: RealServer) -> None:
    page.add_init_script(
        "let hidden = false; Object.defineProperty(Document.prototype, 'hidden', { get: () => hidden });"
        "window.hide = (now) => { hidden = now; document.dispatchEvent(new Event('visibilitychange')); };"
    )
    signed_in(page, server, "local")
    page.get_by_role("link", name="Operator’s page").click()
    expect(page).to_have_url(f"{server.url}/operator")
    expect(page.get_by_role("heading", name="Operator")).to_be_visible()
    asked = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
    assert server.http.post("/v1/chat/completions", json=asked).status_code == 200
    tile = page.locator(".tile", has_text="First token")
    expect(tile.get_by_role("img")).to_have_attribute(
        "aria-label", re.compile(r"First token over the last 15 minutes: .* ms to .* ms")
    )
    expect(tile).to_contain_text(re.compile(r"\d ms\s*median.*p95.*p99"))
    expect(page.locator(".tile", has_text="Errors")).to_contain_text("done")
    expect(page.get_by_role("img", name=re.compile(r"KV blocks: \d+ used, [\d,]+ cached, [\d,]+ free"))).to_be_visible()
    page.get_by_text("The charts as a table").click()
    expect(page.get_by_role("region", name="The charts as a table").get_by_role("row")).to_have_count(61)
    page.get_by_role("radio", name="Last 15 minutes").check()
    with page.expect_request("**/api/operator/stats"):
        pass
    page.evaluate("window.hide(true)")
    with page.expect_request("**/api/operator/stats"):  # asked at once when it is seen again, and never meanwhile
        page.wait_for_timeout(1000)  # what was asked just before is answered
        hidden = read(page)
        page.wait_for_timeout(2500)  # longer than from one question to the next
        assert read(page) == hidden
        page.evaluate("window.hide(false)")


def read(page: Page) -> int:
    """Returns how often the figures were asked for."""
    return int(
        page.evaluate(
            "performance.getEntriesByType('resource').filter((e) => e.name.endsWith('/operator/stats')).length"
        )
    )


def test_runs_and_tools_are_listed(page: Page, server: RealServer) -> None:
    _, run = server.ask("hello")
    server.http.get(f"/api/runs/{run}/events")
    signed_in(page, server, "local", "/operator/runs")
    table = page.get_by_role("region", name="The newest runs")
    row = table.get_by_role("row").nth(1)
    expect(row).to_contain_text("local")
    expect(row).to_contain_text("done")
    expect(table).not_to_contain_text("hello")
    page.get_by_role("link", name="Tools").click()
    row = page.get_by_role("row").filter(has_text="http_fetch")
    expect(row).to_contain_text("uses the network")
    expect(row).to_contain_text("built in")


def test_users_and_keys_are_made_copied_once_and_revoked(page: Page, server: RealServer) -> None:
    signed_in(page, server, "local", "/operator/users")
    page.get_by_role("button", name="New user").click()
    form = page.get_by_role("form", name="New user")
    expect(form.get_by_label("Id")).to_be_focused()
    form.get_by_label("Id").fill("dora")
    form.get_by_label("Name").fill("Dora D.")
    form.get_by_role("button", name="Create").click()
    expect(page.get_by_label("Role of dora")).to_have_value("user")

    page.get_by_role("button", name="New key").click()
    form = page.get_by_role("form", name="New key")
    form.get_by_role("combobox", name="For").first.select_option("Dora D.")
    form.get_by_label("What it is for").fill("tablet")
    form.get_by_label("Valid").select_option("30 days")
    form.get_by_role("button", name="Create").click()
    made = page.get_by_role("group", name="A key of dora")
    expect(made.get_by_role("button", name="Copy the key")).to_be_focused()
    page.keyboard.press("Enter")
    expect(made).to_contain_text("Copied")
    key = str(page.evaluate("navigator.clipboard.readText()"))
    with httpx.Client(base_url=server.direct, headers={"Authorization": f"Bearer {key}"}) as dora:
        assert dora.get("/api/session").json()["user"]["name"] == "Dora D."
        made.get_by_role("button", name="Done").click()
        expect(page.get_by_text(key)).to_have_count(0)
        page.get_by_role("button", name=f"Revoke the key {key[:13]}… of dora").click()
        assert dora.get("/api/chats").status_code == 200, "it was revoked without asking again"
        page.get_by_role("button", name="Really revoke?").click()
        expect(page.get_by_role("heading", name="API keys")).to_be_focused()
        expect(page.get_by_role("listitem").filter(has_text=key[:13])).to_contain_text("revoked")
        assert dora.get("/api/chats").status_code == 401

    with page.expect_response("**/api/operator/users/dora"):
        page.get_by_label("Role of dora").select_option("operator")
    expect(page.get_by_label("Role of dora")).to_have_value("operator")
    roles = {each["id"]: each["role"] for each in server.http.get("/api/operator/users").json()["users"]}
    assert roles["dora"] == "operator"


def test_limits_are_edited_and_a_user_is_deleted_with_all_data(page: Page, server: RealServer, watch: Watch) -> None:
    key = key_of(server, "fay")
    with httpx.Client(base_url=server.direct, headers={"Authorization": f"Bearer {key}"}) as fay:
        assert fay.post("/api/chats", json={}).status_code == 201
    signed_in(page, server, "local", "/operator/users")
    page.get_by_role("button", name="Limits of fay").click()
    form = page.get_by_role("form", name="Limits of fay")
    form.get_by_label("Tokens of an answer").fill("40")
    form.get_by_label("Models").fill("poem, default")
    form.get_by_role("button", name="Save").click()
    expect(form).to_have_count(0)
    row = page.get_by_role("listitem").filter(has_text="fay").first
    expect(row).to_contain_text("models: poem, default · Tokens of an answer 40")
    (fay_told,) = [each for each in server.http.get("/api/operator/users").json()["users"] if each["id"] == "fay"]
    assert fay_told["models"] == ["poem", "default"]
    page.get_by_role("button", name="Limits of fay").click()
    form.get_by_label("Models").fill("")
    form.get_by_role("button", name="Save").click()
    expect(row).not_to_contain_text("models:")

    page.get_by_role("button", name=f"Limits of {key[:13]}…").click()
    form = page.get_by_role("form", name=f"Limits of {key[:13]}…")
    form.get_by_label("Requests a minute").fill("0")
    form.get_by_role("button", name="Save").click()
    watch.expect_errors()
    expect(form.get_by_role("alert")).to_contain_text("each 1 or more")
    form.get_by_label("Requests a minute").fill("7")
    form.get_by_label("operator", exact=True).uncheck()
    form.get_by_label("Models").fill("poem")
    form.get_by_role("button", name="Save").click()
    expect(form).to_have_count(0)
    (changed,) = [each for each in server.http.get("/api/operator/keys").json()["keys"] if each["prefix"] == key[:13]]
    assert changed["quota"]["requests_per_minute"] == 7 and changed["quota"]["tokens_per_day"] is None
    assert changed["scopes"] == ["chat", "v1", "sequences", "documents", "tools", "metrics"]
    assert changed["models"] == ["poem"]

    page.get_by_role("button", name="Delete fay with all data").click()
    assert "fay" in [user["id"] for user in server.http.get("/api/operator/users").json()["users"]]
    page.get_by_role("button", name="Really delete, with all data?").click()
    expect(page.get_by_role("heading", name="Users", exact=True)).to_be_focused()
    expect(page.get_by_role("button", name="Delete fay with all data")).to_have_count(0)
    expect(page.get_by_text("fay is deleted, with 1 chat and 0 documents.")).to_have_count(1)
    assert "fay" not in [user["id"] for user in server.http.get("/api/operator/users").json()["users"]]


def test_a_refusal_is_told_where_it_was_asked(page: Page, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()
    signed_in(page, server, "local", "/operator/users")
    page.get_by_role("button", name="New user").click()
    form = page.get_by_role("form", name="New user")
    form.get_by_label("Id").fill("Not An Id")
    form.get_by_role("button", name="Create").click()
    expect(form.get_by_role("alert")).to_contain_text("small letters")
    expect(form.get_by_label("Id")).to_have_value("Not An Id")
    page.keyboard.press("Escape")
    expect(form).to_have_count(0)


def test_the_page_is_not_for_users(page: Page, server: RealServer) -> None:
    signed_in(page, server, "eve")
    expect(page.get_by_role("link", name="Operator’s page")).to_have_count(0)
    page.goto(f"{server.url}/operator")
    expect(page.get_by_role("alert")).to_contain_text("for operators")
    assert read(page) == 0


def test_nothing_is_wider_than_a_phone_where_words_are_long(new_page: NewPage, server: RealServer) -> None:
    phone = new_page(viewport={"width": 360, "height": 740}, locale="de-DE", has_touch=True)
    phone.goto(server.url)
    phone.locator("dialog input").fill(key_of(server, "local"))
    phone.keyboard.press("Enter")
    expect(phone.locator("dialog input")).to_have_count(0)
    for part in PARTS:
        phone.goto(f"{server.url}/operator{part}")
        expect(phone.locator(".operator section").first).to_be_visible()
        assert phone.evaluate("document.documentElement.scrollWidth") == 360, part


@pytest.mark.skipif(not AXE.exists(), reason="web/node_modules has no axe-core: build the page once (make setup)")
def test_axe_finds_nothing_wrong(new_page: NewPage, server: RealServer, watch: Watch) -> None:
    watch.expect_errors()  # a wrong key
    page = new_page(reduced_motion="reduce")
    page.goto(server.url)
    page.get_by_label("API key").fill("ponder_wrong")
    page.get_by_label("API key").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("not accepted")
    found = {"sign-in": violations(page)}
    sign_in(page, key_of(server, "local"))
    for part in PARTS:
        page.goto(f"{server.url}/operator{part}")
        expect(page.locator(".operator section").first).to_be_visible()
        if part == "":
            page.get_by_text("The charts as a table").click()
        if part == "/users":
            page.get_by_role("button", name="New key").click()
            page.get_by_role("button", name="Limits of ").last.click()
        found[part] = violations(page)
    assert not {part: each for part, each in found.items() if each}
