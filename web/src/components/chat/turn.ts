/** What can be done with one turn of a conversation, whichever it is. */
import type { Question, Reply } from "../../lib/conversation.svelte";

export interface Turn {
  readonly busy: boolean; // the chat is being answered, and takes nothing else
  say: (notice: string) => void;
  suggest: (words: string) => void; // puts them where messages are written, and sends nothing
  go: (path: string) => void; // to another place of the page
  edit: (question: Question, content: string) => Promise<boolean>; // false: not taken
  again: (reply: Reply) => void;
  answer: (question: Question) => void; // which has no answer
  isLast: (reply: Reply) => boolean;
  compare: (reply: Reply) => void; // with the newest other answers in its place
  show: (messageId: string, step: number) => void; // another message in its place, so many steps on
}
