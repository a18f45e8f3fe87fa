import type { RemoteSent } from "../../protocol";

/** What is said of the list of chats, of branches, and of models on other servers, in English. */
const number = new Intl.NumberFormat("en");
const many = (n: number, one: string, more: string): string => `${number.format(n)} ${n === 1 ? one : more}`;
const month = new Intl.DateTimeFormat("en", { month: "long", year: "numeric" });

export const branch = {
  version: (n: number, of: number) => `${n} / ${of}`,
  ofQuestion: (n: number, of: number) => `Version ${n} of ${of} of this question`,
  ofAnswer: (n: number, of: number) => `Version ${n} of ${of} of this answer`,
  earlier: "Earlier version",
  later: "Later version",
  shown: (n: number, of: number) => `Version ${n} of ${of}`,
  elsewhere: "Another branch of this chat is being answered.",
  goThere: "Show it",
  ended: "The answer in the other branch has ended.",
  edit: "Edit the question",
  editing: "Your question",
  save: "Ask again",
  cancel: "Cancel",
  again: "Answer again",
  answer: "Answer this",
  copyQuestion: "Copy the question",
  whole: "Show all",
  less: "Show less",
};

export const list = {
  search: "Search chats",
  found: (n: number) => (n === 0 ? "Nothing found" : many(n, "chat found", "chats found")),
  nothing: (query: string) => `No chat has “${query}” in its title or its messages.`,
  searchFailed: "The search did not work.",
  running: "is being answered",
  group: {
    pinned: "Pinned",
    today: "Today",
    yesterday: "Yesterday",
    week: "The last 7 days",
    month: "The last 30 days",
  },
  monthOf: (time: number) => month.format(time),
  more: (title: string) => `More for “${title}”`,
  ofAll: "More for all chats",
  loading: "Loading…",
  failed: "The chats could not be loaded.",
  rename: "Rename",
  renameOf: (title: string) => `New title of “${title}”`,
  pin: "Pin",
  unpin: "Unpin",
  move: "Move to a folder",
  noFolder: "No folder",
  share: "Save as a file",
  formats: { html: "Web page, to read", markdown: "Markdown, to read", json: "JSON, to import again" },
  remove: "Delete",
  newFolder: "New folder",
  folderName: "Name of the folder",
  folder: (name: string, n: number) => `${name}, ${many(n, "chat", "chats")}`,
  emptyFolder: "Drag chats here, or move them by their menu.",
  exportAll: "Export all chats",
  import: "Import chats…",
  back: "Back",
  deleted: (title: string) => `Deleted “${title}”`,
  folderDeleted: (name: string) => `Deleted the folder “${name}”; its chats stay`,
  undo: "Undo",
  undone: (title: string) => `“${title}” is back`,
  tooLate: "It cannot be taken back any more.",
  notDone: (why: string) => `That did not work. ${why}`,
  moved: (title: string, folder: string | null) =>
    folder === null ? `“${title}” is in no folder now` : `“${title}” is in “${folder}” now`,
  dismiss: "Dismiss",
  notices: "Notices",
  noJson: "This file is not JSON; accepted: a file that “Export all chats” or “Save as a file” made.",
  importing: "Importing…",
  imported: "Imported",
  importedAll: (chats: number, messages: number) =>
    `${many(chats, "chat", "chats")} with ${many(messages, "message", "messages")} came in.`,
  importedNone: "The file has no chats in it.",
  importedFolders: (names: readonly string[]) => `In folders: ${names.join(", ")}`,
  importedMore: (n: number) => `and ${many(n, "more", "more")}`,
  importRefused: "Nothing was imported",
  ok: "OK",
};

export const remote = {
  name: "Private",
  stays: "Private: keep this chat from other servers",
  about: "Nothing of a private chat is sent to a model of another server.",
  isPrivate: "Private: nothing of this chat is sent to a model of another server.",
  notPrivate: "This chat is not private any more.",
  elsewhere: "On another server, which gets the chat.",
  lastElsewhere: "The last one is on another server.",
  blocked: "Models of other servers get nothing of a private chat. To choose one, switch “Private” off first.",
  answered: (model: string) => `${model} answered, on another server`,
  sent: (model: string) => `Sent to ${model}, on another server`,
  what: ({ messages, characters, passages, tool_results: results }: Omit<RemoteSent, "type">) =>
    `It got ${many(messages, "message", "messages")} of ${many(characters, "character", "characters")} in all, with ${many(passages, "passage", "passages")} of documents and ${many(results, "result", "results")} of tools.`,
  because: (why: string) => `Why: ${why}.`,
};
