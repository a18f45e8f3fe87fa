/** What the model of an endless chat no longer sees, as its newest answer says. */
import type { Usage } from "../protocol";

interface Said {
  readonly role: "user" | "assistant";
  readonly id: string | null;
  readonly shown?: { readonly usage: Usage | null };
}

/** The message above which nothing is seen whole, the system prompt apart; null where all of the chat is. */
export function firstSeen<Message extends Said>(messages: readonly Message[]): Message | null {
  const answered = messages.filter(({ shown }) => shown?.usage != null);
  // One that was stopped does not say where: the one before it does.
  const telling = answered.findLast(({ shown }) => !shown?.usage?.forgotten_tokens || shown.usage.seen_from !== null);
  const usage = telling?.shown?.usage;
  if (telling === undefined || !usage?.forgotten_tokens) return null; // those of old have none
  return messages.find(({ id }) => id !== null && id === usage.seen_from) ?? (usage.seen_from === "" ? telling : null);
}
