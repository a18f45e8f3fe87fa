"""Settings of answers beside the model: thinking, strategies, tools and documents, and how far each may go."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from app.efforts import BudgetFields, Thinking
from tools.mcp.config import McpSettings


class AnswerSettings(BaseModel):
    plugins: Path | None = Field(None, description="a directory with tool plugins")
    databases: dict[str, Path] = Field({}, description="SQLite files that tools may read, by name")
    mcp: dict[str, McpSettings] = Field({}, description="MCP servers by name, each a table with command or url")
    searxng: str = Field("", description="the address of a SearXNG server, for searching the web")
    web: bool = Field(True, description="true or false: whether tools may fetch public pages")
    sandbox: bool = Field(True, description="true or false: whether a tool may run Python in a jail")
    tool_steps: int = Field(8, ge=1, le=100, description="turns of an answer that may call tools, 1 to 100")
    tool_seconds: float = Field(300.0, gt=0, le=86_400, description="seconds of an answer with tools, up to 86400")
    efforts: dict[Thinking, BudgetFields] = Field(
        {}, description="budgets of thinking by effort (minimal, low, medium, high, xhigh), each a table"
    )
    thinking_text: Literal["shown", "summarised", "hidden"] = Field(
        "shown", description="shown, summarised or hidden: what people see of the thinking"
    )
    summary_model: str | None = Field(
        None, min_length=1, description="the name of a served model that writes the summaries; the first, by default"
    )
    strategy_branches: int = Field(64, ge=1, le=4096, description="sequences side by side of a strategy, 1 to 4096")
    strategy_nodes: int = Field(2_000, ge=2, le=100_000, description="nodes of a strategy's search, 2 to 100000")
    strategy_seconds: float = Field(600.0, gt=0, le=86_400, description="seconds of an answer's strategy, up to 86400")
    embedder: str = Field(
        "all-MiniLM-L6-v2", min_length=1, description="a sentence-transformers model, by name or directory"
    )
