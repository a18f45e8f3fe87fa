/**
 * One chat as the page shows it: the messages of one branch, and the answer now being made, be it in this branch or in
 * another. What was seen of other branches is kept, so that going back to one reads nothing twice.
 */
import {
  ApiError,
  changeChat,
  createChat,
  getChat,
  newKey,
  startRun,
  type Chat,
  type ChatSummary,
  type KeptSettings,
  type Place,
  type RunWishes,
  type StartedRun,
  type StoredMessage,
  type Wishes,
} from "./api";
import { comparedIn, keepCompared } from "./asking/compare";
import type { MessageFile } from "./documents/api";
import { keepDraft, placeOf } from "./drafts";
import { idle } from "./idle";
import { failureOf, Reply, type Attempt, type Question } from "./reply.svelte";
import { strings } from "./strings";

export { Reply, type Question };
export type Message = Question | Reply;
export type Phase = "ready" | "loading" | "missing" | "unreachable";

/** How answers are to be made, as it is set now. */
export interface Asked {
  readonly preset: string | null; // the id of the one that this comes from, of a chat that is not begun yet
  wishes(): Wishes; // for a question that is sent now
  current(): Wishes;
  adopt(kept: KeptSettings | null): string; // what a chat keeps; returns what would be sent for it, as JSON
  refused(error: ApiError): boolean; // takes a refusal of what is set, and says whether it was one
}

const SOON_MS = 500;
const LATER_MS = 30_000;
const isRunning = (reply: Reply): boolean => reply.shown.status === "running";
const activeIn = ({ active_run_id, active_run_ids }: Chat): readonly string[] =>
  active_run_ids ?? (active_run_id === null ? [] : [active_run_id]);

/** What is sent beside the words of a question. Files that came with an import are not there to be sent. */
function beside(images: readonly string[], files: readonly MessageFile[]): { images?: readonly string[]; files?: string[] } {
  const ids = files.flatMap(({ id, status }) => (id !== null && status === "ready" ? [id] : []));
  return { ...(images.length > 0 && { images }), ...(ids.length > 0 && { files: ids }) };
}

