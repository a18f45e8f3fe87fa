"""The context of a call: the user, and how to show progress, cite, and ask the person.

Knows nothing of models or of HTTP: the executor fills in where the reports go. `progress`, `output` and `cite` may be
called from any thread, so that plain functions can use them; a call that has ended reports nothing any more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar, cast

from tools.errors import NotAnswered, NotProvided, ToolError

T = TypeVar("T")


class Injected:
    """Marks a parameter that the host fills in, so that it is no part of the schema."""


Depends = Annotated[T, Injected()]
"""`db: Depends[Database]` is the host's value for `Database`; the model never sees the parameter."""


@dataclass(frozen=True, slots=True)
class Source:
    """The source of something in a result. `start` and `end` are character offsets in the source's own text."""

    title: str
    url: str | None = None
    text: str | None = None
    document: int | str | None = None
    page: int | None = None
    start: int | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class ToolProgressStep:
    """The progress of a call: `done` of `total`, in any unit of the tool's."""

    text: str
    done: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A tool's question to the person. With `choices`, the answer is one of them."""

    call_id: str
    tool: str
    text: str
    choices: tuple[str, ...] | None = None


MAX_TASKS = 4  # of sub-agents side by side
MAX_INSTRUCTIONS = 8_000  # characters of a task


@dataclass(frozen=True, slots=True)
class SubAgentTask:
    """A task for a sub-agent. `tools`: names of those that it may call, of the caller's; None for all of them."""

    instructions: str
    tools: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class SubAgentAnswer:
    """The answer of a sub-agent, or why there is none where it `failed`. `untrusted`: it read what somebody else may
    have written."""

    text: str
    failed: bool = False
    untrusted: bool = False


MAX_ATTACHED = 16  # files of one call
MAX_ATTACHED_BYTES = 8 << 20  # of one of them


APP_TYPE = "text/html;profile=mcp-app"  # the media type of an MCP app's document (SEP-1865)


