/** Every word the page says, in one place, so that another language is another file like this one. */
const number = new Intl.NumberFormat("en");
const seconds = (s: number): string => (s < 60 ? `${s.toFixed(1)} s` : `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`);
const count = (n: number, one: string, many: string): string => `${number.format(n)} ${n === 1 ? one : many}`;
const tokens = (n: number): string => count(n, "token", "tokens");

export const strings = {
  product: "Ponder",
  skip: "Skip to the message box",

  newChat: "New chat",
  chats: "Chats",
  openChats: "Open the list of chats",
  close: "Close",
  noChats: "Chats you begin will be listed here.",
  untitled: "Untitled chat",
  deleteChat: (title: string) => `Delete “${title}”`,
  confirmDelete: "Delete?",

  theme: { system: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" },

  welcome: "Ask, and watch it think.",
  starters: "Start with one of these",
  facts: (context: number) => `${number.format(context)} tokens of context`,

  message: "Message",
  placeholder: "Write a message",
  send: "Send",
  stop: "Stop",
  stopping: "Stopping…",
  hint: "Enter sends, Shift + Enter starts a new line, Esc stops",
  latest: "Jump to the latest",

  you: "You",
  conversation: "Conversation",
  thinking: "Thinking…",
  queued: (ahead: number) => `Waiting, ${count(ahead, "request", "requests")} ahead`,
  answering: "Answering…",
  thought: (s: number | null, n: number | null) =>
    ["Thought", s === null ? "" : ` for ${seconds(s)}`, n === null ? "" : ` · ${tokens(n)}`].join(""),
  trace: "What the model thought",
  seconds,

  copy: "Copy",
  copied: "Copied",
  copyAnswer: "Copy the answer",

  rate: (perSecond: number) => `${perSecond < 10 ? perSecond.toFixed(1) : number.format(Math.round(perSecond))} tokens/s`,
  firstToken: (s: number) => `first token in ${s < 1 ? `${Math.round(s * 1000)} ms` : seconds(s)}`,
  written: (n: number) => `${tokens(n)} out`,
  read: (n: number, cached: number) =>
    `${tokens(n)} in${cached > 0 ? ` (${number.format(cached)} from cache)` : ""}`,
  metrics: "Speed and size of this answer",

  stopped: "You stopped this answer.",
  cutShort: (limit: number | null) =>
    `The answer ends here because it reached its limit${limit === null ? "" : ` of ${tokens(limit)}`}.`,
  announceDone: (text: string) => `Answer: ${text}`,
  announceStopped: "Stopped.",
  announceFailed: (why: string) => `The answer failed. ${why}`,

  retry: "Retry",
  linkLost: "The connection was lost. Trying again…",
  tryNow: "Try now",
  unreachable: "The server cannot be reached. Is it running?",
  busy: "This chat is already being answered, perhaps in another tab.",
  restarted: "The server restarted while this answer was being written.",
  failed: "The answer could not be finished.",
  loading: "Loading the chat…",
  missing: "There is no such chat. It may have been deleted.",
};
