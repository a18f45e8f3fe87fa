import { expect, test } from "vitest";
import type { ChatSummary } from "../api";
import { groups } from "./dates";

const NOW = new Date(2026, 2, 30, 15, 0).getTime(); // the day after clocks went forward in Europe

function chat(id: string, used: Date, pinned = false): ChatSummary {
  const at = used.getTime() / 1000;
  return { id, title: id, created_at: at, updated_at: at, pinned, private: false, folder_id: null };
}

const names = (chats: ChatSummary[]): [string, string][] =>
  groups(chats, NOW).map(({ kind, chats }) => [kind, chats.map(({ id }) => id).join(" ")]);

test("days are the calendar's, whatever their hours", () => {
  expect(
    names([
      chat("now", new Date(NOW)),
      chat("midnight", new Date(2026, 2, 30)),
      chat("before midnight", new Date(2026, 2, 29, 23, 59, 59)),
      chat("yesterday's midnight", new Date(2026, 2, 29)),
      chat("two days", new Date(2026, 2, 28, 23, 59)),
      chat("seven", new Date(2026, 2, 23)),
      chat("eight", new Date(2026, 2, 22, 23, 59)),
      chat("thirty", new Date(2026, 1, 28)),
      chat("older", new Date(2026, 1, 27, 23)),
      chat("month's begin", new Date(2026, 1, 1)),
      chat("january", new Date(2026, 0, 31)),
      chat("last year's", new Date(2025, 1, 2)),
    ]),
  ).toEqual([
    ["today", "now midnight"],
    ["yesterday", "before midnight yesterday's midnight"],
    ["week", "two days seven"],
    ["month", "eight thirty"],
    ["before", "older month's begin"],
    ["before", "january"],
    ["before", "last year's"],
  ]);
});

test("what is pinned is one group, and a clock that is ahead is today", () => {
  const ahead = new Date(NOW + 60_000);
  expect(names([chat("old pin", new Date(2020, 1, 1), true), chat("pin", ahead, true), chat("ahead", ahead)])).toEqual([
    ["pinned", "old pin pin"],
    ["today", "ahead"],
  ]);
  expect(names([])).toEqual([]);
});

test("a group before knows its month", () => {
  const [group] = groups([chat("x", new Date(2025, 6, 17))], NOW);
  expect(group?.time).toBe(new Date(2025, 6, 1).getTime());
});
