import { expect, test } from "vitest";
import { firstSeen } from "./forgotten";

const counts = { prompt_tokens: 9, completion_tokens: 1, reasoning_tokens: 0, cached_tokens: 0 };
const asked = (id: string) => ({ role: "user" as const, id });
const said = (id: string, forgotten_tokens: number, seen_from: string | null) => ({
  role: "assistant" as const,
  id,
  shown: { usage: { ...counts, forgotten_tokens, seen_from } },
});

test("the newest answer says from where its model saw the chat", () => {
  const chat = [asked("q1"), said("a1", 0, null), asked("q2"), said("a2", 48, "q2"), asked("q3"), said("a3", 96, "q3")];
  expect(firstSeen(chat.slice(0, 2))).toBeNull();
  expect(firstSeen(chat.slice(0, 4))?.id).toBe("q2");
  expect(firstSeen(chat.slice(0, 5))?.id).toBe("q2"); // while the next is asked
  expect(firstSeen(chat)?.id).toBe("q3");
});

test("an answer that sees no question whole stands below the line itself", () => {
  expect(firstSeen([asked("q1"), said("a1", 500, "")])?.id).toBe("a1");
});

test("an answer that was stopped leaves the line where it was", () => {
  const chat = [asked("q1"), said("a1", 48, "q1"), asked("q2"), said("a2", 96, null)];
  expect(firstSeen(chat)?.id).toBe("q1");
});

test("a chat that is seen whole again has none", () => {
  expect(firstSeen([asked("q1"), said("a1", 48, "q1"), asked("q2"), said("a2", 0, null)])).toBeNull();
  const old = { role: "assistant" as const, id: "a", shown: { usage: { ...counts } as never } };
  expect(firstSeen([asked("q"), old, asked("r"), { role: "assistant" as const, id: null, shown: { usage: null } }])).toBeNull();
});
