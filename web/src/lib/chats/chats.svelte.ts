/**
 * The chats the server keeps, as they are listed: those of each folder that is open, and those of none, as far as
 * somebody has looked. Other tabs hear of what is changed here, and the other way round.
 */
import { changeChat, type ChatChange, type ChatSummary } from "../api";
import * as api from "./api";
import { NO_FOLDER, type Folder, type Kind, type Page } from "./api";

const PAGE = 60;
const MOST = 500; // the server gives at once
const LOOK_MS = 4_000; // between looks while something is being answered
const KEY = "ponder.folders";
const NOTHING: Page = { chats: [], next: null };

export class Chats {
  folders = $state.raw<readonly Folder[]>([]);
  state = $state<"loading" | "listed" | "failed">("loading");
  #pages = $state.raw<Readonly<Record<string, Page>>>({}); // by folder
  #opened = $state.raw<readonly string[]>(stored()); // folders
  #channel = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("ponder.chats");
  #timer = 0;
  #refreshing: Promise<void> | null = null;
  #again = false;

  /** `heard`: another tab has changed something. */
  constructor(heard: () => void = () => undefined) {
    this.#channel?.addEventListener("message", () => {
      if (!document.hidden) heard();
    });
  }

  /** The chats of a folder, or of none, as far as they are known. */
  of(folderId: string = NO_FOLDER): Page {
    return this.#pages[folderId] ?? NOTHING;
  }

  find(id: string | null): ChatSummary | undefined {
    return Object.values(this.#pages).flatMap(({ chats }) => chats).find((chat) => chat.id === id);
  }

  isOpen(folderId: string): boolean {
    return this.#opened.includes(folderId);
  }

  async setOpen(folderId: string, open: boolean): Promise<void> {
    this.#opened = [...this.#opened.filter((id) => id !== folderId), ...(open ? [folderId] : [])];
    try {
      localStorage.setItem(KEY, JSON.stringify(this.#opened));
    } catch {
      // Storage may be forbidden; folders stay as they are until the page is left.
    }
    if (open && this.#pages[folderId] === undefined) await this.#load(folderId).catch(() => undefined);
  }

  /** A list that cannot be fetched stays as it was. Calls that come meanwhile are one more look. */
  refresh(): Promise<void> {
    if (this.#refreshing !== null) {
      this.#again = true;
      return this.#refreshing;
    }
    this.#refreshing = this.#refresh().finally(() => {
      this.#refreshing = null;
      if (this.#again) {
        this.#again = false;
        void this.refresh();
      }
    });
    return this.#refreshing;
  }

  async #refresh(): Promise<void> {
    try {
      this.folders = await api.listFolders();
      const open = this.folders.filter(({ id }) => this.isOpen(id)).map(({ id }) => id);
      await Promise.all([NO_FOLDER, ...open].map((id) => this.#load(id)));
      this.#pages = Object.fromEntries(Object.entries(this.#pages).filter(([id]) => id === NO_FOLDER || open.includes(id)));
      this.state = "listed";
    } catch {
      if (this.state === "loading") this.state = "failed";
    }
    clearTimeout(this.#timer);
    const running = Object.values(this.#pages).some(({ chats }) => chats.some((chat) => chat.running));
    if (running) this.#timer = setTimeout(() => document.hidden || void this.refresh(), LOOK_MS);
  }

  /** Whether one waits for a person. */
  get waiting(): boolean {
    return Object.values(this.#pages).some(({ chats }) => chats.some((chat) => Boolean(chat.waiting_for)));
  }

  /** Further chats of a folder, or of none. */
  async more(folderId: string = NO_FOLDER): Promise<void> {
    const page = this.of(folderId);
    if (page.next === null) return;
    const { chats, next } = await api.listChats(folderId, PAGE, page.next);
    if (this.of(folderId) !== page) return; // it was read anew meanwhile
    this.#pages = { ...this.#pages, [folderId]: { chats: [...page.chats, ...chats], next } };
  }

  /** Something has changed, here: read it, and tell other tabs. */
  async changed(): Promise<void> {
    this.#channel?.postMessage(null);
    await this.refresh();
  }

  /** Throws ApiError where the server refuses. */
  async change(id: string, change: ChatChange): Promise<void> {
    await changeChat(id, change);
    await this.changed();
  }

  /** Delete it. Throws ApiError where the server refuses. */
  async remove(kind: Kind, id: string, erase = false): Promise<void> {
    await api.remove(kind, id, erase);
    await this.changed();
  }

  /** Take back a deletion. Throws ApiError where the server refuses. */
  async restore(kind: Kind, id: string): Promise<void> {
    await api.restore(kind, id);
    await this.changed();
  }

  /** An open folder of this name. Throws ApiError where the server refuses. */
  async addFolder(name: string): Promise<Folder> {
    const folder = await api.createFolder(name);
    await this.setOpen(folder.id, true);
    await this.changed();
    return folder;
  }

  /** Throws ApiError where the server refuses. */
  async renameFolder(id: string, name: string): Promise<void> {
    await api.renameFolder(id, name);
    await this.changed();
  }

  /** As many of a folder's chats as were known, and a page at least. */
  async #load(folderId: string): Promise<void> {
    const wanted = Math.max(PAGE, this.of(folderId).chats.length);
    let page = await api.listChats(folderId, Math.min(MOST, wanted), null);
    while (page.next !== null && page.chats.length < wanted) {
      const { chats, next } = await api.listChats(folderId, Math.min(MOST, wanted - page.chats.length), page.next);
      page = { chats: [...page.chats, ...chats], next };
    }
    this.#pages = { ...this.#pages, [folderId]: page };
  }
}

function stored(): readonly string[] {
  try {
    const kept: unknown = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(kept) ? kept.filter((id) => typeof id === "string") : [];
  } catch {
    return [];
  }
}
