/**
 * Places for streams that stay open, shared by all tabs and windows of this browser. Over HTTP/1.1 it makes six
 * connections to a host, so without a limit six open answers would leave none for anything else. Who finds no place
 * reads in short requests instead. Knows nothing of what is read.
 */
const PLACES = 4; // two connections stay free: for pages that load, and for what is sent
const TURN_MS = 4_000;

export interface Place {
  readonly forMs: number; // after that it should be given up for a moment, so that others have a turn
  free(): void;
}

const always: Place = { forMs: Infinity, free: () => undefined };
const turn: Place = { forMs: TURN_MS, free: () => undefined };

/** A place, or null where all are taken. Where tabs cannot agree (no secure origin, so no locks) they take turns. */
export async function takePlace(): Promise<Place | null> {
  if (!crowded()) return always;
  const { locks } = navigator as { locks?: LockManager };
  if (locks === undefined) return turn;
  try {
    for (let i = 0; i < PLACES; i += 1) {
      const free = await lock(locks, `ponder.stream.${i}`);
      if (free !== null) return { forMs: Infinity, free };
    }
    return null;
  } catch {
    return turn; // a browser that forbids locks here
  }
}

/** Does each stream take a connection of its own? HTTP/2 and 3 carry many over one. */
function crowded(): boolean {
  const [page] = performance.getEntriesByType("navigation") as PerformanceNavigationTiming[];
  return !/^h[23]/.test(page?.nextHopProtocol ?? "");
}

/** What frees a lock again, or null where somebody has it. The browser frees those of a tab that closes. */
function lock(locks: LockManager, name: string): Promise<(() => void) | null> {
  return new Promise((resolve, reject) => {
    const held = (got: Lock | null): Promise<void> | null => {
      if (got !== null) return new Promise<void>((free) => resolve(free));
      resolve(null);
      return null;
    };
    locks.request(name, { ifAvailable: true }, held).catch(reject);
  });
}
