"""`python -m bench.page`: measure each part, keep its figures, show them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.page import frames, lighthouse, loading, long_chats, painting
from bench.page import painting as cutting
from bench.page import painting as stopping
from bench.page.browsing import Json
from bench.parts import measure_parts
from hatch_build import build_page

WEB = Path(__file__).parents[2] / "web"

PARTS: dict[str, Callable[[], Json]] = {
    "size": loading.size,
    "first paint": loading.first_paint,
    "event to paint": painting.event_to_paint,
    "answer": frames.answer,
    "tree": frames.tree,
    "long chats": long_chats.long_chats,
    "cuts": cutting.cuts,
    "stop to idle": stopping.stop_to_idle,
    "lighthouse": lighthouse.lighthouse,
}


if __name__ == "__main__":
    build_page(WEB)
    measure_parts("page", "How fast and steady the page is.", PARTS)
