import { expect, test } from "vitest";
import { EMPTY, reduce, type Answer } from "./answer";
import type { RunEvent, Usage } from "./protocol";

const usage: Usage = { prompt_tokens: 3, completion_tokens: 4, reasoning_tokens: 2, cached_tokens: 0 };
const LOG: RunEvent[] = [
  { type: "run.queued", position: 2 },
  { type: "run.started", model: "m", started_at: 10, max_tokens: 64 },
  { type: "thinking.started", started_at: 11 },
  { type: "thinking.delta", text: "hm" },
  { type: "thinking.delta", text: "m" },
  { type: "thinking.done", duration_s: 0.5, tokens: 2 },
  { type: "answer.delta", text: "Fo" },
  { type: "metrics", ttft_s: 0.1, tokens_per_s: 20, completion_tokens: 3 },
  { type: "answer.delta", text: "ur" },
  { type: "answer.done", text: "Four", finish_reason: "stop", outcome: "answered" },
  { type: "run.completed", usage },
];
const fold = (answer: Answer, from: number, to: number): Answer =>
  LOG.slice(from, to).reduce((state, event, i) => reduce(state, from + i + 1, event), answer);

test("a whole log gives the whole answer", () => {
  expect(fold(EMPTY, 0, LOG.length)).toEqual({
    seq: 11,
    status: "completed",
    position: 0,
    startedAt: 10,
    maxTokens: 64,
    thinkingStartedAt: 11,
    thinking: "hmm",
    thought: { duration_s: 0.5, tokens: 2 },
    text: "Four",
    finishReason: "stop",
    metrics: { ttft_s: 0.1, tokens_per_s: 20, completion_tokens: 3 },
    usage,
    failure: null,
  });
});

test("resuming anywhere, with events repeated, ends in the same state", () => {
  const expected = fold(EMPTY, 0, LOG.length);
  for (let seen = 0; seen <= LOG.length; seen += 1) {
    for (let again = 0; again <= seen; again += 1) {
      expect(fold(fold(EMPTY, 0, seen), again, LOG.length)).toEqual(expected);
    }
  }
});

test("an event of a newer server changes nothing but the place in the log", () => {
  const strange = { type: "tool.call", call_id: "c" } as unknown as RunEvent;
  expect(reduce(EMPTY, 1, strange)).toEqual({ ...EMPTY, seq: 1 });
});
