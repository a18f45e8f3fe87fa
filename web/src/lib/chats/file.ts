/** A file of chats, read back in: what is in it, and its way to the server, which checks it. */
import { ApiError } from "../api";
import { strings } from "../strings";
import { importChats } from "./api";

export interface Report {
  readonly ids: readonly string[]; // of the chats that came in, as are those below
  readonly titles: readonly string[];
  readonly messages: number;
  readonly folders: readonly string[];
  readonly known: number; // chats that were here already
  readonly refusal: string | null; // why nothing came in
}

const NOTHING: Report = { ids: [], titles: [], messages: 0, folders: [], known: 0, refusal: null };

interface Exported {
  title?: string;
  folder?: string | null;
  messages?: unknown[];
}

export async function takeIn(file: Blob): Promise<Report> {
  const text = await file.text();
  let chats: Exported[];
  try {
    const whole = JSON.parse(text) as { chats?: unknown } | null;
    chats = Array.isArray(whole?.chats) ? (whole.chats as Exported[]) : [];
  } catch {
    return { ...NOTHING, refusal: strings.list.noJson };
  }
  try {
    const { chat_ids: ids, known } = await importChats(text);
    const here = new Set(known.map(({ position }) => position));
    const added = chats.filter((_, position) => !here.has(position));
    return {
      ids,
      titles: added.map(({ title }) => title || strings.untitled),
      messages: added.reduce((sum, { messages }) => sum + (messages?.length ?? 0), 0),
      folders: [...new Set(added.flatMap(({ folder }) => folder ?? []))],
      known: known.length,
      refusal: null,
    };
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    return { ...NOTHING, refusal: error.message || strings.unreachable };
  }
}
