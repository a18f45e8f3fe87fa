/**
 * An answer as its run's log tells it: `reduce` folds one event in and touches nothing else, so replaying a log from
 * its start, or resuming it in the middle, ends in the same state. An event already folded in changes nothing.
 */
import type { Status, StoredMessage } from "./api";
import type { Metrics, RunEvent, Usage } from "./protocol";

export interface Failure {
  code: string;
  message: string;
  retryable: boolean;
}

export interface Answer {
  readonly seq: number; // of the last event folded in
  readonly status: Status;
  readonly position: number; // runs ahead in the queue
  readonly startedAt: number | null; // seconds since the epoch, the server's clock
  readonly maxTokens: number | null;
  readonly thinkingStartedAt: number | null; // likewise
  readonly thinking: string;
  readonly thought: { duration_s: number; tokens: number | null } | null;
  readonly text: string;
  readonly finishReason: "stop" | "length" | null;
  readonly metrics: Partial<Omit<Metrics, "type">> | null;
  readonly usage: Usage | null;
  readonly failure: Failure | null;
}

export const EMPTY: Answer = {
  seq: 0,
  status: "running",
  position: 0,
  startedAt: null,
  maxTokens: null,
  thinkingStartedAt: null,
  thinking: "",
  thought: null,
  text: "",
  finishReason: null,
  metrics: null,
  usage: null,
  failure: null,
};

export function reduce(answer: Answer, seq: number, event: RunEvent): Answer {
  if (seq <= answer.seq) return answer;
  return { ...answer, seq, ...change(answer, event) };
}

function change(answer: Answer, event: RunEvent): Partial<Answer> {
  switch (event.type) {
    case "run.queued":
      return { position: event.position };
    case "run.started":
      return { position: 0, startedAt: event.started_at, maxTokens: event.max_tokens };
    case "thinking.started":
      return { thinkingStartedAt: event.started_at };
    case "thinking.delta":
      return { thinking: answer.thinking + event.text };
    case "thinking.done":
      return { thought: { duration_s: event.duration_s, tokens: event.tokens } };
    case "answer.delta":
      return { text: answer.text + event.text };
    case "answer.done":
      return { text: event.text, finishReason: event.finish_reason };
    case "metrics":
      return {
        metrics: {
          ttft_s: event.ttft_s,
          tokens_per_s: event.tokens_per_s,
          completion_tokens: event.completion_tokens,
        },
      };
    case "run.completed":
      return { status: "completed", usage: event.usage };
    case "run.cancelled":
      return { status: "cancelled", usage: event.usage };
    case "run.failed":
      return {
        status: "failed",
        failure: { code: event.code, message: event.message, retryable: event.retryable },
      };
    default:
      return {}; // an event of a newer server
  }
}

/** The answer of a run that has ended, as the chat keeps it. */
export function fromStored(message: StoredMessage): Answer {
  const { thinking_s, tokens_per_s, ttft_s, usage } = message;
  return {
    ...EMPTY,
    status: message.status,
    thinking: message.thinking,
    thought: thinking_s === null ? null : { duration_s: thinking_s, tokens: usage?.reasoning_tokens ?? null },
    text: message.content,
    metrics:
      tokens_per_s === null ? null : { tokens_per_s, ...(typeof ttft_s === "number" ? { ttft_s } : {}) },
    usage,
    failure: message.status === "failed" ? { code: "", message: message.error ?? "", retryable: true } : null,
  };
}
