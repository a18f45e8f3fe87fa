import { expect, test } from "vitest";
import { answeredElsewhere, doing, EMPTY, fromStored, reduce, shownParts, type Answer } from "./answer";
import type { StoredMessage } from "./api";
import type { RunEvent, SourceShown, Usage } from "./protocol";

const counts = { prompt_tokens: 3, completion_tokens: 4, reasoning_tokens: 2, cached_tokens: 0 };
const usage: Usage = { ...counts, forgotten_tokens: 0, seen_from: null };
const completed: RunEvent = { type: "run.completed", usage };
const started: RunEvent = { type: "run.started", model: "m", started_at: 10, max_tokens: 64, strategy: null };

const PLAIN: RunEvent[] = [
  { type: "run.queued", position: 2 },
  started,
  { type: "prefill.progress", processed: 512, total: 2048, cached: 128 },
  { type: "thinking.started", started_at: 11, max_tokens: 40, waits: 1 },
  { type: "thinking.delta", text: "hm" },
  { type: "thinking.progress", tokens: 20 },
  { type: "thinking.wait", number: 1, of: 1 },
  { type: "thinking.delta", text: "m" },
  { type: "thinking.done", duration_s: 0.5, tokens: 31 },
  { type: "answer.delta", text: "Fo", guessed: [] },
  { type: "metrics", ttft_s: 0.1, tokens_per_s: 20, completion_tokens: 3, seconds: 0.2 },
  { type: "answer.delta", text: "ur", guessed: [] },
  { type: "answer.done", text: "Four", finish_reason: "stop", outcome: "answered" },
  completed,
];

const call = { call_id: "c1", name: "write_file" };
const asked: RunEvent = {
  type: "approval.requested",
  ...call,
  approval_id: "approval_1",
  reason: "it writes",
  risk: "medium",
  preview: 'write_file(path="a")',
  arguments_hash: "x",
  expires_at: 99,
};
const TOOLS: RunEvent[] = [
  started,
  { type: "thinking.started", started_at: 11, max_tokens: null, waits: 0 },
  { type: "thinking.delta", text: "I need a file." },
  { type: "thinking.done", duration_s: 0.5, tokens: 5 },
  { type: "answer.delta", text: "Let me write it.", guessed: [] },
  { type: "tool.call", ...call, agent: null, arguments: '{"path": "a"}' },
  { type: "tool.call", call_id: "c2", name: "ask", agent: null, arguments: "{}" },
  asked,
  { type: "approval.resolved", call_id: "c1", approval_id: "approval_1", decision: "once" },
  { type: "tool.progress", ...call, text: "half", done: 1, total: 2 },
  { type: "tool.output", ...call, text: "one " },
  { type: "tool.output", ...call, text: "two" },
  { type: "tool.result", ...call, text: "written", truncated: 0, untrusted: false, sources: [], artifacts: [], ms: 12 },
  { type: "question.asked", call_id: "c2", name: "ask", question_id: "q", text: "?", choices: ["a"], expires_at: 9 },
  { type: "question.answered", call_id: "c2", question_id: "q", text: "a" },
  { type: "tool.error", call_id: "c2", name: "ask", kind: "failed", message: "It broke.", ms: 3 },
  { type: "answer.delta", text: "\n\n", guessed: [] },
  { type: "thinking.started", started_at: 15, max_tokens: null, waits: 0 },
  { type: "thinking.done", duration_s: 0.1, tokens: 3 },
  { type: "run.reduced", thinking: 256, models: null },
  { type: "limit.reached", limit: "steps" },
  { type: "answer.delta", text: "Done.", guessed: [] },
  { type: "answer.done", text: "Let me write it.\n\nDone.", finish_reason: "stop", outcome: "answered" },
  completed,
];

