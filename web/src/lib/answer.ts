/**
 * An answer as its run's log tells it: `reduce` folds one event in and touches nothing else, so replaying a log from
 * its start, or resuming it in the middle, ends in the same state. An event already folded in changes nothing.
 */
import { agentsEnded, reduceAgents, type SubAgent } from "./answer/agents";
import { guessesGrew, type Guess } from "./answer/guessed";
import { reduceCandidates, reduceSearch, type Candidates, type Search } from "./answer/search";
import { markOf, type Grounds, type Mark } from "./answer/sources";
import { ended, reduceCalls, storedCalls, type Call } from "./answer/tools";
import {
  answerGrew,
  called,
  closed,
  textsOf,
  thinkingDone,
  thinkingGrew,
  thinkingStarted,
  waited,
  type Part,
  type Thought,
} from "./answer/parts";
import type { Status, StoredMessage } from "./api";
import { AUTO } from "./asking/settings";
import type {
  AnswerDone,
  LimitReached,
  MemoryKept,
  Metrics,
  PrefillProgress,
  RemoteSent,
  RouteTried,
  RunEvent,
  RunReduced,
  StrategyEvent,
  Usage,
} from "./protocol";

export interface Failure {
  code: string;
  message: string;
  retryable: boolean;
}

export interface Answer {
  readonly seq: number; // of the last event folded in
  readonly status: Status;
  readonly position: number; // runs ahead in the queue
  readonly model: string | null; // that writes it, once it is known
  readonly strategy: string | null; // that finds it
  readonly startedAt: number | null; // seconds since the epoch, the server's clock
  readonly maxTokens: number | null;
  readonly reading: Omit<PrefillProgress, "type"> | null; // while the model reads
  readonly parts: readonly Part[];
  readonly budget: { readonly tokens: number | null; readonly waits: number }; // of all thinking
  readonly thoughtTokens: number; // so far, of all thinking
  readonly text: string;
  readonly guessed: readonly Guess[]; // of the text
  readonly checking: number | null; // tokens of a sentence that is held back until it is checked
  readonly finishReason: AnswerDone["finish_reason"] | null;
  readonly calls: readonly Call[];
  readonly agents: readonly SubAgent[]; // that calls delegate to
  readonly reduced: Omit<RunReduced, "type"> | null; // what it got less of, as many waited
  readonly limit: LimitReached["limit"] | null; // what ended its calling
  readonly kept: Omit<MemoryKept, "type"> | null; // facts of its question, for later chats
  readonly grounds: Grounds | null; // what was found in documents
  readonly marks: readonly Mark[];
  readonly tried: readonly Omit<RouteTried, "type">[]; // models, by the router
  readonly answering: string | null; // whose answer it is, by the router
  readonly search: Search | null;
  readonly candidates: Candidates | null;
  readonly sent: readonly Omit<RemoteSent, "type">[]; // requests that left this server
  readonly told: readonly Omit<StrategyEvent, "type">[]; // by a plugin's strategy
  readonly metrics: Partial<Omit<Metrics, "type">> | null;
  readonly usage: Usage | null;
  readonly failure: Failure | null;
}

export const EMPTY: Answer = {
  seq: 0,
  status: "running",
  position: 0,
  model: null,
  strategy: null,
  startedAt: null,
  maxTokens: null,
  reading: null,
  parts: [],
  budget: { tokens: null, waits: 0 },
  thoughtTokens: 0,
  text: "",
  guessed: [],
  checking: null,
  finishReason: null,
  calls: [],
  agents: [],
  reduced: null,
  limit: null,
  kept: null,
  grounds: null,
  marks: [],
  tried: [],
  answering: null,
  search: null,
  candidates: null,
  sent: [],
  told: [],
  metrics: null,
  usage: null,
  failure: null,
};

export function reduce(answer: Answer, seq: number, event: RunEvent): Answer {
  if (seq <= answer.seq) return answer;
  return { ...answer, seq, ...change(answer, event) };
}

