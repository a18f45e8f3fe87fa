// Generated from app/runs/events.py by `python -m app.protocol`. Change it there.

export interface JsonValue {
}

/** `replaced`: the note's text before, of the same attribute. */
export interface NoteKept {
  number: number;
  text: string;
  replaced: string | null;
}

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

/** A file that a call made, kept with the chat. `size`: bytes. */
export interface ToolArtifact {
  id: string;
  name: string;
  version: number;
  media_type: string;
  size: number;
}

export interface ToolSource {
  title: string;
  url: string | null;
  text: string | null;
  document: number | string | null;
  page: number | null;
  start: number | null;
  end: number | null;
}

/** Token counts of one run. `cached_tokens` of the prompt needed no computing. The model saw nothing of `forgotten_tokens` of an endless chat; `seen_from`: the id of the first message that it saw whole, the system prompt apart. */
export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  reasoning_tokens: number;
  cached_tokens: number;
  forgotten_tokens: number;
  seen_from: string | null;
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
  strategy: string | null;
}

/** Many wait, so this answer gets less: at most so many tokens of thinking, or only these of `auto`'s models. */
export interface RunReduced {
  type: "run.reduced";
  thinking: number | null;
  models: string[] | null;
}

/** Progress of the prefill, in tokens, where that takes a while: at most ten a second. */
export interface PrefillProgress {
  type: "prefill.progress";
  processed: number;
  total: number;
  cached: number;
}

/** `max_tokens` and `waits` are the budget's; null and 0 where there is none. */
export interface ThinkingStarted {
  type: "thinking.started";
  started_at: number;
  max_tokens: number | null;
  waits: number;
}

export interface ThinkingDelta {
  type: "thinking.delta";
  text: string;
}

/** Tokens that this answer has thought so far: at most four times a second, also where the text is not shown. */
export interface ThinkingProgress {
  type: "thinking.progress";
  tokens: number;
}

/** The model would have ended its thinking, and was made to go on, for the `number`th time of `of` at most. */
export interface ThinkingWait {
  type: "thinking.wait";
  number: number;
  of: number;
}

export interface ThinkingDone {
  type: "thinking.done";
  duration_s: number;
  tokens: number;
}

/** `guessed`: from where to where in `text`, in characters and in pairs, its tokens were drafted before they were sampled. */
export interface AnswerDelta {
  type: "answer.delta";
  text: string;
  guessed: number[];
}

/** A sentence of an answer from documents is held back until it is whole and checked: `tokens` of it so far. */
export interface AnswerChecking {
  type: "answer.checking";
  tokens: number;
}

/** `length`: the run's `max_tokens` were reached. `sources`: it grew as long as its sources. `repetition`: the model wrote the same again and again. */
export interface AnswerDone {
  type: "answer.done";
  text: string;
  finish_reason: "stop" | "length" | "sources" | "repetition";
  outcome: "answered" | "unknown";
}

/** Sources found for the question, before the answer begins. `none`: the model was not asked; `nearest` are the sentences that come nearest then, the nearest first, whose score is the probability that they answer. */
export interface CitationSources {
  type: "citation.sources";
  verdict: "answer" | "partial" | "none";
  score: number;
  questions: string[];
  sources: SourceShown[];
  nearest: SourceShown[];
}

/** Support of the sentence that is characters `start` to `end` of the answer. `answers`: the probability that what it cites answers the question, too. */
export interface CitationRef {
  type: "citation.ref";
  sentence: number;
  start: number;
  end: number;
  support: "supported" | "elsewhere" | "partial" | "unsupported" | "plain";
  citations: SourceShown[];
  answers: number | null;
}

/** A call of the model's, complete; what becomes of it is one `tool.result` or `tool.error` with the same id. */
export interface ToolCall {
  type: "tool.call";
  call_id: string;
  name: string;
  arguments: string;
  agent: string | null;
}

export interface ToolProgress {
  type: "tool.progress";
  call_id: string;
  name: string;
  text: string;
  done: number | null;
  total: number | null;
}

/** A piece of a streaming tool's output, as it comes. */
export interface ToolOutput {
  type: "tool.output";
  call_id: string;
  name: string;
  text: string;
}

/** `untrusted`: somebody else may have written it. `truncated`: characters that the model does not see. */
export interface ToolResult {
  type: "tool.result";
  call_id: string;
  name: string;
  text: string;
  truncated: number;
  untrusted: boolean;
  sources: ToolSource[];
  ms: number;
  artifacts: ToolArtifact[];
}

export interface ToolError {
  type: "tool.error";
  call_id: string;
  name: string;
  kind: string;
  message: string;
  ms: number;
}

/** A sub-agent begins a task that the call `call_id` delegates. `tools`: names of those that it may call. */
export interface AgentStarted {
  type: "agent.started";
  agent: string;
  call_id: string;
  instructions: string;
  tools: string[];
}

/** `text` is its answer, or why there is none where it `failed`. `limit` ended its calling. `tokens`: it wrote. */
export interface AgentDone {
  type: "agent.done";
  agent: string;
  text: string;
  failed: boolean;
  limit: "steps" | "tokens" | "seconds" | "context" | null;
  tokens: number;
  seconds: number;
}

