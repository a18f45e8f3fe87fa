/** The part of the server's interface for notes about a person, typed. */
import { ApiError, get, post, request, send } from "../api";

export interface EarlierText {
  text: string;
  source: Source;
  changed_at: number;
  chat_id: string | null;
  message_id: string | null;
}

export type Source = "stated" | "tool" | "user";

export interface Note extends EarlierText {
  number: number;
  attribute: string | null;
  created_at: number;
  chat_title: string | null;
  earlier: EarlierText[]; // the newest first
}

export interface MemoryState {
  available: boolean; // on this server at all
  enabled: boolean; // by the person
  notes: Note[]; // the newest first
  limits: { notes: number; characters: number };
}

export const EXPORT_PATH = "/api/memory/export";
const notePath = (number: number): string => `/api/memory/${number}`;

export const getMemory = (): Promise<MemoryState> => get("/api/memory");

export async function enableMemory(enabled: boolean): Promise<MemoryState> {
  return (await (await send("PATCH", "/api/memory", { enabled })).json()) as MemoryState;
}

export async function addNote(text: string): Promise<void> {
  await post("/api/memory", { text });
}

export async function changeNote(number: number, text: string): Promise<void> {
  await send("PATCH", notePath(number), { text });
}

export async function eraseNote(number: number): Promise<void> {
  await request(notePath(number), { method: "DELETE" });
}

export async function eraseNotes(): Promise<void> {
  await request("/api/memory", { method: "DELETE" });
}

/** Takes a text back: the one before it holds again. One that is gone already is none to complain about. */
export async function takeBack(number: number, text: string): Promise<void> {
  try {
    await post(`${notePath(number)}/undo`, { text });
  } catch (error) {
    if (!(error instanceof ApiError && error.status === 404)) throw error;
  }
}
