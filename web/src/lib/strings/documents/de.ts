import type { Role } from "../../documents/api";
import type { Refusal } from "../../documents/refuse";
import type { Upload } from "../../documents/uploads.svelte";
import type { en } from "./en";

/** What is said of documents, in German. */
const number = new Intl.NumberFormat("de");
const count = (n: number, one: string, many: string): string => `${number.format(n)} ${n === 1 ? one : many}`;
const files = (n: number): string => count(n, "Datei", "Dateien");
const documents = (n: number): string => count(n, "Dokument", "Dokumente");
const UNITS = ["Byte", "KB", "MB", "GB"];
const size = (bytes: number): string => {
  const power = bytes < 1000 ? 0 : Math.min(Math.floor(Math.log(bytes) / Math.log(1024)), UNITS.length - 1);
  const amount = bytes / 1024 ** power;
  return `${amount.toLocaleString("de", { maximumFractionDigits: power > 0 && amount < 10 ? 1 : 0 })} ${UNITS[power]}`;
};
const date = new Intl.DateTimeFormat("de", { dateStyle: "medium" });
const left = (s: number): string => {
  if (s < 10) return "noch ein paar Sekunden";
  if (s < 90) return `noch etwa ${Math.round(s / 10) * 10} s`;
  return s < 5400 ? `noch etwa ${Math.round(s / 60)} min` : `noch etwa ${Math.round(s / 3600)} h`;
};

