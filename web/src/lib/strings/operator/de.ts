import type { OperatorStrings } from "./en";

/** What the operator's page says, in German. */
const number = new Intl.NumberFormat("de");
const short = new Intl.NumberFormat("de", { maximumSignificantDigits: 3 });
const percent = new Intl.NumberFormat("de", { style: "percent", maximumFractionDigits: 1 });
const day = new Intl.DateTimeFormat("de", { dateStyle: "medium", timeStyle: "short" });
const hour = new Intl.DateTimeFormat("de", { timeStyle: "medium" });
const count = (n: number, one: string, many: string): string => `${number.format(n)} ${n === 1 ? one : many}`;
const took = (s: number): string => (s < 1 ? `${short.format(s * 1000)} ms` : s < 100 ? `${short.format(s)} s` : lasted(s));
const lasted = (s: number): string => {
  const [days, hours, minutes] = [Math.floor(s / 86_400), Math.floor(s / 3600) % 24, Math.floor(s / 60) % 60];
  if (days > 0) return `${days} T. ${hours} Std.`;
  if (hours > 0) return `${hours} Std. ${minutes} min`;
  return minutes > 0 ? `${minutes} min ${Math.floor(s) % 60} s` : `${Math.floor(s)} s`;
};
const bytes = (n: number): string => (n < 1e9 ? `${Math.round(n / 2 ** 20)} MiB` : `${short.format(n / 2 ** 30)} GiB`);