export class Conversation {
  id = $state<string | null>(null);
  title = $state("");
  isPrivate = $state(false); // kept from models of other servers
  phase = $state<Phase>("ready");
  messages = $state.raw<readonly Message[]>([]);
  earlier = $state(0); // messages of the branch before these that are still to come
  announcement = $state(""); // what a screen reader says
  notice = $state("");
  begunHere = $state(false); // the chat shown began with a message that was sent from here
  /** Answers to the last question that stand side by side, until one is chosen. */
  comparing = $state.raw<readonly Reply[]>([]);
  #making = $state.raw<readonly Reply[]>([]); // the answers being made in this chat, in whichever branch
  readonly last = $derived(this.messages.at(-1));
  readonly running = $derived((this.last?.role === "assistant" && isRunning(this.last)) || this.comparing.some(isRunning));
  /** An answer being made in a branch that is not shown. */
  readonly elsewhere = $derived(
    this.#making.find(
      (reply) => isRunning(reply) && !this.messages.includes(reply) && !this.comparing.includes(reply),
    ) ?? null,
  );
  readonly busy = $derived(this.running || this.elsewhere !== null);
  #scope = new AbortController(); // ends when another chat is opened
  #known = new Map<string, Message>(); // by id, in every branch that was seen
  #keys = 0;
  #before: string | null = null; // the message before those shown, while that is still to come
  #kept = ""; // of how answers are made: what is kept with the chat, as it would be sent
  #told = ""; // the same, as the server said it last
  #keeping: Promise<void> = Promise.resolve();
  #later: (() => void) | null = null; // keeps what was changed by hand
  #timer = 0;

  /** `created` hears of a chat that a first message began, `changed` of one whose listing may have changed. */
  constructor(
    private readonly created: (chat: ChatSummary) => void,
    private readonly changed: () => void,
    private readonly asked: Asked,
  ) {}

  /** A chat will be opened: until then nothing is sent, and what is written is its draft. */
  expect(id: string): void {
    this.id = id;
    this.phase = "loading";
  }

  /** Is that chat still to be opened? */
  expects(id: string): boolean {
    return this.id === id && this.phase === "loading";
  }

  /** Show a chat, or an empty new one. An answer under way goes on without being watched. */
  async open(id: string | null): Promise<void> {
    const signal = this.#enter();
    this.id = id;
    this.title = "";
    this.isPrivate = false;
    this.messages = [];
    this.earlier = 0;
    this.#before = null;
    this.notice = "";
    this.begunHere = false;
    this.announcement = "";
    this.#making = [];
    this.comparing = [];
    this.#known.clear();
    this.#kept = this.#told = "";
    this.phase = id === null ? "ready" : "loading";
    if (id === null) return void this.asked.adopt(null);
    try {
      const chat = await getChat(id, signal, "last");
      this.#adopt(chat);
      this.#fill(chat, signal);
      if (this.earlier > 0) void idle().then(() => this.#readEarlier(id, signal)); // what is shown comes first
    } catch (error) {
      if (signal.aborted) return;
      this.phase = error instanceof ApiError && error.status === 404 ? "missing" : "unreachable";
    }
  }

  /** Ask, after what is shown, with several `ways` once in each. False when the words were not taken, and why is said. */
  async send(
    content: string,
    images: readonly string[] = [],
    files: readonly MessageFile[] = [],
    again: Attempt | null = null,
    ways: readonly RunWishes[] = [],
  ): Promise<boolean> {
    if (this.phase !== "ready") return false;
    if (this.busy || this.comparing.length > 0) {
      this.notice = this.busy ? strings.busyHere : strings.branch.chooseFirst;
      return false;
    }
    const { signal } = this.#scope;
    this.notice = "";
    const attempt = again ?? { key: newKey(), wishes: this.asked.wishes() };
    const [before, at] = [this.messages, this.id];
    const after = before.findLast((message) => message.id !== null);
    const question: Question = { role: "user", key: this.#key(), id: null, siblings: [], content, images, files };
    const reply = new Reply(this.#key(), content);
    if (ways.length === 0) reply.attempt = attempt; // several are asked for anew
    reply.wishes = ways[0] ?? null;
    this.messages = [...before, question, reply];
    this.announcement = strings.thinking;
    try {
      let { id } = this;
      if (id === null) {
        const chat = await createChat(this.isPrivate, attempt.wishes, this.asked.preset);
        id = chat.id;
        if (!signal.aborted) this.#took(attempt.wishes, chat);
        if (!signal.aborted && this.isPrivate !== chat.private) await changeChat(id, { private: this.isPrivate });
        if (!signal.aborted) {
          this.begunHere = true;
          this.id = id;
          this.created(chat);
        }
      } else if (again === null) await this.#keep(id, attempt.wishes, signal);
      const asked = { content, ...beside(images, files) };
      const place = after?.role === "assistant" ? { ...asked, parent_id: after.id } : asked;
      const started = await startRun(id, place, ways[0] ?? attempt.wishes, attempt.key);
      this.#begun(question, reply, started, signal);
      if (ways.length > 1) await this.#askOthers(id, started, reply, ways.slice(1), signal);
    } catch (error) {
      if (error instanceof ApiError && !signal.aborted && error.status >= 400 && error.status < 500) {
        this.messages = before;
        await this.#notTaken(error, signal);
        return false;
      }
      if (signal.aborted) keepDraft(placeOf(at), content); // another chat is shown by now
      reply.fail(failureOf(error));
      this.#announce(reply);
    }
    return true;
  }

  /** Ask a question in other words, in its place. False when that was not taken, and why is said. */
  async edit(question: Question, content: string): Promise<boolean> {
    const at = this.messages.indexOf(question);
    const parent = at > 0 ? (this.messages[at - 1]?.id ?? null) : this.#before;
    if (at < 0 || (at > 0 && parent === null)) return false;
    const edited: Question = { ...question, key: this.#key(), id: null, content };
    const place = { content, ...beside(question.images, question.files), parent_id: parent };
    return this.#branch(this.messages.slice(0, at), edited, [], place);
  }

  /** Answer a question once more, beside the answers that it has, if any. Returns as `edit` does. */
  async answer(question: Question): Promise<boolean> {
    const at = this.messages.indexOf(question);
    if (at < 0 || question.id === null) return false;
    const answers = this.messages[at + 1]?.siblings ?? [];
    return this.#branch(this.messages.slice(0, at), question, answers, { regenerate: question.id });
  }

  /** Make an answer again. Returns as `edit` does. */
  async again(reply: Reply): Promise<boolean> {
    const question = this.messages[this.messages.indexOf(reply) - 1];
    return question?.role === "user" && this.answer(question);
  }

  /** Show the branch that leads over a message. False when that could not be done, and why is said. */
  async show(messageId: string): Promise<boolean> {
    const { signal } = this.#scope;
    if (this.id === null) return false;
    this.notice = "";
    try {
      await changeChat(this.id, { leaf_id: messageId });
      const chat = await getChat(this.id, signal);
      if (signal.aborted) return false;
      this.#fill(chat, signal);
    } catch (error) {
      if (!signal.aborted) this.notice = failureOf(error).message;
      return false;
    }
    const shown = this.messages.find(({ id }) => id === messageId);
    if (shown !== undefined && shown.siblings.length > 1) {
      this.announcement = strings.branch.shown(shown.siblings.indexOf(messageId) + 1, shown.siblings.length);
    }
    return shown !== undefined;
  }

  /** Ask the others that are to answer a question that was begun. What is refused stands in its place. */
  async #askOthers(
    id: string, { question_id }: StartedRun, first: Reply, ways: readonly RunWishes[], signal: AbortSignal,
  ): Promise<void> {
    const others = ways.map((wishes) => Object.assign(new Reply(this.#key(), first.question), { wishes }));
    if (!signal.aborted) this.comparing = [first, ...others];
    for (const reply of others) {
      try {
        const place = { regenerate: question_id, compare: true } as const;
        const started = await startRun(id, place, reply.wishes ?? {}, newKey());
        reply.id = started.message_id;
        keepCompared(id, [first, ...others].flatMap((each) => each.id ?? [])); // at once: the page may be left
        if (signal.aborted) continue;
        this.messages = [...this.messages.slice(0, -1), reply]; // the chat's current branch ends with it
        void this.#watch(reply, started.run_id, signal);
      } catch (error) {
        reply.fail(failureOf(error));
      }
    }
  }

  /** Put answers to the last question side by side: those with the ids, or that are being made. */
  async #putBeside(id: string, ids: readonly string[] | null, signal: AbortSignal): Promise<void> {
    const [question, { last }] = [this.messages.at(-2), this];
    if (question?.role !== "user" || last?.role !== "assistant") return;
    const chat = await getChat(id, signal, "all").catch(() => null);
    if (chat === null || signal.aborted || this.last !== last) return;
    const wanted = ({ id: each, run_id }: StoredMessage): boolean =>
      ids === null ? chat.active_run_ids?.includes(run_id ?? "") === true : ids.includes(each);
    const stored = chat.messages.filter((message) => last.siblings.includes(message.id) && wanted(message));
    this.comparing = stored.map((each) => this.#replyOf(each, question.content, signal));
  }

  /** Answers to the last question, side by side: the newest of them. */
  async compare(ids: readonly string[]): Promise<void> {
    if (this.id === null) return;
    keepCompared(this.id, ids);
    await this.#putBeside(this.id, ids, this.#scope.signal);
  }

  /** Go on with one of the answers that stand side by side. False when that could not be done, and why is said. */
  async choose(reply: Reply): Promise<boolean> {
    const { id, comparing } = this;
    if (id === null || reply.id === null) return false;
    keepCompared(id, []);
    this.comparing = [];
    if (await this.show(reply.id)) return true;
    this.comparing = comparing;
    return false;
  }

  /** Show the branch that is being answered. */
  async showMaking(): Promise<void> {
    const { id: chatId, elsewhere } = this;
    if (elsewhere === null || chatId === null) return;
    const id = elsewhere.id ?? (await getChat(chatId, this.#scope.signal, "all").catch(() => null))?.messages
      .find(({ run_id }) => run_id === elsewhere.runId)?.id;
    if (id !== undefined) await this.show(id);
  }

  /** Take in what another tab has done, unless something is going on here. */
  async refresh(): Promise<void> {
    const { signal } = this.#scope;
    if (this.id === null || this.phase !== "ready" || this.running || this.#unsent) return;
    const told = this.#told;
    const chat = await getChat(this.id, signal).catch(() => null);
    if (chat === null || signal.aborted || this.running || this.#unsent) return;
    this.isPrivate = chat.private;
    if (told === this.#told) this.#adopt(chat); // else it was changed here meanwhile
    const [now, here] = [chat.messages.map(({ id }) => id), this.messages.map(({ id }) => id)];
    const active = activeIn(chat).some((run) => !this.#makes(run));
    if (active || now.join() !== here.join()) this.#fill(chat, signal);
  }

  /** Keep the chat from models of other servers, or let it go there again. One that is not begun yet begins so. */
  async keepPrivate(isPrivate: boolean): Promise<void> {
    const { signal } = this.#scope;
    const { id } = this;
    this.notice = "";
    try {
      if (id !== null) await changeChat(id, { private: isPrivate });
    } catch (error) {
      if (!signal.aborted) this.notice = strings.list.notDone(failureOf(error).message);
      return;
    }
    if (id !== null) this.changed();
    if (signal.aborted) return;
    this.isPrivate = isPrivate;
    this.announcement = isPrivate ? strings.remote.isPrivate : strings.remote.notPrivate;
  }

  async stop(): Promise<void> {
    const shown = this.last?.role === "assistant" ? [this.last] : [];
    await Promise.all((this.comparing.length > 0 ? this.comparing : shown).filter(isRunning).map((reply) => reply.stop()));
  }

  /** Ask the question of a failed answer again. Returns as `send` does. */
  async retry(reply: Reply): Promise<boolean> {
    if (this.busy) return true;
    if (!reply.unsent) return this.again(reply);
    const question = this.messages[this.messages.indexOf(reply) - 1];
    const { images, files } = question?.role === "user" ? question : { images: [], files: [] };
    this.messages = this.messages.slice(0, this.messages.indexOf(reply) - 1);
    return this.send(reply.question, images, files, reply.attempt); // perhaps the server has it, and its word got lost
  }

  get #unsent(): boolean {
    return this.last?.role === "assistant" && this.last.unsent;
  }

  /** Begin a branch with a question after `before`. It is shown once the server has taken it. */
  async #branch(before: readonly Message[], question: Question, answers: readonly string[], place: Place): Promise<boolean> {
    const { signal } = this.#scope;
    if (this.busy || this.id === null) {
      this.notice = strings.busyHere;
      return false;
    }
    this.notice = "";
    try {
      const { id } = this;
      const wishes = this.asked.wishes();
      await this.#keep(id, wishes, signal);
      const started = await startRun(id, place, wishes, newKey());
      if (signal.aborted) return true;
      const reply = new Reply(this.#key(), question.content);
      reply.siblings = answers;
      this.comparing = [];
      this.messages = [...before, question, reply];
      this.announcement = strings.thinking;
      this.#begun(question, reply, started, signal);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (!signal.aborted) await this.#notTaken(error, signal);
      return false;
    }
    return true;
  }

  /** What is set was changed by hand: it is kept with the chat that is shown, a moment later. */
  keepSoon(): void {
    const { id, phase } = this;
    if (id === null || phase !== "ready") return;
    const { signal } = this.#scope;
    const wishes = this.asked.current();
    this.#later = () => void this.#keep(id, wishes, signal).catch(() => undefined); // the next question says why not
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.keepNow(), SOON_MS);
  }

  /** Keep at once what `keepSoon` has been told. */
  keepNow(): void {
    clearTimeout(this.#timer);
    this.#later?.();
    this.#later = null;
  }

  /** Keep with a chat how its answers are made, unless it has that. Rejects where the server does not take it. */
  #keep(id: string, wishes: Wishes, signal: AbortSignal): Promise<void> {
    const kept = this.#keeping.catch(() => undefined).then(async () => {
      if (!signal.aborted && JSON.stringify(wishes) === this.#kept) return;
      const chat = await changeChat(id, { settings: wishes });
      if (!signal.aborted) this.#took(wishes, chat);
    });
    this.#keeping = kept;
    return kept;
  }

  #took(wishes: Wishes, { settings }: ChatSummary): void {
    this.#kept = JSON.stringify(wishes);
    this.#told = JSON.stringify(settings ?? null);
  }

  /** The server has taken a question, and answers it. */
  #begun(question: Question, reply: Reply, { run_id, message_id, question_id }: StartedRun, signal: AbortSignal): void {
    this.changed();
    if (signal.aborted) return;
    reply.id = message_id;
    reply.siblings = [...reply.siblings, message_id];
    const taken =
      question.id === question_id ? question : { ...question, id: question_id, siblings: [...question.siblings, question_id] };
    this.messages = this.messages.map((message) => (message === question ? taken : message));
    this.#known.set(question_id, taken);
    this.#known.set(message_id, reply);
    void this.#watch(reply, run_id, signal);
  }

  /** Say why nothing was begun. */
  async #notTaken(error: ApiError, signal: AbortSignal): Promise<void> {
    if (error.code === "chat_busy" || error.status === 409) {
      await this.open(this.id);
      this.notice = strings.busy;
      return;
    }
    const why = strings.notTaken(failureOf(error).message);
    if (this.asked.refused(error)) this.announcement = why;
    else if (!signal.aborted) this.notice = why;
  }

  async #watch(reply: Reply, runId: string, signal: AbortSignal): Promise<void> {
    this.#making = [...this.#making.filter(isRunning), reply];
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
    this.isPrivate = chat.private;
    this.phase = "ready";
    this.earlier = chat.earlier ?? 0;
    this.#before = chat.messages[0]?.parent_id ?? null;
    this.messages = this.#messagesOf(chat.messages, signal);
    const active = activeIn(chat);
    const compared = comparedIn(chat.id);
    const beside = compared === null ? active.length > 1 : compared.length > 1 && compared.includes(this.last?.id ?? "");
    if (beside) return void this.#putBeside(chat.id, compared, signal);
    this.comparing = [];
    for (const run of active) if (!this.#makes(run)) void this.#watch(new Reply(this.#key(), ""), run, signal);
  }

  #messagesOf(stored: readonly StoredMessage[], signal: AbortSignal): Message[] {
    let content = "";
    return stored.map((each) => {
      const { id, siblings = [] } = each;
      const known = this.#known.get(id);
      let message: Message;
      if (each.role === "user") {
        ({ content } = each);
        const { images = [], files = [] } = each;
        message = { role: "user", key: known?.key ?? this.#key(), id, siblings, content, images, files };
      } else message = this.#replyOf(each, content, signal);
      this.#known.set(id, message);
      return message;
    });
  }

  /** Read what came before the messages that are shown: again and again until it is there, or another chat is. */
  async #readEarlier(id: string, signal: AbortSignal): Promise<void> {
    for (let wait_ms = SOON_MS; this.earlier > 0; wait_ms = Math.min(2 * wait_ms, LATER_MS)) {
      const chat = await getChat(id, signal).catch(() => null);
      if (signal.aborted || this.earlier === 0) return;
      const at = chat?.messages.findIndex((message) => message.id === this.messages[0]?.id) ?? -1;
      if (chat !== null && at >= 0) {
        this.messages = [...this.#messagesOf(chat.messages.slice(0, at), signal), ...this.messages];
        this.earlier = 0;
        this.#before = null;
      } else if (chat !== null && !this.running && !this.#unsent) this.#fill(chat, signal); // another branch by now
      else await new Promise((resume) => setTimeout(resume, wait_ms));
      if (signal.aborted) return;
    }
  }

  #makes = (runId: string): boolean => this.#making.some((reply) => reply.runId === runId);

  /** An answer as it is known here, or from now on. */
  #replyOf(stored: StoredMessage, question: string, signal: AbortSignal): Reply {
    const { id, siblings = [], run_id: runId } = stored;
    const known = this.#known.get(id);
    const making = this.#making.find((reply) => reply.runId !== null && reply.runId === runId);
    let reply = known?.role === "assistant" ? known : making;
    if (reply !== undefined) Object.assign(reply, { id, siblings, question });
    else {
      reply = Reply.stored(this.#key(), question, stored, signal);
      if (runId !== null && stored.status === "running") void this.#watch(reply, runId, signal);
    }
    this.#known.set(id, reply);
    return reply;
  }

  /** Another device may have changed how answers are made here. */
  #adopt({ settings = null }: Chat): void {
    const told = JSON.stringify(settings);
    if (told === this.#told || this.#later !== null) return;
    this.#told = told;
    this.#kept = this.asked.adopt(settings);
  }

  #announce(reply: Reply): void {
    const { status, text, failure } = reply.shown;
    if (this.comparing.includes(reply)) this.announcement = this.running ? strings.branch.oneEnded : strings.branch.allEnded;
    else if (!this.messages.includes(reply)) this.announcement = strings.branch.ended;
    else if (status === "completed") this.announcement = strings.announceDone(text);
    else if (status === "cancelled") this.announcement = strings.announceStopped;
    else if (status === "failed") this.announcement = strings.announceFailed(failure?.message ?? "");
  }

  #enter(): AbortSignal {
    this.keepNow();
    this.#scope.abort();
    this.#scope = new AbortController();
    return this.#scope.signal;
  }

  #key(): string {
    this.#keys += 1;
    return `m${this.#keys}`;
  }
}
