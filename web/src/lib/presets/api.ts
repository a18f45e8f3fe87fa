/** The server's HTTP interface for presets and prompts. */
import { get, post, request, send, type KeptSettings, type Wishes } from "../api";

/** How a chat may begin. */
export interface Preset {
  readonly id: string;
  readonly name: string;
  readonly icon: string | null;
  readonly description: string;
  readonly settings: KeptSettings;
  readonly owner: string;
  readonly role: "owner" | "reader";
  readonly everybody: boolean; // all users see it
  readonly members: readonly string[]; // who else sees it; told to the owner
}

export interface PresetFields {
  name: string;
  icon: string | null;
  description: string;
  settings: Wishes;
}

/** A text with a short name, to ask again. */
export interface Prompt {
  readonly id: string;
  readonly name: string;
  readonly text: string;
}

export const EXPORT_PATH = "/api/presets/export";
const presetPath = (id: string): string => `/api/presets/${encodeURIComponent(id)}`;
const promptPath = (id: string): string => `/api/prompts/${encodeURIComponent(id)}`;
const memberPath = (id: string, user: string): string => `${presetPath(id)}/members/${encodeURIComponent(user)}`;

export async function getPresets(): Promise<readonly Preset[]> {
  return (await get<{ presets: Preset[] }>("/api/presets")).presets;
}

export async function getPrompts(): Promise<readonly Prompt[]> {
  return (await get<{ prompts: Prompt[] }>("/api/prompts")).prompts;
}

/** Makes one, or changes the one of this id. */
export const keepPreset = (id: string | null, fields: Partial<PresetFields & { everybody: boolean }>): Promise<Response> =>
  id === null ? post("/api/presets", fields) : send("PATCH", presetPath(id), fields);

export const keepPrompt = (id: string | null, fields: Omit<Prompt, "id">): Promise<Response> =>
  id === null ? post("/api/prompts", fields) : send("PATCH", promptPath(id), fields);

export const deletePreset = (id: string): Promise<Response> => request(presetPath(id), { method: "DELETE" });
export const deletePrompt = (id: string): Promise<Response> => request(promptPath(id), { method: "DELETE" });
export const sharePreset = (id: string, user: string): Promise<Response> => request(memberPath(id, user), { method: "PUT" });
export const unsharePreset = (id: string, user: string): Promise<Response> => request(memberPath(id, user), { method: "DELETE" });

export function importFile(text: string): Promise<Response> {
  const headers = { "content-type": "application/json" };
  return request("/api/presets/import", { method: "POST", headers, body: text });
}
