/**
 * Files for a question that is being written: sent and read meanwhile, so that they are ready when it is. Each belongs to
 * the question, and so to its chat; none is in the library. Knows nothing of where they are shown.
 */
import { ApiError } from "../api";
import { said } from "../strings/documents";
import { deleteFile, getFile, type MessageFile } from "./api";
import type { Given } from "./files";
import { refusals } from "./refuse";
import { attach } from "./send";

export const MOST_FILES = 10; // of a question
const EVERY_MS = 300;

export class Attached {
  shown = $state.raw<MessageFile>({
    id: null, name: "", bytes: 0, status: "reading", error: null, document: null, media_type: null, pages: 0,
    characters: 0, faults: [],
  });
  sent = $state<number | null>(null); // bytes, while they go
  readonly #abort = new AbortController();

  constructor(readonly key: number, given: MessageFile | File, private readonly told: (file: MessageFile) => void) {
    if (given instanceof File) {
      this.shown = { ...this.shown, name: given.name, bytes: given.size };
      void this.#send(given);
    } else this.shown = given;
  }

  get reading(): boolean {
    return this.shown.status === "reading";
  }

  async #send(file: File): Promise<void> {
    const { signal } = this.#abort;
    this.sent = 0;
    try {
      this.shown = await attach(file, (bytes) => (this.sent = bytes), signal);
      this.sent = null;
      if (signal.aborted) return this.#delete();
      while (this.reading && this.shown.id !== null) {
        await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
        if (signal.aborted) return;
        this.shown = await getFile(this.shown.id);
      }
    } catch (error) {
      if (signal.aborted) return;
      const why = error instanceof ApiError ? error.message : "";
      this.sent = null;
      this.shown = { ...this.shown, status: "failed", error: said.failed(why) };
    }
    if (!signal.aborted) this.told(this.shown);
  }

  /** It is not to be sent after all. */
  drop(): void {
    this.#abort.abort();
    this.#delete();
  }

  /** A file that was sent with a question stays with it, whatever is asked here. */
  #delete(): void {
    if (this.shown.id !== null) void deleteFile(this.shown.id).catch(() => undefined);
  }
}

export class Attachments {
  list = $state.raw<readonly Attached[]>([]);
  readonly reading = $derived(this.list.some((each) => each.reading));
  #keys = 0;

  /** `say` is told why a file cannot be added or read. */
  constructor(private readonly say: (notice: string) => void) {}

  /** Adds files, and says why some cannot be. `most`: bytes of an upload. */
  add(given: readonly Given[], most: number | null): void {
    const why = refusals(given, most);
    const good = given.filter((_, i) => why[i] === null).map(({ file }) => file);
    const bad = given.findIndex((_, i) => why[i] !== null);
    const room = Math.max(0, MOST_FILES - this.list.length);
    this.list = [...this.list, ...good.slice(0, room).map((file) => this.#made(file))];
    const refusal = why[bad];
    if (good.length > room) this.say(said.mostFiles(MOST_FILES));
    else if (refusal) this.say(said.notAttached(given[bad]?.name ?? "", said.why(refusal, most)));
  }

  /** Files that were not taken, before those that have been added since. */
  giveBack(files: readonly MessageFile[]): void {
    this.list = [...files.map((file) => this.#made(file)), ...this.list];
  }

  remove(file: Attached): void {
    file.drop();
    this.list = this.list.filter((each) => each !== file);
  }

  /** What stands against sending them now; null where nothing does. */
  get against(): string | null {
    const bad = this.list.find(({ shown }) => shown.status === "failed" || shown.status === "missing");
    return bad === undefined ? null : said.takeAway(bad.shown.name);
  }

  /** They go with a question. */
  take(): readonly MessageFile[] {
    const taken = this.list.map(({ shown }) => shown);
    this.list = [];
    return taken;
  }

  clear(): void {
    for (const each of this.list) each.drop();
    this.list = [];
  }

  #made(given: MessageFile | File): Attached {
    return new Attached((this.#keys += 1), given, (file) => {
      if (file.status === "failed") this.say(said.notAttached(file.name, file.error ?? ""));
    });
  }
}