function change(answer: Answer, event: RunEvent): Partial<Answer> {
  const { parts } = answer;
  switch (event.type) {
    case "run.queued":
      return { position: event.position };
    case "run.started":
      return {
        position: 0,
        model: event.model === AUTO ? null : event.model,
        strategy: event.strategy ?? null, // logs of old have none
        startedAt: event.started_at,
        maxTokens: event.max_tokens,
      };
    case "run.reduced":
      return { reduced: { thinking: event.thinking, models: event.models } };
    case "prefill.progress":
      return { reading: { processed: event.processed, total: event.total, cached: event.cached } };
    case "thinking.started":
      return {
        parts: thinkingStarted(parts, event.started_at),
        budget: { tokens: event.max_tokens, waits: event.waits },
        checking: null,
        reading: null,
      };
    case "thinking.delta":
      return { parts: thinkingGrew(parts, event.text), reading: null };
    case "thinking.progress":
      return { thoughtTokens: Math.max(answer.thoughtTokens, event.tokens), reading: null };
    case "thinking.wait":
      return { parts: waited(parts, event.number, event.of) };
    case "thinking.done": {
      const done = thinkingDone(parts, event);
      const tokens = done.reduce((sum, part) => sum + (part.kind === "thinking" ? (part.done?.tokens ?? 0) : 0), 0);
      return { parts: done, thoughtTokens: Math.max(answer.thoughtTokens, tokens) };
    }
    case "answer.delta":
      return {
        parts: answerGrew(parts, answer.text.length),
        text: answer.text + event.text,
        guessed: guessesGrew(answer.guessed, answer.text.length, event.text, event.guessed ?? []), // logs of old have none
        checking: null,
        reading: null,
      };
    case "answer.checking":
      return { checking: event.tokens, reading: null };
    case "answer.done":
      return {
        parts: event.text === "" || answer.text !== "" ? closed(parts) : answerGrew(parts, 0),
        text: event.text,
        finishReason: event.finish_reason,
        checking: null,
        reading: null,
      };
    case "tool.call":
      return {
        parts: (event.agent ?? null) === null ? called(parts, event.call_id) : parts, // logs of old have none
        calls: reduceCalls(answer.calls, event),
        checking: null,
        reading: null,
      };
    case "tool.progress":
    case "tool.output":
    case "tool.result":
    case "tool.error":
    case "approval.requested":
    case "approval.resolved":
    case "question.asked":
    case "question.answered":
      return { calls: reduceCalls(answer.calls, event) };
    case "agent.started":
    case "agent.done":
      return { agents: reduceAgents(answer.agents, event) };
    case "limit.reached":
      return { limit: event.limit };
    case "memory.kept":
      return { kept: { notes: event.notes, full: event.full } };
    case "citation.sources": {
      const { type: _, ...grounds } = event;
      return { grounds };
    }
    case "citation.ref":
      return { marks: [...answer.marks, markOf(answer.text, event)] };
    case "route.tried": {
      const { type: _, ...tried } = event;
      return { tried: [...answer.tried, tried] };
    }
    case "route.answering":
      return { answering: event.model, model: event.model };
    case "remote.sent": {
      const { type: _, ...sent } = event;
      return { sent: [...answer.sent, sent] };
    }
    case "search.node":
    case "search.merge":
    case "search.score":
    case "search.prune":
    case "search.select":
    case "search.done":
      return { search: reduceSearch(answer.search, event), reading: null };
    case "candidate.done":
    case "candidate.chosen":
      return { candidates: reduceCandidates(answer.candidates, event), reading: null };
    case "strategy.event":
      return { told: [...answer.told, { name: event.name, fields: event.fields }] };
    case "metrics": {
      const { type: _, ...metrics } = event;
      return { metrics };
    }
    case "run.completed":
      return { status: "completed", usage: event.usage, ...over(answer) };
    case "run.cancelled":
      return { status: "cancelled", usage: event.usage, ...over(answer) };
    case "run.failed": {
      const { type: _, ...failure } = event;
      return { status: "failed", failure, ...over(answer) };
    }
    default:
      return newer(event);
  }
}

