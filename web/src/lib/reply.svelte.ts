/**
 * A question, and an answer on its road from the server to the screen. Events are folded in as they come and shown once
 * an animation frame, so a replay of thousands costs one rendering.
 */
import {
  answerQuestion,
  ApiError,
  cancelRun,
  decide,
  type Decision,
  type RunWishes,
  type Scope,
  type StoredMessage,
  type Wishes,
} from "./api";
import { EMPTY, failed, fromStored, reduce, type Answer, type Failure } from "./answer";
import type { MessageFile } from "./documents/api";
import { follow, type Link } from "./events";
import { Frames } from "./frames";
import type { RunEvent } from "./protocol";
import { strings } from "./strings";

export interface Question {
  readonly role: "user";
  readonly key: string;
  readonly id: string | null; // null: the server has not taken it yet
  readonly siblings: readonly string[]; // ids of all that stand in its place, itself among them
  readonly content: string;
  readonly images: readonly string[]; // data: URLs
  readonly files: readonly MessageFile[];
}

/** How an answer was asked for, to ask for the very same once more. */
export interface Attempt {
  readonly key: string;
  readonly wishes: Wishes;
}

/** An answer and its road from the server to the screen. */
export class Reply {
  readonly role = "assistant";
  shown = $state.raw<Answer>(EMPTY);
  link = $state.raw<Link>({ state: "live" });
  stopping = $state(false);
  id = $state<string | null>(null);
  siblings = $state.raw<readonly string[]>([]);
  askedAt: number | null = Date.now(); // local, ms, if asked here; for as long as the server's clock is not known
  attempt: Attempt | null = null; // if asked here
  wishes: RunWishes | null = null; // if asked here, to be compared
  runId: string | null = null;
  #answer: Answer = EMPTY;
  readonly #frames = new Frames();
  #whole = false; // its log was read, or is being read
  #signal: AbortSignal | null = null;

  constructor(
    readonly key: string,
    public question: string,
    answer: Answer = EMPTY,
  ) {
    this.#answer = this.shown = answer;
  }

  /** An answer as the chat keeps it, with the run that made it, if that is known. */
  static stored(key: string, question: string, message: StoredMessage, signal: AbortSignal): Reply {
    // An answer still being made is built from its log alone, so nothing is shown twice.
    const reply = new Reply(key, question, message.status === "running" ? EMPTY : fromStored(message));
    reply.askedAt = null;
    reply.runId = message.run_id;
    reply.id = message.id;
    reply.siblings = message.siblings ?? [];
    reply.#signal = signal;
    return reply;
  }

  /** Was it never taken in by the server, so that a retry replaces it rather than asks again? */
  get unsent(): boolean {
    return this.runId === null && this.shown.status === "failed";
  }

  /** Read the run's log as it grows, until its end. `heard` is told of each event. */
  async follow(runId: string, signal: AbortSignal, heard: (event: RunEvent) => void): Promise<void> {
    this.runId = runId;
    this.#whole = true;
    if (this.stopping) void this.stop();
    try {
      await follow(
        runId,
        this.#answer.seq,
        {
          onEvent: (seq, event) => {
            this.#show(reduce(this.#answer, seq, event));
            heard(event);
          },
          onLink: (link) => (this.link = link),
        },
        signal,
      );
    } catch (error) {
      const gone = error instanceof ApiError && error.status === 404;
      const lost = { code: "server_restarted", message: strings.endings.server_restarted, retryable: true };
      this.fail(gone ? lost : failureOf(error));
    }
    this.#flush();
  }

  /**
   * Read how a stored answer came about, which its log knows and the chat does not. It is shown when it is whole; where
   * there is no log any more, what the chat keeps stays.
   */
  async recall(): Promise<void> {
    const [runId, signal] = [this.runId, this.#signal];
    if (this.#whole || runId === null || signal === null) return;
    this.#whole = true;
    let answer = EMPTY;
    const onEvent = (seq: number, event: RunEvent): void => void (answer = reduce(answer, seq, event));
    try {
      await follow(runId, 0, { onEvent, onLink: () => undefined }, signal);
    } catch {
      return;
    }
    if (signal.aborted || answer.status === "running") return;
    this.#answer = answer;
    this.#flush();
  }

  /** Answer what a call asks approval for. Throws ApiError when that is not taken. */
  async decide(approvalId: string, decision: Decision, scope: Scope): Promise<void> {
    if (this.runId !== null) await decide(this.runId, approvalId, decision, scope);
  }

  /** Answer what a tool asks. Throws ApiError when that is not taken. */
  async answerQuestion(questionId: string, text: string): Promise<void> {
    if (this.runId !== null) await answerQuestion(this.runId, questionId, text);
  }

  /** Ask the server to stop. Its log says when it has; asking before the run exists is remembered. */
  async stop(): Promise<void> {
    this.stopping = true;
    if (this.runId !== null) await cancelRun(this.runId).catch(() => (this.stopping = false));
  }

  fail(failure: Failure): void {
    this.#answer = failed(this.#answer, failure);
    this.#flush();
  }

  #show(answer: Answer): void {
    this.#answer = answer;
    if (document.hidden) this.#flush(); // no frames come to a hidden page
    else this.#frames.ask(() => this.#flush());
  }

  #flush(): void {
    this.#frames.cancel();
    this.shown = this.#answer;
  }
}

export function failureOf(error: unknown): Failure {
  if (!(error instanceof ApiError)) throw error;
  const message = error.message || (error.status === 0 ? strings.unreachable : strings.failed);
  return { code: error.code, message, retryable: true };
}
