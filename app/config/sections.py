"""The sections of the settings around the engine: access, answers, limits and observability.

Access: where the server listens, who may reach it, and how much one user may take. Answers: thinking, strategies, tools
and documents, and how far each may go. Limits: for each key in a minute, and for the whole server. Observability: the
log, and the metrics' goals and price.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, field_validator
from pydantic_settings import NoDecode

from app.config.efforts import BudgetFields, Thinking
from app.config.names import BadSetting, CommaSeparated, setting
from tools.mcp.mcp_settings import McpSettings

STORAGE_PER_USER = 4 << 30  # bytes, where there are several


class AccessSettings(BaseModel):
    host: str = setting(
        "127.0.0.1", "the address to listen on", accepts="an address or host name to listen on", min_length=1
    )
    port: int = setting(8000, "the port; 0 picks a free one", accepts="0 (any free port) to 65535", ge=0, le=65535)
    auth: Literal["off", "keys"] = setting(
        "off",
        "who may use the server: everybody who reaches it, or holders of an API key",
        more="see [who may use it](#who-may-use-it)",
        accepts="off (whoever reaches the server may use it) or keys (who shows an API key)",
    )
    unknown_fields: Literal["refuse", "warn"] = setting(
        "refuse",
        "fields of a request's body that no part of the API knows: a 400, or a header that names them",
        more="With `warn` they have no effect, and `X-Ponder-Ignored-Fields` of the reply lists them",
        accepts="refuse (a 400 that names the field) or warn (ignored, and named in a header)",
    )
    ollama_api: bool = setting(
        False,
        "whether Ollama's API is served beside the others",
        more="at `/api/chat`, `/api/generate`, `/api/embed`, `/api/tags`, `/api/show`, `/api/ps` and `/api/version`",
        accepts="true or false",
    )
    cors_origins: CommaSeparated = setting(
        (),
        "web origins that may call the server",
        more="`--cors-origin`, repeatable; comma-separated in the variable",
        accepts="origins such as https://chat.example.org, comma-separated",
        flag="--cors-origin",
    )
    allowed_hosts: CommaSeparated = setting(
        (),
        "further host names that are the server's own, say behind a proxy",
        more="`--allowed-host`, repeatable; comma-separated in the variable",
        accepts="host names such as chat.example.org, comma-separated",
        flag="--allowed-host",
    )
    sharing: bool = setting(
        True,
        "whether users may make [links](features.md#links-to-chats) by which anybody can read a chat",
        more="Without it links that were made lead nowhere",
        accepts="true or false: whether users may make links to chats",
    )
    max_connections: int | None = setting(
        None,
        "connections at the same time",
        more="see [clients that take their time](#clients-that-take-their-time)",
        accepts="connections at the same time, 16 or more",
        unset="20000, or as many as the system allows",
        ge=16,
    )
    max_upload: ByteSize = setting(
        ByteSize(200 << 20),
        "the size of one upload, all its files together",
        accepts="a size such as 200MiB, of all files of a request together",
        ge=1,
    )
    storage_per_user: ByteSize | None = setting(
        None,
        "bytes of all files in one user's collections",
        more="whoever sent them, with those that are still being read; beyond, an upload is 413 "
        "`storage_quota_exceeded`",
        accepts="a size such as 4GiB, of all files of a user's documents together",
        unset='4 GiB with `auth = "keys"`, else none',
        ge=1,
    )
    sequences_per_user: int = setting(
        256,
        "[sequences](sequences.md) that one user may hold open, forks included",
        accepts="open sequences of one user, 1 or more",
        ge=1,
    )
    sequence_tokens_per_user: int = setting(
        262_144,
        "tokens of a user's open sequences together; a fork counts whole",
        accepts="tokens of a user's open sequences together, 1 or more",
        ge=1,
    )
    sequence_lease_s: float = setting(
        600.0,
        "seconds of the longest lease of an idle sequence",
        accepts="seconds of the longest lease, up to 86400",
        gt=0,
        le=86_400,
    )
    mcp_idle_s: float = setting(
        1800.0,
        "seconds without a request after which a session at `/mcp` ends",
        more="its id is a 404 then",
        accepts="seconds after which an MCP session without a request ends, up to 86400",
        gt=0,
        le=86_400,
    )
    drain_s: float = setting(
        5.0,
        "seconds that running answers may go on after SIGTERM; 0 ends them at once",
        accepts="seconds that what runs may go on after SIGTERM, up to 86400",
        ge=0,
        le=86_400,
    )

    @property
    def resolved_storage_per_user(self) -> int | None:
        """Bytes; None: without a limit."""
        if self.storage_per_user is not None:
            return int(self.storage_per_user)
        return STORAGE_PER_USER if self.auth == "keys" else None

    @field_validator("cors_origins")
    @classmethod
    def _is_origin(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [o for o in value if o != "*" and (not o.startswith(("http://", "https://")) or o.count("/") != 2)]:
            raise ValueError(f"{bad[0]!r} is not an origin")
        return value


EmbeddingTokenIds = Literal["refuse", "own"]


class AnswerSettings(BaseModel):
    embedder: str = setting(
        "all-MiniLM-L6-v2",
        "the sentence-transformers model that embeds documents, by name or directory",
        more="The default comes with Ponder; another one is loaded when the server starts. After a change all "
        "documents are embedded again at the next start",
        accepts="a sentence-transformers model, by name or directory",
        min_length=1,
    )
    embedding_token_ids: EmbeddingTokenIds = setting(
        "refuse",
        "whether [embeddings](api.md#embeddings) take token ids of the embedder's own tokenizer",
        more="`own` takes them, and refuses those that this tokenizer makes of no text",
        accepts="refuse or own",
    )
    document_answers: Literal["auto", "extractive", "quoting", "generative"] = setting(
        "auto",
        "how answers from documents are made: quoted by sentence, or written by the model",
        more="`extractive` shows the sentences that answer, word for word, and asks no model; `quoting` constrains the "
        "model to quotations; `auto` is what [the model was measured to do best](retrieval.md#three-ways-to-answer)",
        accepts="auto, extractive, quoting or generative",
    )
    tool_selection: Literal["auto", "embedding", "model"] = setting(
        "auto",
        "how [a tool is chosen](tools.md#choosing-a-tool) where `tool_choice` is `auto`: by embedding, or by the model",
        more="`embedding` has the model call the tool that fits the question best, and none where none fits, unless "
        "one is a calculator, a search or the like; `auto` does so for models of less than 100 million weights",
        accepts="auto, embedding or model",
    )
    tool_arguments: Literal["auto", "copied", "free"] = setting(
        "auto",
        "the arguments of a call [chosen by embedding](tools.md#choosing-a-tool): copied from the question, or free; "
        "and whether SQL is held to a database's own tables",
        more="`auto` copies for models of less than 100 million weights",
        accepts="auto, copied or free",
    )
    memory: Literal["auto", "on", "off"] = setting(
        "auto",
        "whether [notes about users](features.md#memory) are kept across chats",
        more="`auto` keeps them where each user is known: with keys, or where only this machine reaches the server",
        accepts="auto, on or off",
    )
    titles: Literal["first_question", "model"] = setting(
        "first_question",
        "the titles of chats: their first question, or one that the model writes of the first exchange when it is idle",
        more="see [titles](features.md#titles)",
        accepts="first_question or model",
    )
    plugins: Path | None = setting(
        None,
        "the directory of [tool plugins](plugins.md), which is watched",
        accepts="a directory with tool plugins",
        unset="the folder `plugins` in the data directory",
    )
    skills: Annotated[tuple[Path, ...], NoDecode] = setting(
        (),
        "directories of [skills](skills.md): each one itself, or with skills in it",
        more="`--skills`, repeatable; comma-separated in the variable",
        accepts="directories with a SKILL.md, or of such directories, comma-separated",
        flag="--skills",
    )
    databases: dict[str, Path] = setting(
        {},
        "SQLite files that [tools may read](tools.md), by name",
        more='`[databases]` with `shop = "shop.db"`',
        accepts="SQLite files that tools may read, by name",
    )
    mcp: dict[str, McpSettings] = setting(
        {},
        "[MCP servers](mcp.md) that offer their tools, by name",
        more="`[mcp.files]` with `command` or `url`",
        accepts="MCP servers by name, each a table with command or url",
    )
    searxng: str = setting(
        "",
        "the address of a SearXNG server, for the tool that searches the web",
        accepts="the address of a SearXNG server, for searching the web",
    )
    web: bool = setting(
        True, "whether tools may fetch public pages", accepts="true or false: whether tools may fetch public pages"
    )
    sandbox: bool = setting(
        True,
        "whether a tool may run Python in a [sandbox](sandbox.md)",
        more="off by itself, with its reason in `GET /api/tools`, where the system cannot give one",
        accepts="true or false: whether a tool may run Python in a sandbox",
    )
    tool_steps: int = setting(
        8,
        "turns of an answer that may call tools; the next one answers without them",
        accepts="turns of an answer that may call tools, 1 to 100",
        ge=1,
        le=100,
    )
    tool_seconds: float = setting(
        300.0,
        "seconds of an answer that may call tools; then it answers without them",
        accepts="seconds of an answer with tools, up to 86400",
        gt=0,
        le=86_400,
    )
    efforts: dict[Thinking, BudgetFields] = setting(
        {},
        "budgets of thinking by `reasoning_effort`",
        more="see below",
        accepts="budgets of thinking by effort (minimal, low, medium, high, xhigh, max), each a table",
        unset="`{}`",
    )
    thinking_text: Literal["shown", "summarised", "hidden"] = setting(
        "shown",
        "the thinking that people see",
        more="`shown`, `summarised` or `hidden`",
        accepts="shown, summarised or hidden: what people see of the thinking",
    )
    summary_model: str | None = setting(
        None,
        "the served model that writes the summaries of thinking",
        accepts="the name of a served model that writes the summaries; the first, by default",
        unset="the first",
        min_length=1,
    )
    strategy_branches: int = setting(
        64,
        "sequences that an answer's strategy may hold side by side",
        accepts="sequences side by side of a strategy, 1 to 4096",
        ge=1,
        le=4096,
    )
    strategy_nodes: int = setting(
        2_000, "nodes of a strategy's search", accepts="nodes of a strategy's search, 2 to 100000", ge=2, le=100_000
    )
    strategy_seconds: float = setting(
        600.0,
        "seconds that an answer's strategy may take",
        accepts="seconds of an answer's strategy, up to 86400",
        gt=0,
        le=86_400,
    )


class LimitSettings(BaseModel):
    requests_per_minute: int | None = setting(
        None,
        "requests of one key in a minute",
        more="see [limits](#limits)",
        accepts="requests of one key in a minute, 1 or more",
        ge=1,
    )
    tokens_per_minute: int | None = setting(
        None,
        "tokens of one key in a minute, read and written together",
        accepts="tokens of one key in a minute, read and written together, 1 or more",
        ge=1,
    )
    concurrent_requests: int | None = setting(
        None,
        "requests of one key that are answered at the same time",
        accepts="requests of one key that are answered at the same time, 1 or more",
        ge=1,
    )
    max_output_tokens: int | None = setting(
        None,
        "tokens of the longest answer, thinking included",
        more="a request for more is refused, one that names no length gets this",
        accepts="tokens of one answer, thinking included, 1 or more",
        ge=1,
    )
    deadline_s: float | None = setting(
        None,
        "seconds that one answer may take; it ends as it is then",
        accepts="seconds that one answer may take, above 0 up to 86400",
        gt=0,
        le=86_400,
    )
    max_wait_s: float = setting(
        60.0,
        "the expected wait in seconds beyond which a request is refused",
        accepts="seconds that a request may have to wait for others, above 0 up to 86400",
        gt=0,
        le=86_400,
    )
    reduce: bool = setting(
        True,
        "whether answers are made shorter before any is refused",
        accepts="true or false: whether answers are made shorter before any is refused",
    )
    reduce_wait_s: float | None = setting(
        None,
        "the expected wait in seconds from which answers are made shorter",
        accepts="seconds of waiting, less than max_wait_s, from which on answers are shorter",
        unset="a quarter of `max_wait_s`",
        ge=0,
        le=86_400,
    )
    reduced_thinking: int = setting(
        256,
        "tokens of thinking that a shorter answer keeps",
        accepts="tokens of thinking that are left of more, 2 or more",
        ge=2,
    )

    @property
    def reduce_from_s(self) -> float:
        """The wait from which on answers are made shorter."""
        return self.max_wait_s / 4 if self.reduce_wait_s is None else self.reduce_wait_s

    def check_limits(self) -> None:
        """
        Raises:
            BadSetting: nothing would ever be made shorter, as it would be refused before.
        """
        if self.reduce_wait_s is not None and self.reduce_wait_s >= self.max_wait_s:
            raise BadSetting(
                f"reduce_wait_s is {self.reduce_wait_s:g}, and from max_wait_s = {self.max_wait_s:g} on requests are "
                "refused; accepted: less than that."
            )


class ObservingSettings(BaseModel):
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "warning",
        "the least severe level that is logged, to stderr",
        more="`debug`, `info` (with an access log, which leaves query strings out), `warning` or `error`",
        accepts="debug, info, warning or error",
    )
    log_format: Literal["text", "json"] = setting(
        "text",
        "the log's format: text, or a line of JSON each",
        more="see [what is told](#what-is-told)",
        accepts="text or json (a line of JSON each)",
    )
    slo_ttft_ms: float = setting(
        2000.0,
        "goodput: milliseconds to a request's first token, at most",
        accepts="milliseconds to the first token, above 0",
        gt=0,
    )
    slo_itl_ms: float = setting(
        200.0,
        "goodput: milliseconds to each further token on average, at most",
        accepts="milliseconds between two tokens on average, above 0",
        gt=0,
    )
    price_per_hour: float | None = setting(
        None,
        "the cost of an hour of the machine, in any currency, for the metric of the cost of tokens",
        accepts="what an hour costs, 0 or more",
        ge=0,
        allow_inf_nan=False,
    )
    power_watts: float | None = setting(
        None,
        "the machine's power in watts, on average while it works, for the [energy of tokens](#energy)",
        accepts="watts, above 0",
        unset="as measured, where it can be",
        gt=0,
        allow_inf_nan=False,
    )
