/** Chats in groups by when they were last used, as their list shows them. Knows nothing of words. */
import type { ChatSummary } from "../api";

/** `kind` "before": a calendar month, which begins at `time` (ms). */
export interface Group {
  readonly kind: "pinned" | "today" | "yesterday" | "week" | "month" | "before";
  readonly time: number;
  readonly chats: readonly ChatSummary[];
}

/** `chats` in the order of the list: the pinned ones first, then those that were used last. `now` in ms, local days. */
export function groups(chats: readonly ChatSummary[], now: number): Group[] {
  const made: { kind: Group["kind"]; time: number; chats: ChatSummary[] }[] = [];
  for (const chat of chats) {
    const { kind, time } = groupOf(chat, now);
    const last = made.at(-1);
    if (last?.kind === kind && last.time === time) last.chats.push(chat);
    else made.push({ kind, time, chats: [chat] });
  }
  return made;
}

function groupOf(chat: ChatSummary, now: number): Pick<Group, "kind" | "time"> {
  if (chat.pinned) return { kind: "pinned", time: 0 };
  const used = new Date(chat.updated_at * 1000);
  const today = new Date(now);
  const day = (back: number): number =>
    new Date(today.getFullYear(), today.getMonth(), today.getDate() - back).getTime(); // 23 and 25 hours occur
  const time = used.getTime();
  if (time >= day(0)) return { kind: "today", time: 0 };
  if (time >= day(1)) return { kind: "yesterday", time: 0 };
  if (time >= day(7)) return { kind: "week", time: 0 };
  if (time >= day(30)) return { kind: "month", time: 0 };
  return { kind: "before", time: new Date(used.getFullYear(), used.getMonth()).getTime() };
}
