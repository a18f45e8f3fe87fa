/** Which chat the address names: `/c/{id}`, or none. */
export function chatIdOf(pathname: string): string | null {
  const id = /^\/c\/([^/]+)\/?$/.exec(pathname)?.[1];
  return id === undefined ? null : decodeURIComponent(id);
}

export const pathOf = (chatId: string | null): string => (chatId === null ? "/" : `/c/${encodeURIComponent(chatId)}`);
