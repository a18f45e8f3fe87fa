/** The server's HTTP interface for lists of chats: folders, search, deletion and files. */
import { chatPath, get, post, request, send, type ChatSummary } from "../api";

export const NO_FOLDER = "none";

export interface Page {
  chats: ChatSummary[];
  next: string | null; // where the list goes on
}

export interface Folder {
  id: string;
  name: string;
  chats: number;
}

/** A chat that was found; `message_id` is null where its title was. `marks` are places in the snippet. */
export interface Found {
  chat_id: string;
  title: string;
  message_id: string | null;
  snippet: string;
  marks: { start: number; end: number }[];
}

export type Format = "html" | "markdown" | "json";

const folderPath = (id: string): string => `/api/folders/${encodeURIComponent(id)}`;

/** The chats of a folder, or those of none. */
export function listChats(folderId: string, limit: number, before: string | null): Promise<Page> {
  const query = new URLSearchParams({ folder_id: folderId, limit: String(limit) });
  if (before !== null) query.set("before", before);
  return get(`/api/chats?${query}`);
}

export async function searchChats(query: string, signal: AbortSignal): Promise<Found[]> {
  const found = await get<{ results: Found[] }>(`/api/chats/search?${new URLSearchParams({ q: query, limit: "50" })}`, signal);
  return found.results;
}

export async function listFolders(): Promise<Folder[]> {
  return (await get<{ folders: Folder[] }>("/api/folders")).folders;
}

export async function createFolder(name: string): Promise<Folder> {
  return (await (await post("/api/folders", { name })).json()) as Folder;
}

export const renameFolder = (id: string, name: string): Promise<Response> => send("PATCH", folderPath(id), { name });

const pathOf = { chat: chatPath, folder: folderPath };
export type Kind = keyof typeof pathOf;

/** Until when it may come back, in seconds since the epoch. `erase`: notes that memory has from a chat go with it. */
export async function remove(kind: Kind, id: string, erase = false): Promise<number> {
  const response = await request(`${pathOf[kind](id)}${erase ? "?notes=erase" : ""}`, { method: "DELETE" });
  return ((await response.json()) as { restorable_until: number }).restorable_until;
}

export const restore = (kind: Kind, id: string): Promise<Response> => post(`${pathOf[kind](id)}/restore`, {});

export const exportPath = (id: string | null, format: Format = "json"): string =>
  id === null ? "/api/chats/export" : `${chatPath(id)}/export?format=${format}`;

/** The chats that a file brought, and those of it that were there already, by their place in it. */
export interface Imported {
  readonly chat_ids: readonly string[];
  readonly known: readonly { readonly position: number; readonly chat_id: string }[];
}

export async function importChats(file: string): Promise<Imported> {
  const headers = { "content-type": "application/json" };
  const response = await request("/api/chats/import", { method: "POST", headers, body: file });
  return (await response.json()) as Imported;
}
