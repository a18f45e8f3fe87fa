/** What is said of links to chats, in English. */
const moment = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeStyle: "short" });

export const en = {
  title: "Links to chats",
  about:
    "Whoever has a link can read the chat as it was when the link was made or updated, without signing in. Thinking, calls of tools and documents are not in it, but for the passages that answers cite.",
  forbidden: "This server's operator has forbidden links to chats.",
  make: "Make a link",
  makeFor: (title: string) => `Share “${title}”`,
  made: "The link was made. Its address is shown only now:",
  address: "Address of the link",
  copy: "Copy the address",
  none: "There are no links.",
  list: "Your links",
  at: (created: number, updated: number) =>
    updated > created
      ? `Made on ${moment.format(created * 1000)}, updated on ${moment.format(updated * 1000)}`
      : `Made on ${moment.format(created * 1000)}`,
  update: "Update",
  updateOf: (title: string) => `Update the link to “${title}”`,
  updated: (title: string) => `The link to “${title}” shows the chat as it is now.`,
  revoke: "Revoke",
  revokeOf: (title: string) => `Revoke the link to “${title}”`,
  revoked: "The link was revoked.",
  notDone: (why: string) => `That did not work. ${why}`,
};

export type ShareStrings = typeof en;
