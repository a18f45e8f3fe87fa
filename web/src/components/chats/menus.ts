/** The menus of the list: what can be done with a chat, a folder, and all of them. Knows nothing of how it is done. */
import type { ChatSummary } from "../../lib/api";
import { exportPath, type Folder } from "../../lib/chats/api";
import { strings } from "../../lib/strings";
import type { MenuItem } from "../parts/Menu.svelte";

export interface Deeds {
  rename: (id: string) => void; // of a chat or a folder
  pin: (chat: ChatSummary) => void; // or unpin
  keepPrivate: (chat: ChatSummary) => void; // or not any more
  move: (chat: ChatSummary, folder: Folder | null) => void;
  share: (chat: ChatSummary) => void; // by a link
  remove: (chat: ChatSummary, erase?: boolean) => void; // erase: the notes that memory has from it, too
  removeFolder: (folder: Folder) => void;
  addFolder: (into: ChatSummary | null) => void; // and put a chat into it
  takeIn: () => void; // chats out of a file
}

/** `remotes`: there are models of other servers, which a chat may be kept from. */
export function ofChat(chat: ChatSummary, folders: readonly Folder[], remotes: boolean, deeds: Deeds): MenuItem[] {
  const { formats } = strings.list;
  const into = (folder: Folder | null): MenuItem => ({
    label: folder?.name ?? strings.list.noFolder,
    checked: chat.folder_id === (folder?.id ?? null),
    act: () => deeds.move(chat, folder),
  });
  return [
    { label: strings.list.rename, icon: "pencil", act: () => deeds.rename(chat.id) },
    { label: chat.pinned ? strings.list.unpin : strings.list.pin, icon: "pin", act: () => deeds.pin(chat) },
    ...(remotes || chat.private
      ? [{ label: strings.remote.name, icon: "lock", switched: chat.private, act: () => deeds.keepPrivate(chat) } as const]
      : []),
    {
      label: strings.list.move,
      icon: "folder",
      items: [
        ...[null, ...folders].map(into),
        { label: strings.list.newFolder, icon: "plus", act: () => deeds.addFolder(chat) },
      ],
    },
    {
      label: strings.list.share,
      icon: "file",
      items: (["html", "markdown", "json"] as const).map((format) => ({
        label: formats[format],
        href: exportPath(chat.id, format),
      })),
    },
    { label: strings.list.link, icon: "link", act: () => deeds.share(chat) },
    { label: strings.list.remove, icon: "bin", danger: true, act: () => deeds.remove(chat) },
    { label: strings.list.removeNotes, icon: "bin", danger: true, act: () => deeds.remove(chat, true) },
  ];
}

export const ofFolder = (folder: Folder, deeds: Deeds): MenuItem[] => [
  { label: strings.list.rename, icon: "pencil", act: () => deeds.rename(folder.id) },
  { label: strings.list.remove, icon: "bin", danger: true, act: () => deeds.removeFolder(folder) },
];

export const ofAll = (deeds: Deeds): MenuItem[] => [
  { label: strings.list.newFolder, icon: "folder", act: () => deeds.addFolder(null) },
  { label: strings.list.import, icon: "plus", act: () => deeds.takeIn() },
  { label: strings.list.exportAll, icon: "file", href: exportPath(null) },
];
