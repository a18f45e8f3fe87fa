import type { Source } from "../../memory/api";

/** What is said of memory, in English. */
const day = new Intl.DateTimeFormat("en", { dateStyle: "medium" });
const number = new Intl.NumberFormat("en");
const count = (n: number): string => (n === 1 ? "1 note" : `${number.format(n)} notes`);
const sources: Record<Source, string> = {
  stated: "from your message",
  tool: "kept by the model",
  user: "written by you",
};

export const en = {
  title: "Memory",
  about: "Notes about you that later chats may use. Private chats neither read nor add any.",
  notHere: "This server keeps no notes. Its operator has switched memory off.",
  use: "Remember things about me across chats",
  add: "Add a note",
  newNote: "New note",
  save: "Save",
  cancel: "Cancel",
  none: "Nothing is remembered.",
  count,
  change: (text: string) => `Change “${text}”`,
  erase: (text: string) => `Erase “${text}”`,
  changed: "Note",
  eraseAll: "Erase all notes",
  reallyAll: (n: number) => `Erase ${n === 1 ? "the note" : `all ${count(n)}`}? This cannot be undone.`,
  yesAll: "Erase all",
  export: "Export notes",
  from: (source: Source, at: number) => `${sources[source]}, ${day.format(at * 1000)}`,
  chat: (title: string) => `From “${title}”`,
  chatGone: "The chat is gone.",
  earlier: (n: number) => (n === 1 ? "1 earlier text" : `${number.format(n)} earlier texts`),
  notDone: (why: string) => `That did not work. ${why}`,

  kept: "Remembered for later chats:",
  instead: (text: string) => `instead of “${text}”`,
  full: "There is no room for more notes. Erase some in Memory.",
  undo: "Undo",
  undoOf: (text: string) => `Undo: ${text}`,
  undone: "Taken back.",
  notUndone: "It could not be taken back. Try again.",
};

export type MemoryStrings = typeof en;
