// Generated from app/events.py by `python -m app.protocol`. Change it there.

/** Characters `start` to `end` of a document, which are `text`. */
export interface SourceShown {
  label: string;
  document: number;
  title: string;
  page: number | null;
  start: number;
  end: number;
  text: string;
  score: number;
}

/** Token counts of one run. `cached_tokens` of the prompt needed no computing. */
export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  reasoning_tokens: number;
  cached_tokens: number;
}

export interface RunQueued {
  type: "run.queued";
  position: number;
}

export interface RunStarted {
  type: "run.started";
  model: string;
  started_at: number;
  max_tokens: number;
}

export interface ThinkingStarted {
  type: "thinking.started";
  started_at: number;
}

export interface ThinkingDelta {
  type: "thinking.delta";
  text: string;
}

export interface ThinkingDone {
  type: "thinking.done";
  duration_s: number;
  tokens: number;
}

export interface AnswerDelta {
  type: "answer.delta";
  text: string;
}

export interface AnswerDone {
  type: "answer.done";
  text: string;
  finish_reason: "stop" | "length";
}

/** What was found for the question, before the answer begins. `none`: the model was not asked. */
export interface CitationSources {
  type: "citation.sources";
  verdict: "answer" | "partial" | "none";
  score: number;
  questions: string[];
  sources: SourceShown[];
}

/** What supports the sentence that is characters `start` to `end` of the answer. */
export interface CitationRef {
  type: "citation.ref";
  sentence: number;
  start: number;
  end: number;
  support: "supported" | "elsewhere" | "unsupported" | "plain";
  citations: SourceShown[];
}

/** At most four a second while the answer grows, and once at its end. */
export interface Metrics {
  type: "metrics";
  ttft_s: number;
  tokens_per_s: number;
  completion_tokens: number;
}

export interface RunCompleted {
  type: "run.completed";
  usage: Usage;
}

export interface RunFailed {
  type: "run.failed";
  code: string;
  message: string;
  retryable: boolean;
}

export interface RunCancelled {
  type: "run.cancelled";
  usage: Usage;
}

/** What a run writes to its log. */
export type RunEvent =
  | RunQueued
  | RunStarted
  | ThinkingStarted
  | ThinkingDelta
  | ThinkingDone
  | AnswerDelta
  | AnswerDone
  | CitationSources
  | CitationRef
  | Metrics
  | RunCompleted
  | RunFailed
  | RunCancelled;

/** The last event of every log is one of these. */
export const TERMINAL: ReadonlySet<string> = new Set(["run.cancelled", "run.completed", "run.failed"]);
