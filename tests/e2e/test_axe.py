"""axe-core finds nothing wrong with any main state of the page, in either theme. The states are those of `states`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.fake_server import FakeServer

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from playwright.sync_api import Page

from tests.e2e.support.states import STATES
from tests.e2e.test_asking import COLLECTIONS, MODELS, STRATEGIES, TOOLS

pytestmark = [pytest.mark.browser, pytest.mark.slow]

AXE = Path(__file__).parents[2] / "web/node_modules/axe-core/axe.min.js"
FOUND = """async (rules) => {
    const { violations } = await axe.run(document, { resultTypes: ["violations"], ...(rules && { runOnly: rules }) });
    return violations.flatMap(({ id, nodes }) => nodes.map(({ target, failureSummary: why }) => ({ id, target, why })));
}"""


def violations(page: Page) -> dict[str, list[Any]]:
    """Returns what axe finds, by theme. Any: JSON."""
    page.evaluate(AXE.read_text("utf-8"))
    found: dict[str, list[Any]] = {}
    themes: dict[Literal["light", "dark"], list[str] | None] = {"light": None, "dark": ["color-contrast"]}
    for scheme, rules in themes.items():  # all that a theme changes
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        if here := page.evaluate(FOUND, rules):
            found[scheme] = here
    return found


@pytest.mark.parametrize("state", STATES)
def test_no_state_has_violations(state: str, fake: FakeServer, new_page: NewPage, watch: Watch) -> None:
    if not AXE.exists():
        pytest.skip("web/node_modules has no axe-core: build the page once (make setup)")
    watch.expect_errors()  # of states that are about them
    offer = fake.world.offer
    offer.models, offer.strategies, offer.tools, offer.collections = MODELS, STRATEGIES, TOOLS, COLLECTIONS
    offer.off = {"python": "The sandbox is switched off."}
    page = new_page(reduced_motion="reduce")
    page.goto(fake.url)
    STATES[state](page, fake)
    assert not violations(page)
