/** What an address of the page names: a chat (`/c/{id}`), a new chat (`/`), or one of the page's other parts. */
export interface Place {
  readonly page: string | null; // null: the conversation
  readonly rest: readonly string[]; // what follows: `/documents/7` has ["7"]
}

export function placeOf(pathname: string): Place {
  const [page, ...rest] = pathname.split("/").filter(Boolean).map(decode);
  return page === undefined || page === "c" ? { page: null, rest } : { page, rest };
}

export const chatIdOf = ({ page, rest }: Place): string | null => (page === null ? (rest[0] ?? null) : null);
export const pathOf = (chatId: string | null): string => (chatId === null ? "/" : `/c/${encodeURIComponent(chatId)}`);

/** Go to a place by its link, unless the browser is asked for a tab or a window of its own. */
export function follow(event: MouseEvent, go: () => void): void {
  if (event.metaKey || event.ctrlKey || event.shiftKey || event.button !== 0) return;
  event.preventDefault();
  go();
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
