/** The part of the server's interface for links to chats, typed. */
import { chatPath, get, post, request } from "../api";

export interface Share {
  id: string;
  chat_id: string;
  title: string;
  created_at: number;
  updated_at: number;
}

export const getShares = (): Promise<{ allowed: boolean; shares: Share[] }> => get("/api/shares");

/** Makes a link; its address is told this once. */
export async function shareChat(chatId: string): Promise<string> {
  const { path } = (await (await post(`${chatPath(chatId)}/share`, {})).json()) as { path: string };
  return location.origin + path;
}

export async function updateShare(id: string): Promise<void> {
  await post(`/api/shares/${encodeURIComponent(id)}/update`, {});
}

export async function revokeShare(id: string): Promise<void> {
  await request(`/api/shares/${encodeURIComponent(id)}`, { method: "DELETE" });
}
