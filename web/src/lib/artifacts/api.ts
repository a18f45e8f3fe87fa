/** The part of the server's interface for files that tools made, typed. */
import { chatPath, get, request } from "../api";
import type { ToolArtifact } from "../protocol";

export interface ArtifactVersion extends ToolArtifact {
  created_at: number; // seconds since the epoch
}

/** How a file is shown: by the page itself, or in a frame of an origin of its own. */
export type Showing = "table" | "text" | "frame" | "none";

export const APP_TYPE = "text/html;profile=mcp-app"; // an MCP app's document, as the server keeps it

const FRAMED = /^(text\/html|image\/(svg\+xml|png|jpeg|gif|webp))$/;
const TABLES = new Set(["text/csv", "text/tab-separated-values"]);
const MOST_TEXT = 1 << 20; // bytes that the page reads

export function showingOf({ media_type: type, size }: ToolArtifact): Showing {
  if (FRAMED.test(type)) return "frame";
  if (size > MOST_TEXT) return "none";
  if (TABLES.has(type)) return "table";
  return type.startsWith("text/") || type === "application/json" ? "text" : "none";
}

export const filePath = (id: string): string => `/api/artifacts/${encodeURIComponent(id)}`;
export const previewPath = (id: string): string => `${filePath(id)}/preview`;

/** All versions of a name in a chat, the newest first. */
export async function versionsOf(chatId: string, name: string): Promise<ArtifactVersion[]> {
  const { artifacts } = await get<{ artifacts: ArtifactVersion[] }>(`${chatPath(chatId)}/artifacts`);
  return artifacts.filter((each) => each.name === name).sort((one, other) => other.version - one.version);
}

export const readText = async (id: string): Promise<string> => (await request(filePath(id))).text();
