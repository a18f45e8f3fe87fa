"""All runs of a server at a glance, whoever they are of. Knows nothing of what was asked or answered."""

from __future__ import annotations

import json

from app.data.database import Database, Row

# Runs are never taken out of their order: the newest rows are the newest runs.
_NEWEST = """
SELECT runs.id, chats.user, runs.status, runs.params, runs.created_at, runs.ended_at, messages.ttft_s,
    messages.tokens_per_s, messages.usage,
    CASE runs.status WHEN 'failed' THEN (
        SELECT data FROM events WHERE events.run_id = runs.id ORDER BY seq DESC LIMIT 1) END AS last
FROM (SELECT * FROM runs ORDER BY rowid DESC LIMIT ?) AS runs
JOIN chats ON chats.id = runs.chat_id LEFT JOIN messages ON messages.id = runs.message_id
ORDER BY runs.created_at DESC
"""


class Overview:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def runs_by_status(self) -> dict[str, int]:
        counted = await self._database.rows("SELECT status, count(*) AS runs FROM runs GROUP BY status")
        return {each["status"]: each["runs"] for each in counted}

    async def newest_runs(self, limit: int) -> list[Row]:
        """The newest first; `model` is None for the default one."""
        found = await self._database.rows(_NEWEST, limit)
        for each in found:
            last, usage = each.pop("last"), each.pop("usage")
            each["model"] = json.loads(each.pop("params")).get("model")
            each["error_code"] = json.loads(last).get("code") if last else None
            each["completion_tokens"] = json.loads(usage).get("completion_tokens") if usage else None
        return found
