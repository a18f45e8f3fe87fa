import type { Chart } from "../../artifacts/chart";

/** What is said of files that tools made, in English. */
const tick = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const number = new Intl.NumberFormat("en");
const size = (bytes: number): string =>
  bytes < 1000
    ? `${number.format(bytes)} ${bytes === 1 ? "byte" : "bytes"}`
    : bytes < 1e6
      ? `${number.format(Math.round(bytes / 1024))} KB`
      : `${(bytes / 1048576).toLocaleString("en", { maximumFractionDigits: 1 })} MB`;
const time = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeStyle: "short" });

export const en = {
  files: "Files",
  facts: (version: number, bytes: number) => (version > 1 ? `version ${version} · ${size(bytes)}` : size(bytes)),
  version: "Version",
  versionFrom: (version: number, at: number) => `${version}, ${time.format(at * 1000)}`,
  download: "Download",
  close: "Close",
  preview: (name: string) => `Preview of ${name}`,
  table: (name: string) => `Table ${name}`,
  loading: "Loading…",
  noPreview: "There is no preview of this kind of file. It can be downloaded.",
  unreachable: "It could not be read. Try again.",
  gone: "This file is not there any more.",
  moreRows: (n: number) => `${number.format(n)} more ${n === 1 ? "row is" : "rows are"} in the file.`,
  showChart: "Chart",
  chart: ({ kind, label, labels, series }: Chart) =>
    `${kind === "bar" ? "Bar chart" : "Line chart"} of ${series.map(({ name }) => name).join(", ")} by ${label}, ${labels.length} points`,
  tick: (value: number) => tick.format(value),
  point: (label: string, name: string, value: number) => `${label}, ${name}: ${number.format(value)}`,
  formulas: "Some cells begin as formulas do. A spreadsheet program may compute them: open the download with care.",
  isolated: "Made by a tool. It is shown apart from the page, cannot read your data, and loads nothing from the network.",
  app: (name: string) => `App ${name}`,
  openApp: "Open app",
  closeApp: "Close app",
  fromServer: (server: string) => `An app of the MCP server “${server}”. It is shown apart from the page, cannot read your data, and loads nothing from the network.`,
  wants: (list: string) => `This app asks for ${list}. No app is given that here, so parts of it may not work.`,
  server: "Its server is not connected now: it shows what was found, and can ask for nothing new.",
  flooded: "The app sent too many messages, and was closed.",
  left: "The app left its page, and was closed.",
  asks: (name: string) => `App ${name} asks`,
  asksLink: "This app wants to open a page in a new tab:",
  openLink: "Open",
  asksMessage: "This app wants to put words into your message box. Nothing is sent:",
  takeMessage: "Put them there",
  decline: "Decline",
  appCalls: (name: string) => `Requests of ${name} to its server`,
  appCall: { running: "under way", done: "answered", failed: "refused or failed" },
};

export type ArtifactStrings = typeof en;
