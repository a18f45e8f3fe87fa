/**
 * What a person does to chats and folders, and how they hear of it: a notice that can take it back, or why the server
 * refused. Knows nothing of menus.
 */
import { ApiError, type ChatSummary } from "../api";
import { strings } from "../strings";
import type { Toasts } from "../toasts.svelte";
import type { Folder, Kind } from "./api";
import type { Chats } from "./chats.svelte";

export class Actions {
  /** `gone` hears of a chat that was deleted, and gives what is to happen when it is back. */
  constructor(
    private readonly chats: Chats,
    private readonly toasts: Toasts,
    private readonly gone: (id: string) => () => void,
  ) {}

  /** The refusal, or null. */
  async rename(kind: Kind, id: string, name: string): Promise<string | null> {
    return why(kind === "chat" ? this.chats.change(id, { title: name }) : this.chats.renameFolder(id, name));
  }

  /** Make a folder, and put a chat into it. The refusal, or null. */
  async addFolder(name: string, chat: ChatSummary | null): Promise<string | null> {
    let folder: Folder | null = null;
    const refused = await why(this.chats.addFolder(name).then((made) => (folder = made)));
    if (refused === null && chat !== null && folder !== null) await this.move(chat, folder);
    return refused;
  }

  pin(chat: ChatSummary, pinned: boolean): Promise<void> {
    return this.#tell(this.chats.change(chat.id, { pinned }));
  }

  keepPrivate(chat: ChatSummary, isPrivate: boolean): Promise<void> {
    return this.#tell(this.chats.change(chat.id, { private: isPrivate }));
  }

  async move(chat: ChatSummary, folder: Folder | null): Promise<void> {
    const before = chat.folder_id;
    if (before === (folder?.id ?? null)) return;
    const done = this.chats.change(chat.id, { folder_id: folder?.id ?? null }).then(() => {
      const back = (): Promise<void> => this.#tell(this.chats.change(chat.id, { folder_id: before }));
      this.toasts.say(strings.list.moved(chat.title || strings.untitled, folder?.name ?? null), back);
    });
    await this.#tell(done);
  }

  /** `erase`: the notes that memory has from the chat, too. */
  async remove(chat: ChatSummary, erase = false): Promise<void> {
    const title = chat.title || strings.untitled;
    await this.#tell(
      this.chats.remove("chat", chat.id, erase).then(() => {
        const back = this.gone(chat.id);
        this.toasts.say(strings.list.deleted(title), () => this.#restore("chat", chat.id, title, back));
      }),
    );
  }

  async removeFolder({ id, name }: Folder): Promise<void> {
    await this.#tell(
      this.chats.remove("folder", id).then(() => {
        this.toasts.say(strings.list.folderDeleted(name), () => this.#restore("folder", id, name, () => undefined));
      }),
    );
  }

  async #restore(kind: Kind, id: string, name: string, back: () => void): Promise<void> {
    try {
      await this.chats.restore(kind, id);
    } catch (error) {
      const late = error instanceof ApiError && error.status === 404;
      return this.toasts.say(late ? strings.list.tooLate : strings.list.notDone(reason(error)), null, true);
    }
    this.toasts.say(strings.list.undone(name));
    back();
  }

  async #tell(done: Promise<unknown>): Promise<void> {
    const refused = await why(done);
    if (refused !== null) this.toasts.say(strings.list.notDone(refused), null, true);
  }
}

/** Why something was refused, or null where it was not. */
async function why(done: Promise<unknown>): Promise<string | null> {
  try {
    await done;
    return null;
  } catch (error) {
    return reason(error);
  }
}

function reason(error: unknown): string {
  if (!(error instanceof ApiError)) throw error;
  return error.message || strings.unreachable;
}
