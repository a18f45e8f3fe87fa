import type { Source } from "../../memory/api";
import type { MemoryStrings } from "./en";

/** What is said of memory, in German. */
const day = new Intl.DateTimeFormat("de", { dateStyle: "medium" });
const number = new Intl.NumberFormat("de");
const count = (n: number): string => (n === 1 ? "1 Notiz" : `${number.format(n)} Notizen`);
const sources: Record<Source, string> = {
  stated: "aus deiner Nachricht",
  tool: "vom Modell gemerkt",
  user: "von dir geschrieben",
};

export const de: MemoryStrings = {
  title: "Gedächtnis",
  about: "Notizen über dich, die spätere Chats nutzen dürfen. Private Chats lesen keine und fügen keine hinzu.",
  notHere: "Dieser Server führt keine Notizen. Sein Betreiber hat das Gedächtnis abgeschaltet.",
  use: "Sich über Chats hinweg etwas über mich merken",
  add: "Notiz hinzufügen",
  newNote: "Neue Notiz",
  save: "Speichern",
  cancel: "Abbrechen",
  none: "Nichts ist gemerkt.",
  count,
  change: (text: string) => `„${text}“ ändern`,
  erase: (text: string) => `„${text}“ löschen`,
  changed: "Notiz",
  eraseAll: "Alle Notizen löschen",
  reallyAll: (n: number) => `${n === 1 ? "Die Notiz" : `Alle ${count(n)}`} löschen? Das lässt sich nicht zurücknehmen.`,
  yesAll: "Alle löschen",
  export: "Notizen exportieren",
  from: (source: Source, at: number) => `${sources[source]}, ${day.format(at * 1000)}`,
  chat: (title: string) => `Aus „${title}“`,
  chatGone: "Den Chat gibt es nicht mehr.",
  earlier: (n: number) => (n === 1 ? "1 früherer Text" : `${number.format(n)} frühere Texte`),
  notDone: (why: string) => `Das ging nicht. ${why}`,

  kept: "Für spätere Chats gemerkt:",
  instead: (text: string) => `statt „${text}“`,
  full: "Für weitere Notizen ist kein Platz. Lösche welche im Gedächtnis.",
  undo: "Rückgängig",
  undoOf: (text: string) => `Rückgängig: ${text}`,
  undone: "Zurückgenommen.",
  notUndone: "Das ließ sich nicht zurücknehmen. Versuche es noch einmal.",
};
