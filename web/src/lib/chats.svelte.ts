/** The list of chats the server keeps, newest first. */
import { deleteChat, listChats, type ChatSummary } from "./api";

export class Chats {
  list = $state.raw<ChatSummary[]>([]);

  /** A list that cannot be fetched stays as it was: the conversation itself says when the server is gone. */
  async refresh(): Promise<void> {
    this.list = await listChats().catch(() => this.list);
  }

  async remove(id: string): Promise<void> {
    await deleteChat(id).catch(() => undefined);
    await this.refresh();
  }
}
