/**
 * Files on their way to being documents: sent one or two at a time, then read by the server, whose jobs say how far they
 * are. What the server has goes on without the page; after a reload of the tab its jobs are shown again.
 */
import { ApiError } from "../api";
import { cancelJob, getDocument, getJob, runningJobs, type Fault, type FileStatus, type Job } from "./api";
import { Pace } from "./pace";
import { send } from "./send";

export type Stage = "waiting" | "sending" | FileStatus;

const KEY = "ponder.uploads"; // also known to the frame of the page, which loads this where there is something
const AT_ONCE = 2; // files sent side by side
const ASKED = 3; // jobs asked after in one go: the server works them off one after the other
const EVERY_MS = 400;
const OVER: readonly Stage[] = ["done", "unchanged", "failed", "cancelled"];

/** What a tab keeps of an upload. */
interface Kept {
  readonly job: string;
  readonly name: string;
  readonly shelf: number;
}

export class Upload {
  stage = $state<Stage>("waiting");
  sent = $state(0); // bytes
  chunks = $state(0);
  embedded = $state(0);
  error = $state<string | null>(null); // in the server's words; empty: it could not be reached
  faults = $state.raw<readonly Fault[]>([]);
  document = $state<number | null>(null);
  replaced = $state(false); // the document of an earlier file of this name
  bytes = $state(0);
  cancelling = $state(false);
  job: string | null = null;
  readonly abort = new AbortController();
  readonly over = $derived(OVER.includes(this.stage));

  constructor(
    readonly key: number,
    readonly name: string,
    readonly shelf: number,
    readonly file: File | null, // null: it was sent before a reload
  ) {
    this.bytes = file?.size ?? 0;
  }

  /** How much of the server's work on it is done, 0 to 1. */
  get share(): number {
    return this.stage === "done" ? 1 : this.stage === "embedding" && this.chunks > 0 ? this.embedded / this.chunks : 0;
  }

  take(job: Job): void {
    this.job = job.id;
    const [file] = job.files;
    if (file === undefined) return;
    this.bytes = file.bytes || this.bytes;
    this.chunks = file.chunks;
    this.embedded = file.embedded;
    this.faults = file.faults;
    this.document = file.document;
    this.error = file.error ?? job.stalled;
    this.stage = job.stalled === null ? file.status : "failed";
  }
}

export class Uploads {
  list = $state<Upload[]>([]);
  heard = $state.raw<{ upload: Upload } | null>(null); // what ended last, for a screen reader
  ended = $state(0); // counts up, so that lists know when to look again
  readonly busy = $derived(this.list.some((upload) => !upload.over));
  readonly sending = $derived(this.list.some(({ stage }) => stage === "waiting" || stage === "sending"));
  #sent = new Pace(); // bytes
  #worked = new Pace(); // bytes
  #keys = 0;
  #polling = false;
  #resuming: Promise<void> | null = null;

