/** Short notices of what was done, with a way to take it back. Each goes by itself after a while, unless it is looked at. */
const STAYS_MS = 20_000;

export interface Toast {
  readonly key: number;
  readonly text: string;
  readonly danger: boolean;
  readonly undo: (() => Promise<void>) | null;
}

export class Toasts {
  shown = $state.raw<readonly Toast[]>([]); // the oldest first
  #timers = new Map<number, number>();
  #keys = 0;

  say(text: string, undo: Toast["undo"] = null, danger = false): void {
    const toast: Toast = { key: (this.#keys += 1), text, danger, undo };
    this.shown = [...this.shown, toast];
    this.start(toast);
  }

  dismiss(toast: Toast): void {
    this.hold(toast);
    this.shown = this.shown.filter(({ key }) => key !== toast.key);
  }

  /** Take back what it tells of. */
  async undo(toast: Toast): Promise<void> {
    this.dismiss(toast);
    await toast.undo?.();
  }

  /** Take back the last thing that can be; false where there is none. */
  undoLast(): boolean {
    const last = this.shown.findLast(({ undo }) => undo !== null);
    if (last !== undefined) void this.undo(last);
    return last !== undefined;
  }

  /** It goes after a while from now. */
  start(toast: Toast): void {
    this.hold(toast);
    this.#timers.set(toast.key, setTimeout(() => this.dismiss(toast), STAYS_MS));
  }

  /** It stays for now. */
  hold(toast: Toast): void {
    clearTimeout(this.#timers.get(toast.key));
    this.#timers.delete(toast.key);
  }
}

export const toasts = new Toasts();