@dataclass(frozen=True, slots=True)
class AppView:
    """An MCP app's view of one call: where its document is from, and what it is to show (SEP-1865).

    `tool` is the server's own name of it. `result` is a `CallToolResult` as JSON. `domains`: addresses that the app
    asks to reach, and `permissions`: of the browser; neither is granted.
    """

    server: str
    tool: str
    uri: str
    arguments: Mapping[str, Any]
    result: Mapping[str, Any]
    domains: tuple[str, ...] = ()
    permissions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file that a call made for the person. With `app` it is the document of an MCP app."""

    name: str
    content: bytes
    app: AppView | None = None


Ask = Callable[[Question], Awaitable[str]]
Delegate = Callable[[str, Sequence[SubAgentTask]], Awaitable[Sequence[SubAgentAnswer]]]  # for the call of an id
Provider = Callable[["Context", type], Any]  # a value of the type asked for, which typing cannot say here
_NOBODY: Final = "nobody can be asked here; go on without the answer, or say what is missing."


class Context:
    """One call's view of its surroundings. `chat` is None where a tool is called outside of a chat."""

    def __init__(
        self,
        *,
        user: str,
        call_id: str,
        tool: str = "",
        chat: str | None = None,
        provided: Provider | Mapping[type, object] | None = None,
        ask: Ask | None = None,
        delegate: Delegate | None = None,
        on_progress: Callable[[ToolProgressStep], None] | None = None,
        on_output: Callable[[str], None] | None = None,
        keeps_files: bool = False,
    ) -> None:
        """`keeps_files`: the host keeps the files that are attached."""
        self.user = user
        self.call_id = call_id
        self.tool = tool
        self.chat = chat
        self.sources = list[Source]()
        self.files = list[FileContent]()
        self.refused = list[str]()  # a sentence for each file that could not be attached
        self.keeps_files = keeps_files
        self._provided = provided
        self.read_untrusted = False  # by a sub-agent
        self._ask = ask
        self._delegate = delegate
        self._on_progress = on_progress
        self._on_output = on_output
        self._ended = False

    @property
    def cancelled(self) -> bool:
        """Returns whether nobody waits for the result any more. A plain function's thread can't be stopped: long ones
        look."""
        return self._ended

    def progress(self, text: str, done: float | None = None, total: float | None = None) -> None:
        """Shows the person how far the call is. The model does not read it."""
        if self._on_progress is not None and not self._ended:
            self._on_progress(ToolProgressStep(text, done, total))

    def output(self, text: str) -> None:
        """Shows a piece of the output before the whole is there; a generator's pieces come here by themselves."""
        if self._on_output is not None and not self._ended:
            self._on_output(text)

    def cite(self, source: Source) -> int:
        """Names a source of the result; returns its number in this call, from 1. The same source keeps its number."""
        if source not in self.sources:
            self.sources.append(source)
        return self.sources.index(source) + 1

    def attach(self, name: str, content: str | bytes, app: AppView | None = None) -> bool:
        """Gives the person a file, an artifact of the chat; a text is written as UTF-8. The model reads its name alone.
        With `app` it is the document of an MCP app.

        Returns whether it is kept: nobody keeps files where a tool is called outside of a chat.

        Raises:
            ToolError: the call has too many files, or this one is too large or has no name.
        """
        data = content.encode("utf-8", "replace") if isinstance(content, str) else content
        if not self.keeps_files or self._ended:
            return False
        if not name.strip():
            raise ToolError("A file that is attached has no name; give it one, such as table.csv.")
        if len(self.files) >= MAX_ATTACHED:
            raise ToolError(f"The call has {MAX_ATTACHED} files already, which is the limit; {name!r:.80} is one more.")
        if len(data) > MAX_ATTACHED_BYTES:
            raise ToolError(f"The file {name!r:.80} has {len(data)} bytes; accepted: {MAX_ATTACHED_BYTES}.")
        self.files.append(FileContent(name, data, app))
        return True

    async def ask(self, question: str, choices: Sequence[str] | None = None) -> str:
        """Asks the person and waits; the time does not count against the tool's timeout.

        Raises:
            NotAnswered: nobody can be asked, they declined, or the answer is none of the `choices`.
            ValueError: `choices` is empty.
        """
        if choices is not None and not choices:
            raise ValueError("A question with choices needs at least one; leave choices out for a free answer.")
        if self._ask is None:
            raise NotAnswered(f"The question {question!r} was not answered: {_NOBODY}")
        offered = None if choices is None else tuple(choices)
        answer = await self._ask(Question(self.call_id, self.tool, question, offered))
        if offered is not None and answer not in offered:
            raise NotAnswered(f"The question {question!r} was answered {answer!r}; accepted: {', '.join(offered)}.")
        return answer

    async def delegate(self, tasks: Sequence[SubAgentTask]) -> list[SubAgentAnswer]:
        """Has sub-agents of the model do tasks side by side, and waits; the time does not count against the tool's
        timeout. Returns an answer for each, also for one that failed.

        Sub-agents know the conversation, call tools of the caller's by the same rights, and share its limits.

        Raises:
            ToolError: nobody can be delegated to here, or the tasks are none, too many, empty or too long.
        """
        if self._delegate is None:
            raise ToolError("Nobody can be delegated to here; do the tasks yourself, one after another.")
        if not 1 <= len(tasks) <= MAX_TASKS:
            raise ToolError(f"There are {len(tasks)} tasks; accepted: 1 to {MAX_TASKS}.")
        for number, task in enumerate(tasks, 1):
            if not task.instructions.strip() or len(task.instructions) > MAX_INSTRUCTIONS:
                length = len(task.instructions)
                raise ToolError(
                    f"The instructions of task {number} have {length} characters; accepted: 1 to {MAX_INSTRUCTIONS}, "
                    "not white space alone."
                )
        answers = list(await self._delegate(self.call_id, tasks))
        self.read_untrusted |= any(answer.untrusted for answer in answers)
        return answers

    def get(self, kind: type[T]) -> T:
        """Returns the host's value for this type.

        Raises:
            NotProvided: the host provided nothing for it.
        """
        if callable(self._provided):
            return cast("T", self._provided(self, kind))
        if self._provided is not None and kind in self._provided:
            return cast("T", self._provided[kind])
        raise NotProvided(f"Nothing was provided for {kind.__qualname__}; the host does so with Registry.provide.")

    def end(self) -> None:
        """From now on nothing is reported, and `cancelled` is true. The executor's word when a call has its outcome."""
        self._ended = True
