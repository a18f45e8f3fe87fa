import type { Chart } from "../../artifacts/chart";
import type { ArtifactStrings } from "./en";

/** What is said of files that tools made, in German. */
const tick = new Intl.NumberFormat("de", { notation: "compact", maximumSignificantDigits: 3 });
const number = new Intl.NumberFormat("de");
const size = (bytes: number): string =>
  bytes < 1000
    ? `${number.format(bytes)} ${bytes === 1 ? "Byte" : "Bytes"}`
    : bytes < 1e6
      ? `${number.format(Math.round(bytes / 1024))} KB`
      : `${(bytes / 1048576).toLocaleString("de", { maximumFractionDigits: 1 })} MB`;
const time = new Intl.DateTimeFormat("de", { dateStyle: "medium", timeStyle: "short" });

export const de: ArtifactStrings = {
  files: "Dateien",
  facts: (version: number, bytes: number) => (version > 1 ? `Version ${version} · ${size(bytes)}` : size(bytes)),
  version: "Version",
  versionFrom: (version: number, at: number) => `${version}, ${time.format(at * 1000)}`,
  download: "Herunterladen",
  close: "Schließen",
  preview: (name: string) => `Vorschau von ${name}`,
  table: (name: string) => `Tabelle ${name}`,
  loading: "Lädt…",
  noPreview: "Für diese Art von Datei gibt es keine Vorschau. Sie lässt sich herunterladen.",
  unreachable: "Sie konnte nicht gelesen werden. Versuche es noch einmal.",
  gone: "Diese Datei gibt es nicht mehr.",
  moreRows: (n: number) => `${number.format(n)} weitere ${n === 1 ? "Zeile ist" : "Zeilen sind"} in der Datei.`,
  showChart: "Diagramm",
  chart: ({ kind, label, labels, series }: Chart) =>
    `${kind === "bar" ? "Balkendiagramm" : "Liniendiagramm"} von ${series.map(({ name }) => name).join(", ")} nach ${label}, ${labels.length} Punkte`,
  tick: (value: number) => tick.format(value),
  point: (label: string, name: string, value: number) => `${label}, ${name}: ${number.format(value)}`,
  formulas:
    "Einige Zellen beginnen wie Formeln. Eine Tabellenkalkulation könnte sie ausrechnen: Öffne die Datei mit Vorsicht.",
  isolated: "Von einem Werkzeug gemacht. Es steht getrennt von der Seite und kann deine Daten nicht lesen und lädt nichts aus dem Netz.",
  app: (name: string) => `App ${name}`,
  openApp: "App öffnen",
  closeApp: "App schließen",
  fromServer: (server: string) => `Eine App des MCP-Servers „${server}“. Sie steht getrennt von der Seite, kann deine Daten nicht lesen und lädt nichts aus dem Netz.`,
  wants: (list: string) => `Diese App verlangt ${list}. Hier bekommt keine App das; Teile von ihr gehen vielleicht nicht.`,
  server: "Ihr Server ist gerade nicht verbunden: Sie zeigt, was gefunden wurde, und kann nichts Neues holen.",
  flooded: "Die App hat zu viele Nachrichten geschickt und wurde geschlossen.",
  left: "Die App hat ihre Seite verlassen und wurde geschlossen.",
  asks: (name: string) => `App ${name} fragt`,
  asksLink: "Diese App möchte eine Seite in einem neuen Tab öffnen:",
  openLink: "Öffnen",
  asksMessage: "Diese App möchte Worte in dein Nachrichtenfeld schreiben. Gesendet wird nichts:",
  takeMessage: "Übernehmen",
  decline: "Ablehnen",
  appCalls: (name: string) => `Anfragen von ${name} an ihren Server`,
  appCall: { running: "läuft", done: "beantwortet", failed: "abgelehnt oder fehlgeschlagen" },
};