  /** Send files to a shelf. Returns their uploads. */
  add(files: readonly File[], shelf: number): readonly Upload[] {
    const added = files.map((file) => new Upload((this.#keys += 1), file.name, shelf, file));
    this.list = [...this.list.filter((upload) => !upload.over || upload.stage === "failed"), ...added];
    this.#pump();
    return added;
  }

  /** Resolves when the server is done with an upload, whatever became of it. */
  whenOver(upload: Upload): Promise<void> {
    return new Promise((resolve) => {
      const stop = $effect.root(() => {
        $effect(() => {
          if (!upload.over) return;
          resolve();
          queueMicrotask(() => stop());
        });
      });
    });
  }

  /** Take up what the server is doing, after a reload. */
  resume(): Promise<void> {
    this.#resuming ??= this.#resume().finally(() => (this.#resuming = null));
    return this.#resuming;
  }

  async #resume(): Promise<void> {
    const kept = load();
    const running = await runningJobs().catch(() => []);
    for (const id of new Set([...kept.map(({ job }) => job), ...running])) {
      if (this.list.some(({ job }) => job === id)) continue;
      const job = await getJob(id).catch(() => null);
      const [file] = job?.files ?? [];
      if (job === null || file === undefined) continue;
      const upload = new Upload((this.#keys += 1), file.source, job.collection, null);
      upload.sent = file.bytes;
      upload.take(job);
      this.list = [...this.list, upload];
    }
    this.#keep();
    void this.#poll();
  }

  async cancel(upload: Upload): Promise<void> {
    if (upload.over) return;
    upload.cancelling = true;
    upload.abort.abort();
    if (upload.stage === "waiting") upload.stage = "cancelled";
    else if (upload.job !== null) await cancelJob(upload.job).catch(() => (upload.cancelling = false));
  }

  cancelAll(): void {
    for (const upload of this.list) void this.cancel(upload);
  }

  /** Send a file again. */
  retry(upload: Upload): void {
    const { file, shelf } = upload;
    if (file === null) return;
    const again = new Upload((this.#keys += 1), file.name, shelf, file);
    this.list = this.list.map((each) => (each === upload ? again : each));
    this.#pump();
  }

  dismiss(upload: Upload): void {
    this.list = this.list.filter((each) => each !== upload);
    this.#keep();
  }

  /** Forgets what was added and needs no look: there was nothing wrong with it. */
  settle(): void {
    const told = ({ stage, faults }: Upload): boolean => (stage === "done" || stage === "unchanged") && faults.length === 0;
    this.list = this.list.filter((upload) => !told(upload));
    this.#keep();
  }

  /** Forget all that is over. */
  clear(): void {
    this.list = this.list.filter((upload) => !upload.over);
    this.#keep();
  }

  /** Seconds until all of it is read, or only this; null as long as nobody knows. */
  secondsLeft(of: readonly Upload[] = this.list): number | null {
    const going = of.filter((upload) => !upload.over);
    const toSend = going.reduce((sum, { file, bytes, sent }) => sum + (file === null ? 0 : bytes - sent), 0);
    const toWork = going.reduce((sum, { bytes, share }) => sum + bytes * (1 - share), 0);
    const sending = toSend > 0 ? this.#sent.left(toSend) : 0;
    const working = this.#worked.left(toWork);
    return sending === null || working === null ? null : Math.max(sending, working);
  }

  #pump(): void {
    const sending = this.list.filter(({ stage }) => stage === "sending").length;
    for (const upload of this.list.filter(({ stage }) => stage === "waiting").slice(0, AT_ONCE - sending)) {
      void this.#send(upload);
    }
  }

  async #send(upload: Upload): Promise<void> {
    const { file } = upload;
    if (file === null) return;
    upload.stage = "sending";
    let since = performance.now();
    const sent = (bytes: number): void => {
      const now = performance.now();
      this.#sent.add(bytes - upload.sent, (now - since) / 1000);
      upload.sent = bytes;
      since = now;
    };
    try {
      upload.take(await send(file, upload.shelf, sent, upload.abort.signal));
      this.list = this.list.filter((each) => each === upload || each.job !== upload.job); // it was taken up meanwhile
      if (upload.cancelling && upload.job !== null) await cancelJob(upload.job).catch(() => undefined);
    } catch (error) {
      if (error instanceof ApiError) upload.error = error.message;
      upload.stage = error instanceof ApiError ? "failed" : "cancelled";
      this.#end(upload);
    }
    this.#keep();
    this.#pump();
    void this.#poll();
  }

  /** Ask after jobs until all are over. */
  async #poll(): Promise<void> {
    if (this.#polling) return;
    this.#polling = true;
    let since = performance.now();
    for (;;) {
      const going = this.list.filter((upload) => upload.job !== null && !upload.over);
      if (going.length === 0) break;
      const before = going.map(({ bytes, share }) => bytes * share);
      await Promise.all(going.slice(0, ASKED).map((upload) => this.#ask(upload)));
      const now = performance.now();
      const done = going.reduce((sum, { bytes, share }, i) => sum + bytes * share - (before[i] ?? 0), 0);
      this.#worked.add(done, (now - since) / 1000);
      since = now;
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    }
    this.#polling = false;
  }

  async #ask(upload: Upload): Promise<void> {
    if (upload.job === null) return;
    try {
      upload.take(await getJob(upload.job));
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 404) return; // away for now: it is asked again
      upload.stage = "failed";
      upload.error = error.message;
    }
    if (upload.stage === "done" && upload.document !== null) {
      const document = await getDocument(upload.document).catch(() => null);
      upload.replaced = document !== null && document.updated_at > document.created_at;
    }
    if (upload.over) this.#end(upload);
  }

  #end(upload: Upload): void {
    this.heard = { upload };
    this.ended += 1;
    this.#keep();
  }

  #keep(): void {
    const kept = this.list.flatMap(({ job, name, shelf }): Kept[] => (job === null ? [] : [{ job, name, shelf }]));
    try {
      if (kept.length > 0) sessionStorage.setItem(KEY, JSON.stringify(kept));
      else sessionStorage.removeItem(KEY);
    } catch {
      // Storage may be forbidden; the jobs are on the server all the same.
    }
  }
}

function load(): Kept[] {
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEY) ?? "[]") as Kept[];
    return Array.isArray(kept) ? kept.filter(({ job }) => typeof job === "string") : [];
  } catch {
    return [];
  }
}

export const uploads = new Uploads();

// Only here are files whole that are still being sent.
addEventListener("beforeunload", (event) => {
  if (uploads.sending) event.preventDefault();
});