const source: SourceShown = {
  label: "S1", document: 7, title: "Dams", page: 3, start: 100, end: 135, score: 0.9,
  text: "Old. 🌊 Built in 1931. Then it held.",
};
const GROUNDED: RunEvent[] = [
  { type: "citation.sources", verdict: "answer", score: 0.8, questions: ["when?"], sources: [source], nearest: [] },
  started,
  { type: "answer.delta", text: "🌊 It was built in 1931. [S1] ", guessed: [] },
  {
    type: "citation.ref", sentence: 1, start: 0, end: 28, support: "supported", answers: null,
    citations: [{ ...source, start: 107, end: 121, text: "Built in 1931." }],
  },
  { type: "answer.delta", text: "It is tall. [unsupported]", guessed: [] },
  { type: "citation.ref", sentence: 2, start: 29, end: 54, support: "unsupported", answers: null, citations: [] },
  {
    type: "answer.done", text: "🌊 It was built in 1931. [S1] It is tall. [unsupported]", finish_reason: "stop",
    outcome: "answered",
  },
  completed,
];

const SEARCHED: RunEvent[] = [
  started,
  { type: "route.tried", model: "small", passed: false, why: "confidence", tokens: 4, cost: 1, seconds: 0.1 },
  {
    type: "remote.sent", model: "large", why: "not sure", messages: 1, characters: 9, images: 0, passages: 0, tool_results: 0,
  },
  { type: "route.answering", model: "large" },
  { type: "search.node", node: 0, parent: null, depth: 0, text: "" },
  { type: "search.node", node: 1, parent: 0, depth: 1, text: "left" },
  { type: "search.node", node: 2, parent: 0, depth: 1, text: "right" },
  { type: "search.score", node: 1, value: 0.2 },
  { type: "search.score", node: 2, value: 0.9 },
  { type: "search.prune", node: 1, why: "beam" },
  { type: "search.merge", node: 2, parent: 1, text: "the same" },
  { type: "search.select", node: 0 },
  { type: "search.select", node: 2 },
  { type: "search.done", node: 2, solved: true, ended: "found", value: 0.9, nodes: 3, written: 9, read: 9, seconds: 1 },
  { type: "candidate.done", index: 1, text: "5", tokens: 1, score: 0.2, vote: null, stopped: false },
  { type: "candidate.done", index: 0, text: "4", tokens: 1, score: 0.7, vote: null, stopped: false },
  { type: "candidate.chosen", index: 0, of: 2, score: 0.7, cancelled: 1 },
  { type: "strategy.event", name: "Looked", fields: {} },
  { type: "answer.delta", text: "4", guessed: [] },
  { type: "answer.done", text: "4", finish_reason: "stop", outcome: "answered" },
  completed,
];

const fold = (log: RunEvent[], answer = EMPTY, from = 0, to = log.length): Answer =>
  log.slice(from, to).reduce((state, event, i) => reduce(state, from + i + 1, event), answer);

test("a whole log gives the whole answer", () => {
  expect(fold(PLAIN)).toEqual({
    ...EMPTY,
    seq: 14,
    status: "completed",
    model: "m",
    startedAt: 10,
    maxTokens: 64,
    parts: [
      {
        kind: "thinking", open: false, startedAt: 11, text: "hmm",
        waits: [{ at: 2, number: 1, of: 1 }], done: { duration_s: 0.5, tokens: 31 },
      },
      { kind: "text", start: 0 },
    ],
    budget: { tokens: 40, waits: 1 },
    thoughtTokens: 31,
    text: "Four",
    finishReason: "stop",
    metrics: { ttft_s: 0.1, tokens_per_s: 20, completion_tokens: 3, seconds: 0.2 },
    usage,
  });
});

test.each([["plain", PLAIN], ["tools", TOOLS], ["grounded", GROUNDED], ["searched", SEARCHED]])(
  "resuming a log anywhere, with events repeated, ends in the same state: %s",
  (_, log) => {
    const expected = fold(log);
    for (let seen = 0; seen <= log.length; seen += 1) {
      for (let again = 0; again <= seen; again += 1) {
        expect(fold(log, fold(log, EMPTY, 0, seen), again)).toEqual(expected);
      }
    }
  },
);

