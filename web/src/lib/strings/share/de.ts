import type { ShareStrings } from "./en";

/** What is said of links to chats, in German. */
const moment = new Intl.DateTimeFormat("de", { dateStyle: "medium", timeStyle: "short" });

export const de: ShareStrings = {
  title: "Links zu Chats",
  about:
    "Wer einen Link hat, kann den Chat so lesen, wie er beim Erstellen oder Aktualisieren des Links war, ohne sich anzumelden. Gedanken, Werkzeugaufrufe und Dokumente sind nicht dabei, außer den Stellen, die Antworten zitieren.",
  forbidden: "Der Betreiber dieses Servers hat Links zu Chats untersagt.",
  make: "Link erstellen",
  makeFor: (title: string) => `„${title}“ teilen`,
  made: "Der Link ist erstellt. Seine Adresse wird nur jetzt gezeigt:",
  address: "Adresse des Links",
  copy: "Adresse kopieren",
  none: "Es gibt keine Links.",
  list: "Deine Links",
  at: (created: number, updated: number) =>
    updated > created
      ? `Erstellt am ${moment.format(created * 1000)}, aktualisiert am ${moment.format(updated * 1000)}`
      : `Erstellt am ${moment.format(created * 1000)}`,
  update: "Aktualisieren",
  updateOf: (title: string) => `Link zu „${title}“ aktualisieren`,
  updated: (title: string) => `Der Link zu „${title}“ zeigt den Chat, wie er jetzt ist.`,
  revoke: "Widerrufen",
  revokeOf: (title: string) => `Link zu „${title}“ widerrufen`,
  revoked: "Der Link ist widerrufen.",
  notDone: (why: string) => `Das ging nicht. ${why}`,
};