/** A person must see `preview` and decide, before `expires_at` (seconds since the epoch); without, it is a no. */
export interface ApprovalRequested {
  type: "approval.requested";
  approval_id: string;
  call_id: string;
  name: string;
  reason: string;
  risk: "low" | "medium" | "high";
  preview: string;
  arguments_hash: string;
  expires_at: number;
}

export interface ApprovalResolved {
  type: "approval.resolved";
  approval_id: string;
  call_id: string;
  decision: "once" | "no" | "always" | "never" | "expired";
}

/** A tool asks the person; with `choices` the answer is one of them. */
export interface QuestionAsked {
  type: "question.asked";
  question_id: string;
  call_id: string;
  name: string;
  text: string;
  choices: string[] | null;
  expires_at: number;
}

/** `text` is null where nobody answered in time. */
export interface QuestionAnswered {
  type: "question.answered";
  question_id: string;
  call_id: string;
  text: string | null;
}

/** One of several models answered. `why` it was not enough is empty where it `passed`; its answer then follows. */
export interface RouteTried {
  type: "route.tried";
  model: string;
  passed: boolean;
  why: string;
  tokens: number;
  cost: number;
  seconds: number;
}

/** The model whose answer follows. */
export interface RouteAnswering {
  type: "route.answering";
  model: string;
}

/** Something of the chat leaves the server, for this remote model, and why. */
export interface RemoteSent {
  type: "remote.sent";
  model: string;
  why: string;
  messages: number;
  characters: number;
  images: number;
  passages: number;
  tool_results: number;
}

/** A state of a search. The root has the number 0 and no parent. */
export interface SearchNode {
  type: "search.node";
  node: number;
  parent: number | null;
  depth: number;
  text: string;
}

/** A step led to a state that is there already. */
export interface SearchMerge {
  type: "search.merge";
  node: number;
  parent: number;
  text: string;
}

export interface SearchScore {
  type: "search.score";
  node: number;
  value: number;
}

export interface SearchPrune {
  type: "search.prune";
  node: number;
  why: "beam" | "threshold" | "hopeless" | "context";
}

/** A state on the way to the answer, from the root on. */
export interface SearchSelect {
  type: "search.select";
  node: number;
}

/** `solved`: by the task's checker or, where it says nothing, by a finished answer's value. */
export interface SearchDone {
  type: "search.done";
  node: number;
  solved: boolean;
  ended: "found" | "exhausted" | "depth" | "tokens" | "nodes" | "seconds";
  value: number;
  nodes: number;
  written: number;
  read: number;
  seconds: number;
}

/** One of several answers is whole, or was `stopped` before. `score` is a verifier's, or its weight in a vote; `vote` what it votes for. */
export interface CandidateDone {
  type: "candidate.done";
  index: number;
  text: string;
  tokens: number;
  score: number | null;
  vote: string | null;
  stopped: boolean;
}

/** The answer that is given, of `of` that had ended; `cancelled` were not written to their end. */
export interface CandidateChosen {
  type: "candidate.chosen";
  index: number;
  of: number;
  score: number | null;
  cancelled: number;
}

/** Something that a plugin's strategy tells, in its own words. */
export interface StrategyEvent {
  type: "strategy.event";
  name: string;
  fields: Record<string, JsonValue>;
}

/** Calling is over: the model answers with what it has. */
export interface LimitReached {
  type: "limit.reached";
  limit: "steps" | "tokens" | "seconds" | "context";
}

/** Facts that the question stated were kept for later chats. `full`: there was no room for others. */
export interface MemoryKept {
  type: "memory.kept";
  notes: NoteKept[];
  full: boolean;
}

/** At most four a second while the answer grows, and once at its end. */
export interface Metrics {
  type: "metrics";
  ttft_s: number;
  tokens_per_s: number;
  completion_tokens: number;
  seconds: number | null;
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
  | RunReduced
  | PrefillProgress
  | ThinkingStarted
  | ThinkingDelta
  | ThinkingProgress
  | ThinkingWait
  | ThinkingDone
  | AnswerDelta
  | AnswerChecking
  | AnswerDone
  | CitationSources
  | CitationRef
  | ToolCall
  | ToolProgress
  | ToolOutput
  | ToolResult
  | ToolError
  | AgentStarted
  | AgentDone
  | ApprovalRequested
  | ApprovalResolved
  | QuestionAsked
  | QuestionAnswered
  | RouteTried
  | RouteAnswering
  | RemoteSent
  | SearchNode
  | SearchMerge
  | SearchScore
  | SearchPrune
  | SearchSelect
  | SearchDone
  | CandidateDone
  | CandidateChosen
  | StrategyEvent
  | LimitReached
  | MemoryKept
  | Metrics
  | RunCompleted
  | RunFailed
  | RunCancelled;

/** The last event of every log is one of these. */
export const TERMINAL: ReadonlySet<string> = new Set(["run.cancelled", "run.completed", "run.failed"]);
