/**
 * What keys do, wherever the focus is. Each has a modifier, as single keys would get in the way of typing and of voice
 * control. Pure; knows nothing of what is then done.
 */
export interface Chord {
  readonly key: string; // as KeyboardEvent has it, a letter in lower case
  readonly mod?: boolean; // Ctrl, on a Mac Command
  readonly shift?: boolean;
  readonly alt?: boolean;
}

export const SHORTCUTS = {
  search: { key: "k", mod: true },
  newChat: { key: "o", mod: true, shift: true },
  write: { key: "Escape", shift: true },
  above: { key: "ArrowUp", alt: true },
  below: { key: "ArrowDown", alt: true },
  undo: { key: "z", mod: true },
  help: { key: "/", mod: true },
} as const satisfies Record<string, Chord>;

export type ShortcutName = keyof typeof SHORTCUTS;

export type Pressed = Pick<KeyboardEvent, "key" | "ctrlKey" | "metaKey" | "shiftKey" | "altKey">;

/** The shortcut that was pressed. Where a key is had only with Shift, as "/" on some keyboards, Shift is no matter. */
export function pressed(event: Pressed, mac: boolean): ShortcutName | null {
  const [mod, other] = mac ? [event.metaKey, event.ctrlKey] : [event.ctrlKey, event.metaKey];
  if (other) return null;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const matches = (chord: Chord): boolean => {
    const shift = /[^a-z]/.test(chord.key) && chord.key.length === 1 ? true : event.shiftKey === (chord.shift ?? false);
    return key === chord.key && mod === (chord.mod ?? false) && event.altKey === (chord.alt ?? false) && shift;
  };
  const found = Object.entries(SHORTCUTS).find(([, chord]) => matches(chord));
  return (found?.[0] as ShortcutName | undefined) ?? null;
}

/** The keys of a shortcut, as they are written on them. `ctrl` and `shift` are their names in the reader's language. */
export function keysOf(chord: Chord, mac: boolean, names: { ctrl: string; shift: string }): string[] {
  const SIGNS: Record<string, string> = { ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc" };
  return [
    chord.mod ? (mac ? "⌘" : names.ctrl) : "",
    chord.alt ? (mac ? "⌥" : "Alt") : "",
    chord.shift ? (mac ? "⇧" : names.shift) : "",
    SIGNS[chord.key] ?? (chord.key.length === 1 ? chord.key.toUpperCase() : chord.key),
  ].filter(Boolean);
}

export const isMac = (): boolean => /mac|iphone|ipad/i.test(navigator.userAgent);