test("thinking, text and calls stand in the order in which they came", () => {
  const answer = fold(TOOLS);
  expect(shownParts(answer).map(({ part, text }) => [part.kind, text.trim()])).toEqual([
    ["thinking", ""],
    ["text", "Let me write it."],
    ["calls", ""],
    ["thinking", ""],
    ["text", "Done."],
  ]);
  expect(answer.thoughtTokens).toBe(8);
  expect(answer.limit).toBe("steps");
  expect(answer.reduced).toEqual({ thinking: 256, models: null });
});

test("a call has what it was given, what it told on its way, and how it ended", () => {
  const [first, second] = fold(TOOLS).calls;
  expect(first).toMatchObject({
    name: "write_file", arguments: '{"path": "a"}', state: "done", output: "one two", ms: 12,
    progress: { text: "half", done: 1, total: 2 }, result: { text: "written" }, approval: { decision: "once" },
  });
  expect(second).toMatchObject({ state: "failed", error: { message: "It broke." }, questions: [{ answer: "a" }] });
});

test("an answer is another server's where its model was the last one asked", () => {
  const sent: RunEvent = {
    type: "remote.sent", model: "big", why: "it is named", messages: 1, characters: 9, images: 0, passages: 0, tool_results: 0,
  };
  const said: RunEvent = { type: "answer.delta", text: "Four", guessed: [] };
  const tell = (...events: RunEvent[]): Answer => events.reduce((answer, event, i) => reduce(answer, i + 1, event), EMPTY);
  expect(answeredElsewhere(tell(said))).toBe(false);
  expect(answeredElsewhere(tell(sent))).toBe(false); // nothing has come back yet
  expect(answeredElsewhere(tell(sent, said))).toBe(true);
  expect(answeredElsewhere(tell(sent, { type: "route.answering", model: "small" }, said))).toBe(false);
  expect(tell(sent, said).sent).toEqual([expect.objectContaining({ model: "big", characters: 9 })]);
});

test("a wait that is told before its thinking has started belongs to it", () => {
  const log: RunEvent[] = [
    started,
    { type: "thinking.wait", number: 1, of: 1 },
    { type: "thinking.started", started_at: 11, max_tokens: null, waits: 1 },
    { type: "thinking.delta", text: "Wait, 8." },
    { type: "thinking.done", duration_s: 1, tokens: 4 },
  ];
  expect(fold(log).parts).toMatchObject([
    { startedAt: 11, text: "Wait, 8.", waits: [{ at: 0, number: 1, of: 1 }], done: { duration_s: 1 } },
  ]);
});

test("whatever is open when a run ends is closed", () => {
  const ask: RunEvent = { type: "question.asked", ...call, question_id: "q", text: "?", choices: null, expires_at: 9 };
  const cut: RunEvent = { type: "run.failed", code: "server_restarted", message: "It restarted.", retryable: true };
  const opened = fold([started, { type: "tool.call", ...call, agent: null, arguments: "{}" }, asked, ask]);
  const [ended] = reduce(opened, 5, cut).calls;
  expect(ended).toMatchObject({ state: "cut", approval: { decision: "gone" }, questions: [{ state: "gone" }] });
  const thinking = fold([started, { type: "thinking.started", started_at: 1, max_tokens: null, waits: 0 }]);
  expect(reduce(thinking, 3, cut).parts[0]).toMatchObject({ open: false, done: null });
});

test("marks are where their labels are, whatever characters come before", () => {
  const answer = fold(GROUNDED);
  expect(answer.marks.map(({ from, end }) => answer.text.slice(from, end))).toEqual([" [S1]", " [unsupported]"]);
  expect(answer.marks.map(({ start }) => answer.text.slice(start, start + 5))).toEqual(["🌊 It", "It is"]);
});

test("a search knows the states, their fate and the way to the answer", () => {
  const { search, candidates } = fold(SEARCHED);
  expect(search?.nodes.map(({ score, pruned, chosen }) => [score, pruned, chosen])).toEqual([
    [null, null, true],
    [0.2, "beam", false],
    [0.9, null, true],
  ]);
  expect(search?.done?.ended).toBe("found");
  expect(search?.merges).toHaveLength(1);
  expect(candidates?.list.map(({ text }) => text)).toEqual(["5", "4"]);
  expect(candidates?.chosen?.index).toBe(0);
});