export const de: typeof en = {
  title: "Dokumente",
  about: "Woraus Antworten entstehen können. Ponder liest sie auf diesem Rechner und nennt die Stelle, die es verwendet.",
  readable:
    "PDF, DOCX, PPTX, XLSX, HTML, Markdown, CSV, reiner Text und Quelltext. Bilder und Scans werden nicht gelesen.",
  most: (bytes: number) => `Bis zu ${size(bytes)} je Datei.`,
  empty: "Noch keine Dokumente",
  emptyHere: "Noch nichts in dieser Sammlung",
  dropHere: "Zieh Dateien irgendwo auf die Seite, füg sie ein oder wähl sie aus.",
  add: "Dateien hinzufügen",
  size,
  date: (s: number) => date.format(s * 1000),
  documents,
  loading: "Lädt…",
  retry: "Noch einmal",
  close: "Schließen",
  cancel: "Abbrechen",
  unreachable: "Der Server ist nicht zu erreichen. Läuft er?",
  failed: (why: string): string => (why === "" ? de.unreachable : why),

  collections: "Sammlungen",
  all: "Alle Dokumente",
  newCollection: "Neue Sammlung",
  collectionName: "Name der Sammlung",
  make: "Anlegen",
  rename: "Umbenennen",
  save: "Speichern",
  more: (name: string) => `Mehr zu „${name}“`,
  askFrom: "Dazu fragen",
  share: "Teilen",
  deleteCollection: "Sammlung löschen",
  deleteCollectionNamed: (name: string) => `„${name}“ löschen?`,
  deleteCollectionAbout: (n: number) =>
    n === 0 ? "Sie ist leer." : `Mit ihr werden ${documents(n)} gelöscht. Antworten behalten die Stellen, die sie nennen.`,
  delete: "Löschen",
  role: { owner: "deine", writer: "du darfst hinzufügen und löschen", reader: "du darfst lesen" } satisfies Record<
    Role,
    string
  >,
  ownedBy: (owner: string) => `geteilt von ${owner}`,

  invitations: "Einladungen",
  invited: (owner: string, name: string) => `${owner} teilt „${name}“ mit dir`,
  invitedAs: {
    reader: "Du könntest sie lesen und dazu fragen.",
    writer: "Du könntest sie lesen, dazu fragen, und Dokumente hinzufügen und löschen.",
  } satisfies Record<Exclude<Role, "owner">, string>,
  accept: "Annehmen",
  acceptNamed: (name: string) => `„${name}“ annehmen`,
  decline: "Ablehnen",
  declineNamed: (name: string) => `„${name}“ ablehnen`,
  leave: "Verlassen",

  sharing: (name: string) => `„${name}“ teilen`,
  sharingAbout: "Wer eingeladen ist, entscheidet selbst. Wer liest, kann zu den Dokumenten fragen. Wer schreibt, kann auch welche hinzufügen und löschen.",
  nobody: "Sonst sieht niemand diese Sammlung.",
  user: "Name",
  may: (user: string) => `Was ${user} darf`,
  reader: "lesen",
  writer: "schreiben",
  unshare: (user: string) => `Nicht mehr mit ${user} teilen`,
  give: "Einladen",
  notYet: "eingeladen",

  listOf: (name: string) => `Dokumente in ${name}`,
  kind: {
    "application/pdf": "PDF",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "DOCX",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation": "PPTX",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "XLSX",
    "text/html": "HTML",
    "text/markdown": "MD",
    "text/csv": "CSV",
    "text/x-code": "Code",
    "text/plain": "Text",
  },
  otherKind: "Datei",
  pages: (n: number) => count(n, "Seite", "Seiten"),
  characters: (n: number) => `${number.format(n)} Zeichen`,
  faults: (n: number) => count(n, "Hinweis", "Hinweise"),
  faultsOf: (title: string) => `Was in ${title} nicht zu lesen war`,
  fault: (message: string, page: number | null) => (page === null ? message : `Seite ${page}: ${message}`),
  deleteDocument: (title: string) => `„${title}“ löschen`,
  confirmDelete: "Löschen?",
  deleted: (title: string) => `„${title}“ ist gelöscht.`,
  showMore: "Weitere zeigen",

  search: "In Dokumenten suchen",
  searchIn: (name: string) => `In ${name} suchen`,
  clearSearch: "Suche leeren",
  searching: "Sucht…",
  found: (n: number) => count(n, "Stelle", "Stellen"),
  nothing: (query: string) => `Zu „${query}“ war nichts zu finden.`,
  page: (n: number) => `Seite ${n}`,

  drop: "Loslassen zum Hinzufügen",
  dropAbout: "Aus den Dateien werden Dokumente, aus denen Antworten entstehen können.",
  dropToAsk: "Die Dateien gehen mit der nächsten Nachricht, und Antworten in diesem Chat kommen aus ihnen.",
  adding: (n: number) => `${files(n)} hinzufügen`,
  addingNone: "Dateien hinzufügen",
  into: "In die Sammlung",
  another: "Eine neue Sammlung…",
  refused: (n: number) => (n === 1 ? "1 Datei geht nicht" : `${number.format(n)} Dateien gehen nicht`),
  why: (refusal: Refusal, most: number | null) =>
    ({
      empty: "Die Datei ist leer.",
      large: `Größer als die ${size(most ?? 0)}, die auf einmal gehen.`,
      media: "Bilder, Ton und Video werden nicht gelesen.",
      archive: "Archive werden nicht gelesen. Füg die Dateien darin einzeln hinzu.",
      folder: "Ordner gehen nicht. Füg die Dateien darin hinzu.",
      twice: "Eine andere dieser Dateien heißt genauso.",
    })[refusal],

  uploads: "Dateien, die hinzukommen",
  progress: (going: number, over: number) => (going > 0 ? `${files(going)} kommen hinzu` : `${files(over)} hinzugefügt`),
  progressFailed: (n: number, failed: number) =>
    n === failed ? `${files(n)} nicht hinzugefügt` : `${failed} von ${files(n)} nicht hinzugefügt`,
  into2: (name: string) => `zu „${name}“`,
  left,
  stage: ({ stage, sent, bytes, chunks, embedded, cancelling, replaced }: Upload): string => {
    if (cancelling && stage !== "cancelled") return "wird abgebrochen…";
    switch (stage) {
      case "waiting":
        return "wartet aufs Senden";
      case "sending":
        return `wird gesendet, ${size(sent)} von ${size(bytes)}`;
      case "queued":
        return "wartet aufs Lesen";
      case "reading":
        return "wird gelesen und zerlegt";
      case "embedding":
        return embedded < chunks
          ? `wird eingebettet, ${number.format(embedded)} von ${count(chunks, "Stelle", "Stellen")}`
          : "wird indiziert";
      case "done":
        return replaced ? "hinzugefügt, anstelle der früheren Datei dieses Namens" : "hinzugefügt";
      case "unchanged":
        return "war schon da, unverändert";
      case "failed":
        return "nicht hinzugefügt";
      case "cancelled":
        return "abgebrochen";
    }
  },
  heard: (name: string, stage: string, error: string | null) => `${name}: ${stage}. ${error ?? ""}`,
  cancelFile: (name: string) => `${name} abbrechen`,
  cancelAll: "Alle abbrechen",
  retryFile: (name: string) => `Noch einmal: ${name}`,
  dismissFile: (name: string) => `${name} aus dieser Liste nehmen`,
  dismissAll: "Schließen",
  openFile: (name: string) => `${name} öffnen`,
  gone: "Dieses Dokument gibt es nicht. Vielleicht wurde es gelöscht.",
  toAll: "Alle Dokumente",

  asPages: "Seiten",
  asText: "Text",
  views: "Ansicht",
  download: "Herunterladen",
  pageOf: (n: number, of: number) => `Seite ${n} von ${number.format(of)}`,
  goToPage: "Seite",
  ofPages: (n: number) => `von ${number.format(n)}`,
  previousPage: "Vorige Seite",
  askPage: "Nach dem Bild dieser Seite fragen",
  nextPage: "Nächste Seite",
  zoomIn: "Vergrößern",
  zoomOut: "Verkleinern",
  zoom: (percent: number) => `${percent} %`,
  text: "Text des Dokuments",
  pageFailed: (n: number) => `Seite ${n} lässt sich nicht zeigen.`,
  pagesFailed: "Die Seiten lassen sich nicht zeigen: Die Datei ist nicht mehr da. Das ist ihr Text.",
  toPassage: "Zur Stelle",

  passageGone: "Dieses Dokument wurde inzwischen gelöscht. Das ist die Stelle, die die Antwort behalten hat.",
  passageChanged: "Dieses Dokument ist inzwischen ein anderes. Das ist die Stelle, die die Antwort behalten hat.",
  open: "Dokument öffnen",

  filesOfMessage: "Dateien",
  sendingFile: (sent: number, of: number) => `wird gesendet, ${size(sent)} von ${size(of)}`,
  readingFile: "wird gelesen…",
  missingFile: "Nicht hier: Ein importierter Chat hat von seinen Dateien nur die Namen.",
  removeFile: (name: string) => `${name} wegnehmen`,
  mostFiles: (most: number) => `Eine Nachricht nimmt ${most} Dateien. Sende diese, und die anderen mit der nächsten.`,
  notAttached: (name: string, why: string) => `${name}: ${why}`,
  takeAway: (name: string) => `Aus ${name} lässt sich nicht antworten. Nimm sie weg, um deine Nachricht zu senden.`,
  keep: "In die Bibliothek",
  keepFile: (name: string) => `${name} in die Bibliothek aufnehmen`,
  keepAbout: "Die Bibliothek behält eine Kopie, für alle deine Chats. Die Datei dieses Chats geht mit ihm.",
  kept: (name: string, shelf: string) => `${name} ist in „${shelf}“.`,
};
