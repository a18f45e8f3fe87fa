import type { branch as Branch, list as List, remote as Remote } from "../en/chats";
import { numbersOf } from "../numbers";

/** What is said of the list of chats, of branches, and of models on other servers, in German. */
const number = numbersOf("de", ".");
const many = (n: number, one: string, more: string): string => `${number.format(n)} ${n === 1 ? one : more}`;
let months: Intl.DateTimeFormat | undefined; // made when a list goes back so far
const month = (): Intl.DateTimeFormat => (months ??= new Intl.DateTimeFormat("de", { month: "long", year: "numeric" }));

export const branch: typeof Branch = {
  version: (n, of) => `${n} / ${of}`,
  ofQuestion: (n, of) => `Fassung ${n} von ${of} dieser Frage`,
  ofAnswer: (n, of) => `Fassung ${n} von ${of} dieser Antwort`,
  earlier: "Frühere Fassung",
  later: "Spätere Fassung",
  shown: (n, of) => `Fassung ${n} von ${of}`,
  elsewhere: "In einem anderen Zweig dieses Chats wird gerade geantwortet.",
  goThere: "Anzeigen",
  ended: "Die Antwort im anderen Zweig ist zu Ende.",
  edit: "Frage bearbeiten",
  editing: "Deine Frage",
  save: "Neu fragen",
  cancel: "Abbrechen",
  again: "Noch einmal antworten",
  answer: "Darauf antworten",
  copyQuestion: "Frage kopieren",
  whole: "Alles zeigen",
  less: "Weniger zeigen",
  chooseFirst: "Mehrere Antworten stehen nebeneinander. Wähle erst die, mit der es weitergeht.",
  oneEnded: "Eine der Antworten ist zu Ende.",
  allEnded: "Alle Antworten sind zu Ende. Wähle eine, um weiterzumachen.",
  beside: "Nebeneinander",
  compare: "Vergleichen",
  compareTitle: "Mehrere zugleich fragen",
};

export const list: typeof List = {
  search: "Chats durchsuchen",
  found: (n) => (n === 0 ? "Nichts gefunden" : many(n, "Chat gefunden", "Chats gefunden")),
  nothing: (query) => `Kein Chat enthält „${query}“ im Titel oder in den Nachrichten.`,
  searchFailed: "Die Suche hat nicht geklappt.",
  waitsTitle: "Braucht dich",
  waiting: "wartet auf dich",
  running: "wird gerade beantwortet",
  group: {
    pinned: "Angeheftet",
    today: "Heute",
    yesterday: "Gestern",
    week: "Die letzten 7 Tage",
    month: "Die letzten 30 Tage",
  },
  monthOf: (time) => month().format(time),
  more: (title) => `Mehr zu „${title}“`,
  ofAll: "Mehr zu allen Chats",
  loading: "Wird geladen…",
  failed: "Die Chats konnten nicht geladen werden.",
  rename: "Umbenennen",
  renameOf: (title) => `Neuer Titel von „${title}“`,
  pin: "Anheften",
  unpin: "Lösen",
  move: "In einen Ordner verschieben",
  noFolder: "Kein Ordner",
  share: "Als Datei sichern",
  link: "Per Link teilen",
  formats: { html: "Webseite, zum Lesen", markdown: "Markdown, zum Lesen", json: "JSON, zum Wiedereinlesen" },
  remove: "Löschen",
  removeNotes: "Entfernen, samt Notizen",
  newFolder: "Neuer Ordner",
  folderName: "Name des Ordners",
  folder: (name, n) => `${name}, ${many(n, "Chat", "Chats")}`,
  emptyFolder: "Zieh Chats hierher, oder verschieb sie über ihr Menü.",
  exportAll: "Alle Chats exportieren",
  import: "Chats importieren…",
  back: "Zurück",
  deleted: (title) => `„${title}“ gelöscht`,
  folderDeleted: (name) => `Ordner „${name}“ gelöscht; seine Chats bleiben`,
  undo: "Rückgängig",
  undone: (title) => `„${title}“ ist wieder da`,
  tooLate: "Das lässt sich nicht mehr zurückholen.",
  notDone: (why) => `Das hat nicht geklappt. ${why}`,
  moved: (title, folder) =>
    folder === null ? `„${title}“ ist jetzt in keinem Ordner` : `„${title}“ ist jetzt in „${folder}“`,
  dismiss: "Ausblenden",
  notices: "Hinweise",
  noJson: "Diese Datei ist kein JSON; angenommen wird, was „Alle Chats exportieren“ oder „Als Datei sichern“ schreibt.",
  importing: "Wird importiert…",
  imported: "Importiert",
  importedAll: (chats, messages) =>
    `${many(chats, "Chat", "Chats")} mit ${many(messages, "Nachricht", "Nachrichten")} aufgenommen.`,
  importedNone: "In der Datei sind keine Chats.",
  importedKnown: (chats) =>
    `${chats === 1 ? "1 Chat war" : `${number.format(chats)} Chats waren`} schon hier und ${chats === 1 ? "kommt" : "kommen"} nicht doppelt.`,
  importedFolders: (names) => `In Ordnern: ${names.join(", ")}`,
  importedMore: (n) => `und ${number.format(n)} weitere`,
  importRefused: "Nichts wurde importiert",
  ok: "OK",
};

const reasons: Record<string, string> = {
  "the request names it": "Die Anfrage nennt es",
  "no model of this server was sure enough": "Kein Modell dieses Servers war sicher genug",
};

export const remote: typeof Remote = {
  name: "Privat",
  stays: "Privat: Chat von anderen Servern fernhalten",
  about: "Aus einem privaten Chat wird nichts an ein Modell auf einem anderen Server gesendet.",
  isPrivate: "Privat: Aus diesem Chat wird nichts an ein Modell auf einem anderen Server gesendet.",
  notPrivate: "Dieser Chat ist nicht mehr privat.",
  elsewhere: "Auf einem anderen Server, der den Chat bekommt.",
  lastElsewhere: "Das letzte ist auf einem anderen Server.",
  blocked: "Modelle anderer Server bekommen nichts aus einem privaten Chat. Schalte erst „Privat“ aus, um eines zu wählen.",
  answered: (model) => `${model} hat geantwortet, auf einem anderen Server`,
  sent: (model) => `An ${model} gesendet, auf einem anderen Server`,
  what: ({ messages, characters, images, passages, tool_results: results }) =>
    `Es bekam ${many(messages, "Nachricht", "Nachrichten")} mit zusammen ${many(characters, "Zeichen", "Zeichen")}, darin ${images ? `${many(images, "Bild", "Bilder")}, ` : ""}${many(passages, "Stelle", "Stellen")} aus Dokumenten und ${many(results, "Ergebnis", "Ergebnisse")} von Werkzeugen.`,
  because: (why) => `Grund: ${reasons[why] ?? why}.`,
};