export const de: OperatorStrings = {
  title: "Betrieb",
  parts: "Teile dieser Seite",
  part: { live: "Live", runs: "Antworten", users: "Nutzer", tools: "Werkzeuge" },
  facts: (version, uptimeS, memory) => [`Version ${version}`, `läuft seit ${lasted(uptimeS)}`, bytes(memory)].join(" · "),
  notYours: "Diese Seite ist für den Betrieb. Wer ihn macht, kann dich dazunehmen.",
  stale: (at) => `Der Server antwortet nicht; so war es um ${hour.format(at * 1000)}.`,
  window: "Zahlen aus",
  lastMinute: "Letzte Minute",
  lastQuarter: "Letzte 15 Minuten",

  ttft: "Erstes Token",
  interToken: "Zwischen Tokens",
  duration: "Ganze Antwort",
  generated: "Geschriebene Tokens",
  answering: "In Arbeit",
  memory: "Belegte KV-Blöcke",
  memoryAbout: "im vollsten Modell",
  hits: "Im Cache gefunden",
  errors: "Fehler",
  median: "Median",
  rest: (p95, p99) => `p95\u00a0${took(p95)} · p99\u00a0${took(p99)}`,
  took,
  noneYet: "noch nichts",
  perSecond: (n) => `${short.format(n)}/s`,
  read: (n) => `${short.format(n)}/s gelesen`,
  cost: (n) => `eine Million kostet ${short.format(n)}`,
  energy: ({ watts, source, wh_per_thousand_tokens: wattHours }) => {
    if (watts === null) return "Energie unbekannt: power_watts setzen";
    const counters = { rapl: "CPU und Speicher", nvml: "GPUs", "rapl+nvml": "CPU, Speicher und GPUs" };
    const what = source === null || source === "power_watts" ? "wie eingestellt" : counters[source];
    const per = wattHours === null ? "" : `1.000 brauchen ${short.format(wattHours)} Wh, `;
    return `${per}${short.format(watts)} W (${what})`;
  },
  ofClass: (priority, n) => `${number.format(n)} der Klasse ${priority}`,
  queue: (running, waiting) => `${number.format(running)} laufen, ${number.format(waiting)} warten`,
  percent: (n) => percent.format(n),
  sinceStart: (n) => (n === null ? "" : `${percent.format(n)} seit dem Start`),
  number: (n) => number.format(n),
  ends: (by) =>
    Object.entries(by)
      .map(([how, n]) => `${number.format(n)} ${outcome[how] ?? how}`)
      .join(", "),
  chart: (what, least, most, last) => `${what} in den letzten 15 Minuten: ${least} bis ${most}, jetzt ${last}`,
  chartEmpty: (what) => `${what} in den letzten 15 Minuten: noch nichts`,
  table: "Die Kurven als Tabelle",
  time: "Zeit",
  ago: (s) => (s === 0 ? "jetzt" : `vor ${lasted(s)}`),
  none: "–",

  engines: "Modelle",
  stopped: "Die Engine ist stehen geblieben.",
  blocks: (used, adapters, cached, free) =>
    `KV-Blöcke: ${number.format(used)} belegt, ${adapters === 0 ? "" : `${number.format(adapters)} von Adaptern, `}${number.format(cached)} im Cache, ${number.format(free)} frei`,
  block: { used: "belegt", adapters: "von Adaptern", cached: "im Cache", free: "frei" },
  blocksOf: (size) => `KV-Blöcke zu ${count(size, "Token", "Tokens")}`,
  sequences: (n) => count(n, "offene Sequenz", "offene Sequenzen"),
  preemptions: (n) => count(n, "Verdrängung", "Verdrängungen"),
  heldBack: "Was sie bremst",
  limit: {
    idle: "Nichts: Sie hat Zeit übrig.",
    kv_memory: "Speicher für K/V.",
    max_running: "Die Größe des Stapels.",
    host: "Der Rechner drumherum.",
    prefill: "Das Lesen von Prompts.",
    bandwidth: "Die Speicherbandbreite.",
    compute: "Das Rechnen.",
    decode: "Das Schreiben.",
  },
  limitAbout: ({ limit, ...of }) => {
    const step = of.step_s === null ? "" : `Ein Schritt dauert ${took(of.step_s)} für ${short.format(of.rows)} Sequenzen`;
    const twice = of.growth === null ? "" : `, für doppelt so viele ${short.format(2 ** of.growth)}-mal so lang`;
    switch (limit) {
      case "idle":
        return "";
      case "kv_memory":
        return `${percent.format(of.kv_used)} der Blöcke waren belegt, mit ${count(of.preemptions, "Verdrängung", "Verdrängungen")} in der letzten Minute.`;
      case "max_running":
        return `Im Mittel warten ${short.format(of.waiting)} Sequenzen, während er voll ist.`;
      case "host":
        return `Schritte nehmen ${percent.format(of.busy)} der Zeit mit Arbeit ein; der Rest ist Tokenisieren, Werkzeuge und andere Programme.`;
      case "prefill":
        return `${percent.format(of.prompts)} der Zeit der Schritte geht an Prompts, die der Cache nicht hat.`;
      default:
        return `${step}${twice}.`;
    }
  },
  wouldHelp: "Helfen würde:",
  drafts: "Entwürfe",
  accepted: (accepted, drafted) =>
    `${number.format(accepted)} von ${count(drafted, "geratenen Token", "geratenen Tokens")} angenommen`,
  perStep: (n) => `${short.format(n)} Tokens je Schritt`,
  saved: (s) => (s < 0 ? `${took(-s)} verloren` : `${took(s)} gespart`),
  acceptance: (shares) =>
    `Angenommen nach Stelle im Entwurf: ${shares.map((share) => percent.format(share)).join(", ")}`,
  acceptedAt: (position, share) => `Stelle ${position}: ${percent.format(share)}`,
  byPosition: "angenommen nach Stelle im Entwurf",
  errorCodes: "Fehler nach Code",
  noErrors: "Keine.",
  settings: "Einstellungen, die geändert sind",
  asTheyCome: "Keine Einstellung ist geändert.",

  runsTitle: "Die neuesten Antworten",
  runsAbout: "Ohne das, was gefragt und geantwortet wurde.",
  noRuns: "Es gibt noch keine Antworten.",
  status: { running: "läuft", completed: "fertig", failed: "fehlgeschlagen", cancelled: "angehalten" },
  begun: "Begonnen",
  user: "Nutzer",
  model: "Modell",
  state: "Zustand",
  lasted: "Dauer",
  tokens: "Tokens",
  rate: "Tokens/s",
  at: (s) => day.format(s * 1000),
  atHour: (s) => hour.format(s * 1000),

  usersTitle: "Nutzer",
  keysTitle: "API-Schlüssel",
  authOff:
    "Dieser Server fragt niemanden nach einem Schlüssel: Wer ihn erreicht, ist der Nutzer local. Schlüssel zählen, wenn er so gestartet wird:",
  role: { operator: "Betrieb", user: "Nutzer" },
  roleOf: (id) => `Rolle von ${id}`,
  you: "du",
  newUser: "Neuer Nutzer",
  id: "Kennung",
  idHint: "Kleine Buchstaben, Ziffern, Punkte und Striche. Sie ändert sich nicht.",
  name: "Name",
  roleTitle: "Rolle",
  optional: "wenn du willst",
  create: "Anlegen",
  cancel: "Abbrechen",
  newKey: "Neuer Schlüssel",
  keyFor: "Für",
  keyName: "Wofür er ist",
  expires: "Gültig",
  expiry: { never: "bis er widerrufen wird", day: "einen Tag", month: "30 Tage", year: "ein Jahr" },
  madeKey: (user) => `Ein Schlüssel von ${user}`,
  once: "Kopiere ihn jetzt: Er wird nicht noch einmal gezeigt.",
  copyKey: "Den Schlüssel kopieren",
  copied: "Kopiert",
  done: "Fertig",
  noKeys: "Es gibt noch keine Schlüssel.",
  key: "Schlüssel",
  made: "Gemacht",
  until: "Gültig bis",
  used: "Zuletzt benutzt",
  never: "nie",
  endless: "Läuft nicht ab",
  keyState: { valid: "gültig", expired: "abgelaufen", revoked: "widerrufen", disabled: "Person gesperrt" },
  scoped: (scopes) => `für ${scopes}`,
  revoke: "Widerrufen",
  revokeNamed: (prefix, user) => `Den Schlüssel ${prefix}… von ${user} widerrufen`,
  revokeSure: (current) => (current ? "Widerrufen und abmelden?" : "Wirklich widerrufen?"),
  spent: (tokens, cost, wattHours) =>
    `${count(tokens, "Token", "Tokens")} in diesem Monat${cost === null ? "" : `, etwa ${short.format((tokens / 1e6) * cost)} zu den Kosten von heute`}${wattHours === null ? "" : `, etwa ${short.format((tokens / 1e3) * wattHours)} Wh nach dem Verbrauch von heute`}`,
  limits: "Grenzen",
  limitsOf: (whose) => `Grenzen von ${whose}`,
  save: "Speichern",
  unlimited: "keine eigene",
  scopes: "Für diese Teile der Schnittstelle",
  models: "Modelle",
  allModels: "alle; oder Namen, mit Kommas",
  forModels: (names) => `Modelle: ${names}`,
  quota: {
    requests_per_minute: "Anfragen je Minute",
    tokens_per_minute: "Tokens je Minute",
    concurrent_requests: "Anfragen zugleich",
    requests_per_day: "Anfragen je Tag",
    tokens_per_day: "Tokens je Tag",
    tokens_per_month: "Tokens je Monat",
    priority: "Beste Klasse",
    deadline_s: "Sekunden für eine Antwort",
    max_output_tokens: "Tokens einer Antwort",
  },
  delete: "Löschen",
  deleteNamed: (id) => `${id} mit allen Daten löschen`,
  deleteSure: "Wirklich löschen, mit allen Daten?",
  deleted: (id, chats, documents) =>
    `${id} ist gelöscht, mit ${count(chats, "Chat", "Chats")} und ${count(documents, "Dokument", "Dokumenten")}.`,
  revoked: (prefix) => `Der Schlüssel ${prefix}… ist widerrufen.`,

  toolsTitle: "Werkzeuge",
  from: "Woher",
  permission: {
    none: "berührt nichts",
    read: "liest",
    write: "schreibt",
    network: "nutzt das Netz",
    execute: "führt Code aus",
  },
  approval: { never: "–", once: "einmal im Chat", always: "immer" },
  tool: "Werkzeug",
  may: "Was es tut",
  asks: "Fragt vorher",
  off: "Nicht da",
  faults: "Konnte nicht geladen werden",
  allowedTitle: "Was Nutzer Werkzeugen erlauben",
  remembered: (n) => count(n, "gemerkte Antwort", "gemerkte Antworten"),
  nothingAllowed: "nichts",
};

const outcome: Record<string, string> = {
  completed: "fertig",
  cancelled: "angehalten",
  refused: "abgewiesen",
  failed: "fehlgeschlagen",
};
