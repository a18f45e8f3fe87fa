"""Which built-in tools a server has, by what its operator configured, and why the others are off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ponder import Tool, Toolset
from tools.builtin.asking import ask_user
from tools.builtin.calculator import calculator
from tools.builtin.clock import current_time, date_arithmetic
from tools.sql import Database


@dataclass(frozen=True, slots=True)
class BuiltinConfig:
    """`searxng_url`: the operator's own search engine. `web`: whether pages may be fetched."""

    notes: Path | None = None
    databases: Mapping[str, Database] = field(default_factory=dict)
    web: bool = True
    searxng_url: str = ""


@dataclass(frozen=True, slots=True)
class Offered:
    """`off`: the names of tools that are not there, and what would bring them."""

    tools: list[Tool | Toolset]
    off: dict[str, str]


def offered(config: BuiltinConfig) -> Offered:
    """
    Raises:
        ValueError: the search engine's address is no URL.
    """
    tools: list[Tool | Toolset] = [ask_user, calculator, current_time, date_arithmetic]
    off = dict[str, str]()
    if config.notes is not None:
        from tools.builtin.notes import Notes

        tools.append(Notes(config.notes))
    else:
        off["remember, recall, forget, list_notes"] = "No file for notes is configured."
    if config.databases:
        from tools.builtin.databases import Databases

        tools.append(Databases(config.databases))
    else:
        off["sql_query, sql_schema"] = "No database is attached."
    if config.web:
        from tools.builtin.pages import Pages

        tools.append(Pages())
    else:
        off["http_fetch"] = "Fetching is switched off."
    if config.searxng_url:
        from tools.builtin.pages import Web
        from tools.web.search import SearXNG

        tools.append(Web(SearXNG(config.searxng_url)))
    else:
        off["web_search"] = "No search engine is configured; give the address of a SearXNG server."
    return Offered(tools, off)
