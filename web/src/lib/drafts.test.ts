import { beforeEach, expect, test, vi } from "vitest";
import { draftOf, keepDraft } from "./drafts";

/** As much of a browser's storage as drafts use; `room` characters of it. */
function storage(room = Infinity): Storage {
  const held: Record<string, string> = {};
  const size = (): number => Object.entries(held).reduce((sum, [key, value]) => sum + key.length + value.length, 0);
  const methods = {
    getItem: (key: string) => held[key] ?? null,
    removeItem: (key: string) => void delete held[key],
    setItem(key: string, value: string) {
      const before = held[key];
      held[key] = value;
      if (size() <= room) return;
      if (before === undefined) delete held[key];
      else held[key] = before;
      throw new DOMException("full", "QuotaExceededError");
    },
  };
  return new Proxy(methods as unknown as Storage, {
    ownKeys: () => Object.keys(held),
    getOwnPropertyDescriptor: () => ({ enumerable: true, configurable: true }),
  });
}

beforeEach(() => {
  vi.useFakeTimers({ now: 1000 });
  vi.stubGlobal("localStorage", storage());
});

test("words stay with their place until there are none", () => {
  keepDraft("a", "one\ntwo");
  keepDraft("b", "語".repeat(100_000));
  expect(draftOf("a")).toBe("one\ntwo");
  expect(draftOf("b")).toHaveLength(100_000);
  keepDraft("a", "");
  expect([draftOf("a"), draftOf("c")]).toEqual(["", ""]);
});

test("of too many the oldest go", () => {
  for (let i = 0; i < 60; i += 1) {
    vi.advanceTimersByTime(10);
    keepDraft(`p${i}`, `words ${i}`);
  }
  const left = Array.from({ length: 60 }, (_, i) => i).filter((i) => draftOf(`p${i}`) !== "");
  expect(left).toEqual(Array.from({ length: 50 }, (_, i) => i + 10));
});

test("without room for all, what is being written is kept", () => {
  vi.stubGlobal("localStorage", storage(2000));
  for (let i = 0; i < 8; i += 1) keepDraft(`p${i}`, "x".repeat(200));
  keepDraft("now", "y".repeat(1500));
  expect(draftOf("now")).toBe("y".repeat(1500));
  keepDraft("now", "z".repeat(5000)); // more than there is room for at all
  expect(draftOf("now")).toBe("y".repeat(1500));
});

test("what somebody else put there is no draft, and no storage no harm", () => {
  localStorage.setItem("ponder.draft.a", "no JSON");
  localStorage.setItem("ponder.draft.b", '{"words": 3}');
  expect([draftOf("a"), draftOf("b")]).toEqual(["", ""]);
  const denied = vi.fn(() => {
    throw new DOMException("denied", "SecurityError");
  });
  vi.stubGlobal("localStorage", { getItem: denied, setItem: denied, removeItem: denied });
  keepDraft("a", "words");
  expect(draftOf("a")).toBe("");
  expect(denied).toHaveBeenCalled();
});
