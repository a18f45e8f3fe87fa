"""A connection cut at random moments loses no letter and doubles none. A hundred cuts: `python -m bench.page`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import NewPage, Watch
from tests.e2e.support.real_server import RealServer

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")

from bench.page.browsing import scripted
from bench.page.painting import LONG, cut

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def server() -> Iterator[RealServer]:
    with scripted({"long": LONG}) as server:
        yield server


def test_ten_cuts_at_random_lose_and_double_nothing(server: RealServer, new_page: NewPage, watch: Watch) -> None:
    watch.expect_errors()
    made = cut(new_page(), server, times=10, seed=3)
    assert made["equal"] and made["lost"] == made["doubled"] == 0, made
    assert made["streams"] == 11 and not made["ended_before_the_last_cut"], "a cut cut nothing"
