/**
 * One chat as the page shows it: messages, and the answer now being made. Events are folded in as they come and shown
 * once an animation frame, so a replay of thousands costs one rendering.
 */
import {
  answerQuestion,
  ApiError,
  cancelRun,
  createChat,
  decide,
  getChat,
  startRun,
  type Chat,
  type ChatSummary,
  type Decision,
  type Scope,
  type StoredMessage,
} from "./api";
import { EMPTY, failed, fromStored, reduce, type Answer, type Failure } from "./answer";
import { follow, type Link } from "./events";
import type { RunEvent } from "./protocol";
import type { Wishes } from "./asking/settings";
import { strings } from "./strings";

export interface Question {
  readonly role: "user";
  readonly key: string;
  readonly content: string;
}

/** An answer and its road from the server to the screen. */
export class Reply {
  readonly role = "assistant";
  shown = $state.raw<Answer>(EMPTY);
  link = $state.raw<Link>({ state: "live" });
  stopping = $state(false);
  askedAt: number | null = Date.now(); // local, ms, if asked here; for as long as the server's clock is not known
  runId: string | null = null;
  #answer: Answer = EMPTY;
  #frame = 0;
  #whole = false; // its log was read, or is being read
  #signal: AbortSignal | null = null;

  constructor(
    readonly key: string,
    readonly question: string,
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
      this.fail(gone ? { code: "server_restarted", message: strings.endings.server_restarted, retryable: true } : failureOf(error));
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
    else this.#frame ||= requestAnimationFrame(() => this.#flush());
  }

  #flush(): void {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.shown = this.#answer;
  }
}

export type Message = Question | Reply;
export type Phase = "ready" | "loading" | "missing" | "unreachable";

export class Conversation {
  id = $state<string | null>(null);
  title = $state("");
  phase = $state<Phase>("ready");
  messages = $state.raw<readonly Message[]>([]);
  announcement = $state(""); // what a screen reader says
  notice = $state("");
  readonly last = $derived(this.messages.at(-1));
  readonly running = $derived(this.last?.role === "assistant" && this.last.shown.status === "running");
  #scope = new AbortController(); // ends when another chat is opened
  #keys = 0;

  /**
   * `created` hears of a chat that a first message began, `changed` of one whose listing may have changed. `wishes`
   * says how answers are to be made; `refused` takes a refusal of that, and says whether it was one.
   */
  constructor(
    private readonly created: (chat: ChatSummary) => void,
    private readonly changed: () => void,
    private readonly wishes: () => Wishes,
    private readonly refused: (error: ApiError) => boolean,
  ) {}

  /** Show a chat, or an empty new one. An answer under way goes on without being watched. */
  async open(id: string | null): Promise<void> {
    const signal = this.#enter();
    this.id = id;
    this.title = "";
    this.messages = [];
    this.notice = "";
    this.announcement = "";
    this.phase = id === null ? "ready" : "loading";
    if (id === null) return;
    try {
      this.#fill(await getChat(id, signal), signal);
    } catch (error) {
      if (signal.aborted) return;
      this.phase = error instanceof ApiError && error.status === 404 ? "missing" : "unreachable";
    }
  }

  /** Ask. False when the words were not taken: the chat is busy, which a notice says, or a wish was refused. */
  async send(content: string): Promise<boolean> {
    if (this.running || this.phase !== "ready") return false;
    const { signal } = this.#scope;
    this.notice = "";
    const reply = new Reply(this.#key(), content);
    const before = this.messages;
    this.messages = [...before, { role: "user", key: this.#key(), content }, reply];
    this.announcement = strings.thinking;
    try {
      let { id } = this;
      if (id === null) {
        const chat = await createChat();
        id = chat.id;
        if (!signal.aborted) {
          this.id = id;
          this.created(chat);
        }
      }
      const { run_id } = await startRun(id, content, this.wishes());
      this.changed();
      if (!signal.aborted) void this.#watch(reply, run_id, signal);
    } catch (error) {
      if (error instanceof ApiError && error.status === 409 && !signal.aborted) {
        await this.open(this.id);
        this.notice = strings.busy;
        return false;
      }
      if (error instanceof ApiError && !signal.aborted && this.refused(error)) {
        this.messages = before;
        this.announcement = strings.notTaken(error.message);
        return false;
      }
      reply.fail(failureOf(error));
      this.#announce(reply);
    }
    return true;
  }

  /** Take in what another tab has added, unless something is going on here. */
  async refresh(): Promise<void> {
    const { signal } = this.#scope;
    if (this.id === null || this.phase !== "ready" || this.running || this.#unsent) return;
    const chat = await getChat(this.id, signal).catch(() => null);
    if (chat === null || signal.aborted || this.running || this.#unsent) return;
    if (chat.messages.length !== this.messages.length) this.#fill(chat, signal);
  }

  async stop(): Promise<void> {
    if (this.last?.role === "assistant" && this.running) await this.last.stop();
  }

  /** Ask the question of a failed answer again. Returns as `send` does. */
  async retry(reply: Reply): Promise<boolean> {
    if (this.running) return true;
    if (reply.unsent) this.messages = this.messages.slice(0, this.messages.indexOf(reply) - 1);
    return this.send(reply.question);
  }

  get #unsent(): boolean {
    return this.last?.role === "assistant" && this.last.unsent;
  }

  async #watch(reply: Reply, runId: string, signal: AbortSignal): Promise<void> {
    await reply.follow(runId, signal, (event) => {
      if (event.type === "approval.requested") this.announcement = strings.announceApproval(event.name);
      else if (event.type === "question.asked") this.announcement = strings.announceQuestion(event.name, event.text);
    });
    if (signal.aborted) return;
    this.#announce(reply);
    this.changed();
  }

  #fill(chat: Chat, signal: AbortSignal): void {
    this.title = chat.title;
    this.phase = "ready";
    let question = "";
    this.messages = chat.messages.map((message) => {
      if (message.role === "user") {
        question = message.content;
        return { role: "user", key: this.#key(), content: question };
      }
      const reply = Reply.stored(this.#key(), question, message, signal);
      if (message.run_id !== null && message.status === "running") void this.#watch(reply, message.run_id, signal);
      return reply;
    });
  }

  #announce(reply: Reply): void {
    const { status, text, failure } = reply.shown;
    if (status === "completed") this.announcement = strings.announceDone(text);
    else if (status === "cancelled") this.announcement = strings.announceStopped;
    else if (status === "failed") this.announcement = strings.announceFailed(failure?.message ?? "");
  }

  #enter(): AbortSignal {
    this.#scope.abort();
    this.#scope = new AbortController();
    return this.#scope.signal;
  }

  #key(): string {
    this.#keys += 1;
    return `m${this.#keys}`;
  }
}

function failureOf(error: unknown): Failure {
  if (!(error instanceof ApiError)) throw error;
  const message = error.message || (error.status === 0 ? strings.unreachable : strings.failed);
  return { code: error.code, message, retryable: true };
}
