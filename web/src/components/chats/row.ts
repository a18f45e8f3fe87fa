/** What a row of the list knows and can do, whichever it is. */
import type { ChatSummary } from "../../lib/api";
import type { Folder, Kind } from "../../lib/chats/api";

export const DRAGGED = "application/x-ponder-chat"; // a chat's id

export interface Row {
  readonly current: string | null; // the chat that is shown
  readonly renaming: string | null; // the chat or folder whose name is being written
  follow: (event: MouseEvent, path: string) => void;
  menu: (anchor: HTMLElement, of: ChatSummary | Folder) => void;
  rename: (kind: Kind, id: string, name: string) => Promise<string | null>;
  renamed: (kind: Kind, id: string) => void; // its name is written no more
  dropped: (chatId: string, folder: Folder | null) => void;
}