/** An event of a newer server changes nothing; that every event of this one is above, the compiler checks. */
function newer(_: never): Partial<Answer> {
  return {};
}

/** Whether the answer is another server's; a router's is, where that was the last one asked. */
export function answeredElsewhere({ sent, answering, text, calls }: Answer): boolean {
  const model = sent.at(-1)?.model;
  return model !== undefined && (text !== "" || calls.length > 0) && (answering ?? model) === model;
}

/** The answer, failed for a reason that its log does not tell. */
export function failed(answer: Answer, failure: Failure): Answer {
  return { ...answer, status: "failed", failure, ...over(answer) };
}

/** Nothing stays open when the run has ended. */
function over(answer: Answer): Partial<Answer> {
  const { parts, calls, agents } = answer;
  const shut = { parts: closed(parts), calls: ended(calls), agents: agentsEnded(agents) };
  return { ...shut, checking: null, reading: null, position: 0 };
}

/** What a reader is to be told, if anything, while nothing else on the page says so. */
export type Doing = "queued" | "reading" | "searching" | "comparing" | "checking" | "thinking" | null;

export function doing(answer: Answer): Doing {
  if (answer.status !== "running") return null;
  if (answer.checking !== null) return "checking";
  const last = shownParts(answer).at(-1);
  if (last?.part.kind === "thinking" || last?.part.kind === "text") return null;
  if (last?.part.kind === "calls" && answer.calls.some((call) => call.state === "running")) return null;
  if (answer.position > 0) return "queued";
  if (answer.reading !== null && answer.reading.processed < answer.reading.total) return "reading";
  if (answer.search !== null && answer.search.done === null) return "searching";
  if (answer.candidates !== null && answer.candidates.chosen === null) return "comparing";
  return "thinking";
}

export interface Shown {
  readonly part: Part;
  readonly text: string; // of a part that is text
}

/** The parts that have something to show. */
export function shownParts(answer: Answer): Shown[] {
  const texts = textsOf(answer.parts, answer.text);
  return answer.parts
    .map((part, i) => ({ part, text: texts[i] ?? "" }))
    .filter(({ part, text }) => part.kind !== "text" || text.trim() !== "");
}

/** The answer of a run that has ended, as the chat keeps it. */
export function fromStored(message: StoredMessage): Answer {
  const { thinking_s, tokens_per_s, ttft_s, usage } = message;
  const steps = message.steps ?? [];
  const parts: Part[] = [];
  if (message.thinking !== "" || thinking_s !== null) parts.push(storedThought(message));
  const calls = steps.map(storedCalls);
  let read = 0; // characters of the answer that earlier steps wrote
  (steps.length > 0 ? steps : [message]).forEach(({ content }, i) => {
    const start = Math.max(read, message.content.indexOf(content, read));
    if (content !== "") parts.push({ kind: "text", start });
    read = start + content.length;
    if (calls[i]?.length) parts.push({ kind: "calls", ids: calls[i].map((call) => call.id) });
  });
  return {
    ...EMPTY,
    status: message.status,
    parts,
    thoughtTokens: usage?.reasoning_tokens ?? 0,
    text: message.content,
    calls: calls.flat(),
    metrics:
      tokens_per_s === null ? null : { tokens_per_s, ...(typeof ttft_s === "number" ? { ttft_s } : {}) },
    usage,
    model: message.model ?? null,
    failure: message.status === "failed" ? { code: "", message: message.error ?? "", retryable: true } : null,
  };
}

function storedThought({ thinking, thinking_s, usage }: StoredMessage): Thought {
  const done = thinking_s === null ? null : { duration_s: thinking_s, tokens: usage?.reasoning_tokens ?? null };
  return { kind: "thinking", open: false, startedAt: null, text: thinking, waits: [], done };
}
