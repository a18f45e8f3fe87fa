"""Questions in SQL to the databases that the operator attached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from ponder import Retry, Tool, ToolError, Toolset, tool
from tools.sql import Forbidden, Mistaken, QueryError, SqlDatabase, Stopped, described, query_pattern


class Databases(Toolset):
    """Tools over databases by name."""

    def __init__(self, databases: Mapping[str, SqlDatabase]) -> None:
        """
        Raises:
            ValueError: there is none.
        """
        if not databases:
            raise ValueError("There is no database to ask; attach one, or leave the SQL tools out.")
        self.databases = dict(databases)

    @tool(permission="read", timeout=15, rate="60/min")
    async def sql_schema(self, database: str = "") -> str:
        """List the tables and columns of the attached databases.

        Args:
            database: the name of one; all of them if left out.
        """
        names = [database] if database else list(self.databases)
        try:
            parts = [f"-- database {name}\n{described(await self._named(name).schema())}" for name in names]
        except QueryError as error:
            raise ToolError(str(error)) from None
        return "\n\n".join(parts)

    @tool(permission="read", timeout=15, rate="60/min")
    async def sql_query(
        self, sql: Annotated[str, Field(min_length=1, max_length=20_000)], database: str = ""
    ) -> dict[str, object]:
        """Read from an attached SQLite database with one SELECT. Nothing can be changed.

        Args:
            sql: one SELECT statement in SQLite's dialect; sql_schema tells the tables.
            database: which database to ask; may be left out where there is one.
        """
        try:
            table = await self._named(database).query(sql)
        except (Mistaken, Forbidden, Stopped) as error:
            raise Retry(str(error)) from None
        except QueryError as error:
            raise ToolError(str(error)) from None
        more = {"truncated": "There are more rows; add LIMIT, WHERE or an aggregate."} if table.truncated else {}
        return {"columns": table.columns, "rows": table.rows, **more}

    def tools(self) -> list[Tool]:
        return [
            tool.with_guided_parameters(self._queries) if tool.name == "sql_query" else tool for tool in super().tools()
        ]

    async def _queries(self) -> dict[str, object] | None:
        """Returns the parameters of a query that the one database there is can run, None where they are several."""
        if len(self.databases) != 1:
            return None
        try:
            pattern = query_pattern(await self._named("").schema())
        except QueryError:
            return None
        if pattern is None:
            return None
        held = {"sql": {"type": "string", "pattern": pattern}}
        return {"type": "object", "properties": held, "required": ["sql"], "additionalProperties": False}

    def _named(self, name: str) -> SqlDatabase:
        if not name and len(self.databases) == 1:
            return next(iter(self.databases.values()))
        if name not in self.databases:
            raise Retry(f"There is no database {name[:60]!r}; there are: {', '.join(self.databases)}.")
        return self.databases[name]
