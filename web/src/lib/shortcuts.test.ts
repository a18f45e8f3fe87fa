import { expect, test } from "vitest";
import { keysOf, pressed, SHORTCUTS, type Pressed } from "./shortcuts";

const press = (key: string, held: Partial<Pressed> = {}): Pressed => ({
  key, ctrlKey: false, metaKey: false, shiftKey: false, altKey: false, ...held,
});

test.each([
  [press("k", { ctrlKey: true }), "search"],
  [press("K", { ctrlKey: true }), "search"], // with Caps Lock
  [press("z", { ctrlKey: true }), "undo"],
  [press("z", { ctrlKey: true, shiftKey: true }), null], // does again what was undone
  [press("O", { ctrlKey: true, shiftKey: true }), "newChat"],
  [press("o", { ctrlKey: true }), null],
  [press("k", { ctrlKey: true, altKey: true }), null], // AltGr
  [press("k", { metaKey: true }), null],
  [press("k"), null],
  [press("/", { ctrlKey: true }), "help"],
  [press("/", { ctrlKey: true, shiftKey: true }), "help"], // a German keyboard has it above the 7
  [press("Escape", { shiftKey: true }), "write"],
  [press("Escape"), null],
  [press("ArrowUp", { altKey: true }), "above"],
  [press("ArrowUp"), null],
])("pressed %#", (event, name) => {
  expect(pressed(event, false)).toBe(name);
});

test("a Mac has Command where others have Ctrl", () => {
  expect(pressed(press("k", { metaKey: true }), true)).toBe("search");
  expect(pressed(press("k", { ctrlKey: true }), true)).toBe(null);
  const names = { ctrl: "Strg", shift: "Umschalt" };
  expect(keysOf(SHORTCUTS.newChat, true, names)).toEqual(["⌘", "⇧", "O"]);
  expect(keysOf(SHORTCUTS.newChat, false, names)).toEqual(["Strg", "Umschalt", "O"]);
  expect(keysOf(SHORTCUTS.above, false, names)).toEqual(["Alt", "↑"]);
});