test("an event changes only what it tells of: the other states of a search stay the same objects", () => {
  const before = fold(SEARCHED, EMPTY, 0, 6);
  const after = reduce(before, 7, { type: "search.score", node: 1, value: 0.4 });
  expect(after.search?.nodes[2]).toBe(before.search?.nodes[2]);
  expect(after.search?.nodes[1]).not.toBe(before.search?.nodes[1]);
});

test("what goes on is told from the first moment, and not when something else shows it", () => {
  const now = (log: RunEvent[], length: number): string | null => doing(fold(log, EMPTY, 0, length));
  expect([0, 1, 2, 3, 4, 9, 10, 14].map((length) => now(PLAIN, length))).toEqual([
    "thinking", "queued", "thinking", "reading", null, null, null, null,
  ]);
  expect(now(TOOLS, 6)).toBe(null); // its card shows that it runs
  expect(now(TOOLS, 16)).toBe("thinking"); // about the results
  expect(now(SEARCHED, 6)).toBe("searching");
  expect(now(SEARCHED, 15)).toBe("comparing");
});

test("a sentence that is held back is told of until there is text again", () => {
  const held = { type: "answer.checking", tokens: 52 } as const;
  const text: RunEvent = { type: "answer.delta", text: "It was built in 1931. ", guessed: [] };
  const log: RunEvent[] = [started, held, text, held, { type: "answer.delta", text: "It is tall.", guessed: [] }, held, completed];
  const folded = log.map((_, i) => fold(log, EMPTY, 0, i + 1));
  expect(folded.map(({ checking }) => checking)).toEqual([null, 52, null, 52, null, 52, null]);
  expect(folded.map(doing)).toEqual(["thinking", "checking", null, "checking", null, "checking", null]);
  expect(folded.at(-1)?.text).toBe("It was built in 1931. It is tall.");
});

test("guessed text is known by its place in the answer, also from a log that never said so", () => {
  const old = { type: "answer.delta", text: "One " } as unknown as RunEvent;
  const log: RunEvent[] = [started, old, { type: "answer.delta", text: "two three", guessed: [0, 3, 4, 5] }, completed];
  expect(fold(log, EMPTY, 0, 4).guessed).toEqual([[4, 7], [8, 9]]);
});

test("an event of a newer server changes nothing but the place in the log", () => {
  const strange = { type: "picture.drawn" } as unknown as RunEvent;
  expect(reduce(EMPTY, 1, strange)).toEqual({ ...EMPTY, seq: 1 });
});

test("a stored answer has its steps in order, with calls and results", () => {
  const stored: StoredMessage = {
    id: "a", role: "assistant", content: "Let me see.\n\nIt is 85.", thinking: "hm", run_id: null, thinking_s: 1.5,
    tokens_per_s: 20, ttft_s: null, usage, status: "completed", error: null,
    steps: [
      {
        content: "Let me see.",
        calls: [{ id: "c", name: "calculator", arguments: '{"expression": "27+58"}' }],
        results: [{ call_id: "c", text: "85", untrusted: false }],
      },
      {
        content: "",
        calls: [{ id: "c", name: "calculator", arguments: '{"expression": "85"}' }],
        results: [{ call_id: "c", text: "still 85", untrusted: false }],
      },
      { content: "It is 85.", calls: [], results: [] },
    ],
  };
  const answer = fromStored(stored);
  expect(shownParts(answer).map(({ part, text }) => [part.kind, text.trim()])).toEqual([
    ["thinking", ""], ["text", "Let me see."], ["calls", ""], ["calls", ""], ["text", "It is 85."],
  ]);
  expect(answer.calls[0]).toMatchObject({ name: "calculator", state: "done", result: { text: "85" } });
  expect(new Set(answer.calls.map((call) => call.id)).size).toBe(2); // though both are "c" in their steps
  const plain = fromStored({ ...stored, steps: [], thinking: "", thinking_s: null });
  expect(plain.parts).toEqual([{ kind: "text", start: 0 }]);
});
