/**
 * Words that were written and not sent, kept in this browser until they are: one draft a place, such as a chat. The
 * oldest go when there are too many. Knows nothing of where they are written.
 */
import { session } from "./session.svelte";

const PREFIX = "ponder.draft.";
const MOST = 50;

interface Kept {
  readonly words: string;
  readonly at: number; // ms
}

/** Where a message to a chat is written. A chat that is not there yet is each user's own. */
export const placeOf = (chatId: string | null): string => chatId ?? `${NEW}${session.me?.id ?? NOBODY}`;

const NEW = "new.";
const NOBODY = "local";

/** Is the other the same place, now that it is known who writes there? */
export const isNowOf = (place: string, other: string): boolean => place === NEW + NOBODY && other.startsWith(NEW);

export function draftOf(place: string): string {
  return read(PREFIX + place)?.words ?? "";
}

/** Keep words, or with none forget what was kept. */
export function keepDraft(place: string, words: string): void {
  try {
    if (words === "") return localStorage.removeItem(PREFIX + place);
    const kept = JSON.stringify({ words, at: Date.now() } satisfies Kept);
    forget(MOST - 1, PREFIX + place);
    try {
      localStorage.setItem(PREFIX + place, kept);
    } catch {
      forget(0, PREFIX + place); // no room: this one is being written now
      localStorage.setItem(PREFIX + place, kept);
    }
  } catch {
    // Storage may be forbidden; the words are there until the page is left.
  }
}

/** Forget all but the newest `most`, and one. */
function forget(most: number, except: string): void {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX) && key !== except);
  if (keys.length <= most) return;
  const newest = keys.map((key) => [key, read(key)?.at ?? 0] as const).sort((a, b) => b[1] - a[1]);
  for (const [key] of newest.slice(most)) localStorage.removeItem(key);
}

function read(key: string): Kept | null {
  try {
    const kept = JSON.parse(localStorage.getItem(key) ?? "null") as Partial<Kept> | null;
    return typeof kept?.words === "string" ? { words: kept.words, at: Number(kept.at) || 0 } : null;
  } catch {
    return null;
  }
}
