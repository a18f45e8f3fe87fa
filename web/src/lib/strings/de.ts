import { branch, list, remote } from "./de/chats";
import type { Budget, ToolInfo } from "../api";
import type { NumberField, TextField, Value } from "../asking/options";
import type { SamplingName } from "../asking/sampling";
import type { Conflict, ControlName, Gone, Part } from "../asking/settings";
import type { Strings } from "./en";
import { numbersOf } from "./numbers";

/** Every word the page says, in German. */
const number = numbersOf("de", ".");
const decimal = (value: number, places: number): string =>
  value.toLocaleString("de", { minimumFractionDigits: places, maximumFractionDigits: places, useGrouping: false });
const seconds = (s: number): string =>
  s < 60 ? `${decimal(s, 1)} s` : `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
const count = (n: number, one: string, many: string): string => `${number.format(n)} ${n === 1 ? one : many}`;
const tokens = (n: number): string => count(n, "Token", "Tokens");
const part = (value: number): string => decimal(value, 2);
const place = (title: string, page: number | null): string => (page === null ? title : `${title}, Seite ${page}`);
const took = (ms: number): string => (ms < 1000 ? `${Math.round(ms)} ms` : seconds(ms / 1000));

const bounds = ({ whole, least, above, most, below }: NumberField): string => {
  const end = (word: string, bound: number | null): string => (bound === null ? "" : ` ${word} ${number.format(bound)}`);
  const from = end("ab", least) || end("über", above);
  const to = end("bis", most) || end("unter", below);
  return `${whole ? "eine ganze Zahl" : "eine Zahl"}${from}${to}`;
};
const value = (it: Value): string => (typeof it === "boolean" ? (it ? "an" : "aus") : String(it));
const named = (name: string): string => {
  const words = name.replaceAll("_", " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
};
const several = (names: "all" | readonly string[]): string =>
  names === "all" ? "alle" : names.length > 3 ? number.format(names.length) : names.join(", ");
const short = (text: string): string => (text.length > 40 ? `${text.slice(0, 39).trim()}…` : text);
const sampling: Record<SamplingName, { label: string; about: string }> = {
  temperature: {
    label: "Temperatur",
    about: "0 nimmt immer das wahrscheinlichste Wort; höher ist abwechslungsreicher.",
  },
  top_p: { label: "Top p", about: "Nur die wahrscheinlichsten Wörter, die diesen Anteil ausmachen; 1 ist aus." },
  top_k: { label: "Top k", about: "Nur so viele der wahrscheinlichsten Wörter; 0 ist aus." },
  min_p: { label: "Min p", about: "Nur Wörter, die neben dem wahrscheinlichsten so wahrscheinlich sind; 0 ist aus." },
  repetition_penalty: { label: "Wiederholungsabzug", about: "Über 1 werden Wörter seltener, die schon irgendwo stehen." },
  presence_penalty: { label: "Anwesenheitsabzug", about: "Über 0 werden Wörter seltener, die die Antwort schon hat." },
  frequency_penalty: { label: "Häufigkeitsabzug", about: "Dasselbe, je nachdem, wie oft sie vorkamen." },
  seed: { label: "Seed", about: "Dieselbe Zahl zieht dieselben Wörter noch einmal." },
};
const control: Record<ControlName, string> = {
  model: "Modell",
  thinking: "Denken",
  strategy: "Strategie",
  tools: "Werkzeuge",
  documents: "Dokumente",
  system: "System-Prompt",
  sampling: "Sampling",
};
const partTitle: Record<Part, string> = {
  model: control.model,
  effort: control.thinking,
  strategy: control.strategy,
  tools: control.tools,
};

export const de: Strings = {
  branch,
  list,
  remote,
  product: "Ponder",
  skip: "Zum Nachrichtenfeld springen",

  newChat: "Neuer Chat",
  presets: "Assistenten",
  chats: "Chats",
  openChats: "Liste der Chats öffnen",
  close: "Schließen",
  noChats: "Hier stehen die Chats, die du beginnst.",
  untitled: "Chat ohne Titel",

  help: "Tasten und Sprache",
  keys: {
    send: "Nachricht senden",
    line: "Neue Zeile beginnen",
    stop: "Antwort anhalten",
    write: "Zum Nachrichtenfeld",
    prompts: "Gespeicherte Prompts, im leeren Nachrichtenfeld",
    newChat: "Neuer Chat",
    search: "Chats durchsuchen",
    above: "Der Chat darüber in der Liste",
    below: "Der Chat darunter",
    undo: "Löschen rückgängig machen",
    help: "Diese Übersicht",
  },
  keyNames: { ctrl: "Strg", shift: "Umschalt" },
  language: "Sprache",
  browsersLanguage: "Wie der Browser",

  signOut: (name: string) => `Abmelden (${name})`,
  operator: "Seite für den Betrieb",

  theme: { system: "Farben: wie das System", light: "Farben: hell", dark: "Farben: dunkel" },

  welcome: "Frag, und sieh beim Denken zu.",
  starters: "Beginne mit einer davon",
  speech: {
    read: "Vorlesen",
    stop: "Nicht weiter vorlesen",
    dictate: "Diktieren",
    about: "Diktieren. Der Browser macht aus Sprache Text und schickt dafür vielleicht, was er hört, an seinen Hersteller.",
    aboutServer: "Diktieren. Was du sagst, wird aufgenommen und vom eingestellten Audio-Server aufgeschrieben.",
    failed: (error: string) =>
      `Es war nichts zu hören${error === "not-allowed" ? ": Das Mikrofon ist nicht erlaubt." : "."}`,
  },
  example: {
    tool: "Ein Werkzeug aufrufen",
    document: "Ein Dokument fragen",
    sum: "What is 417 * 23?",
    aboutDocument: "Wer hat den Leuchtturm gebaut? Eine Seite über ihn kommt zu deinen Dokumenten.",
    reading: "Die Seite wird gelesen …",
    failed: (message: string) =>
      `Das Beispieldokument konnte nicht hinzugefügt werden. ${message || "Der Server ist nicht erreichbar."}`,
  },
  facts: (context: number) => `${number.format(context)} Tokens Kontext`,

  message: "Nachricht",
  placeholder: "Schreib eine Nachricht",
  send: "Senden",
  waitsForFiles: "Deine Nachricht geht, sobald ihre Dateien gelesen sind.",
  addFiles: "Dateien hinzufügen",
  pictures: {
    list: "Bilder",
    add: "Ein Bild zeigen",
    added: (name: string) => `${name || "Das Bild"} wird mit der nächsten Nachricht gezeigt.`,
    alt: (number: number, name: string) => (name ? `Bild ${number}: ${name}` : `Bild ${number}`),
    remove: (name: string) => `${name} wegnehmen`,
    unseen: "Dieses Modell liest nur Text. Wähle eines, das sieht, um ihm ein Bild zu zeigen.",
    unread: (name: string) => `${name} ist kein Bild, das dieser Browser liest.`,
    most: (count: number) => `Eine Nachricht hat höchstens ${count} Bilder.`,
  },
  stop: "Anhalten",
  stopping: "Hält an…",
  hint: "Enter sendet, Umschalt + Enter beginnt eine Zeile, Esc hält an",
  latest: "Zum Ende springen",

  settings: "Wie geantwortet wird",
  control,
  controlSet: (title: string, what: string) => (what === "" ? title : `${title}: ${what}`),
  usual: "Wie üblich",
  on: "an",
  reset: "Zurücksetzen",
  resetAll: "Zurücksetzen, wie geantwortet wird",
  dismiss: "Ausblenden",
  modelTitle: "Welches Modell als Nächstes antwortet",
  usualModel: (name: string) => `${name}, wie üblich`,
  auto: "Zuerst antwortet das kleine Modell, ein größeres dort, wo das nicht reicht.",
  effortTitle: "Wie viel es denken darf",
  usualEffort: "So viel, wie das Modell von selbst denkt.",
  effort: { none: "Keines", minimal: "Minimal", low: "Wenig", medium: "Mittel", high: "Viel", xhigh: "Sehr viel" },
  effortNone: "Es antwortet sofort.",
  budgetWords: ({ min_tokens: least, max_tokens: most, waits }: Budget) => {
    const ends = [
      least > 0 ? `mindestens ${tokens(least)}` : "",
      most === null ? "" : `höchstens ${tokens(most)}`,
    ];
    const length = ends.filter(Boolean).join(", ");
    const forced = waits > 0 ? `muss ${number.format(waits)}-mal weiterdenken` : "";
    const told = [length, forced].filter(Boolean).join(", ");
    return told === "" ? "Ohne Grenze." : `${told.charAt(0).toUpperCase()}${told.slice(1)}.`;
  },
  strategyTitle: "Wie die Antwort gefunden wird",
  usualStrategy: "Keine",
  usualStrategyAbout: "Das Modell antwortet einfach.",
  optionsOf: (name: string) => `Optionen von ${name}`,
  moreOptions: "Weitere Optionen",
  named,
  value,
  usualValue: (it: Value | null) => (it === null ? "wie üblich" : `${value(it)}, wie üblich`),
  bounds: (field: NumberField) => `Möglich: ${bounds(field)}.`,
  wrong: (field: NumberField | TextField) =>
    field.kind === "number"
      ? `Nicht übernommen. Möglich: ${bounds(field)}.`
      : `Nicht übernommen. Möglich: bis zu ${number.format(field.longest ?? 0)} Zeichen.`,
  several,
  toolsTitle: "Was das Modell aufrufen darf",
  noTools: "Keine",
  allTools: (n: number) => `Alle ${number.format(n)}`,
  someTools: "Einige",
  chooseSome: "Wähle mindestens eines.",
  permission: {
    none: "rührt nichts an",
    read: "liest",
    write: "schreibt",
    network: "benutzt das Netz",
    execute: "führt Code aus",
  } satisfies Record<ToolInfo["permission"], string>,
  approval: {
    never: "",
    once: "fragt einmal je Chat",
    always: "fragt vorher",
  } satisfies Record<ToolInfo["approval"], string>,
  whatToolsMayDo: "Was Werkzeuge dürfen",
  mayBeCalled: "Dürfen überhaupt aufgerufen werden",
  permissionClass: {
    none: "Werkzeuge, die nichts anrühren",
    read: "Werkzeuge, die lesen",
    network: "Werkzeuge, die das Netz benutzen",
    write: "Werkzeuge, die schreiben",
    execute: "Werkzeuge, die Code ausführen",
  } satisfies Record<ToolInfo["permission"], string>,
  remembered: "Gemerkte Antworten",
  nothingRemembered: "Keine. „Immer erlauben“ und „Nie erlauben“ werden hier gemerkt.",
  rememberedAs: (allow: boolean, tool: string) => `${tool}: ${allow ? "immer erlaubt" : "nie erlaubt"}`,
  forget: "Vergessen",
  toolsOff: (n: number) => `Nicht da (${number.format(n)})`,
  skills: (n: number) => `Skills (${number.format(n)})`,
  skillsTitle: "Welche Skills das Modell lesen darf",
  usualSkills: "Alle, wenn read_skill unter seinen Werkzeugen ist",
  allSkills: "Alle",
  someSkills: "Ausgewählte",
  noSkills: "Keine ist ausgewählt: Es liest keine.",
  documentsTitle: "Aus Dokumenten antworten",
  noDocuments: "Nein",
  ownDocuments: "Aus meinen Sammlungen",
  allDocuments: "Aus allen, auch geteilten",
  someDocuments: "Aus einigen Sammlungen",
  documents: (n: number) => count(n, "Dokument", "Dokumente"),
  samplingTitle: "Wie die Wörter gewählt werden",
  guesses: "Geratene Tokens zeigen",
  guessesAbout:
    "Text, der vorausgeraten war und den das Modell dann selbst gewählt hat, wird gefärbt. Es ist so oder so derselbe Text.",
  systemTitle: "Was das Modell vor allem anderen liest",
  systemPlaceholder: "Du bist…",
  systemAbout: "Der System-Prompt: wer es sein soll und wie es antworten soll. Er geht mit jeder Frage mit.",
  systemTooLong: (n: number, most: number) =>
    `Nicht übernommen: ${number.format(n)} Zeichen. Möglich: bis zu ${number.format(most)}.`,
  sampling,
  maxTokens: "Höchstzahl der Tokens einer Antwort",
  maxTokensAbout: "Das Denken zählt mit. Wie üblich: so weit der Kontext reicht.",
  conflict: ({ kind, name }: Conflict) =>
    ({
      "auto-tools": "Mit „auto“ gibt es keine Werkzeuge.",
      "auto-strategy": "Mit „auto“ ist budget die einzige Strategie.",
      "effort-strategy": "Eine Menge des Denkens und eine Strategie gehen nicht zusammen.",
      "none-budget": "Die Strategie budget betrifft das Denken, und das ist ausgeschaltet.",
      "strategy-tools": `Die Strategie ${name} nimmt keine Werkzeuge.`,
      unthinking: `${name} denkt nicht.`,
      toolless: `${name} nimmt keine Werkzeuge.`,
    })[kind],
  first: (it: Part) => `Um das zu wählen, ändere zuerst „${partTitle[it]}“.`,
  said: {
    model: (name: string) => `Modell: ${name}`,
    effort: (label: string) => `Denken: ${label.toLowerCase()}`,
    strategy: (name: string, options: readonly [string, Value][]) => {
      const set = options.map(([key, it]) => `${named(key)} ${value(it)}`).join(", ");
      return `Strategie: ${named(name)}${set === "" ? "" : ` (${set})`}`;
    },
    tools: (names: "all" | readonly string[]) => `Werkzeuge: ${several(names)}`,
    skills: (names: "all" | readonly string[]) => (names.length === 0 ? "Keine Skills" : `Skills: ${several(names)}`),
    documents: (names: "own" | "all" | readonly string[]) =>
      names === "own" ? "Aus meinen Dokumenten" : names === "all" ? "Aus allen Dokumenten" : `Aus ${names.join(", ")}`,
    system: (text: string) => `System-Prompt: „${short(text)}“`,
    sampling: (name: SamplingName, it: number) => `${sampling[name].label} ${number.format(it)}`,
    maxTokens: (n: number) => `Höchstens ${tokens(n)}`,
  },
  gone: ({ what, name }: Gone) =>
    ({
      model: `Das Modell „${name}“ ist nicht mehr da.`,
      effort: `Die Menge des Denkens „${name}“ gibt es nicht mehr.`,
      strategy: `Die Strategie „${name}“ ist nicht mehr da.`,
      option: `Die Option „${name}“ der Strategie ist nicht mehr, wie sie war.`,
      tool: `Das Werkzeug „${name}“ ist nicht mehr da.`,
      skill: `Die Skill „${name}“ ist nicht mehr da.`,
      tools: "Es gibt keine Werkzeuge mehr.",
      collections: "Einige der Dokumente, aus denen geantwortet werden sollte, sind nicht mehr da.",
      conflict: `Was für „${partTitle[name as Part]}“ gewählt war, passt nicht mehr zum Rest.`,
    })[what],
  goneEnd: "Das wurde weggelassen.",

  you: "Du",
  conversation: "Unterhaltung",
  thinking: "Denkt nach…",
  doing: {
    reading: "Liest…",
    searching: "Sucht…",
    comparing: "Vergleicht Antworten…",
    checking: "Prüft den Satz…",
    thinking: "Denkt nach…",
  },
  queued: (ahead: number) => `Wartet, ${count(ahead, "Anfrage", "Anfragen")} davor`,
  thought: (s: number | null, n: number | null) =>
    [s === null ? "Nachgedacht" : `${seconds(s)} nachgedacht`, n === null ? "" : ` · ${tokens(n)}`].join(""),
  thoughtCut: "Nachgedacht, abgebrochen",
  trace: "Was das Modell dachte",
  budget: "Budget des Denkens",
  spent: (n: number, of: number) => `${number.format(n)} von ${tokens(of)}`,
  wait: (n: number, of: number) => `musste weiterdenken, ${n} von ${of}`,
  waits: (n: number) => `${number.format(n)}-mal weitergedacht`,
  readOf: (n: number, of: number, cached: number) =>
    `${number.format(n)} von ${tokens(of)}${cached > 0 ? `, ${number.format(cached)} aus dem Cache` : ""}`,
  readingBar: "Wie viel der Frage gelesen ist",
  seconds,

  call: {
    running: "läuft",
    waiting: "wartet auf dich",
    done: (ms: number | null) => (ms === null ? "fertig" : took(ms)),
    failed: (ms: number | null) => (ms === null ? "fehlgeschlagen" : `nach ${took(ms)} fehlgeschlagen`),
    denied: "abgelehnt",
    cut: "nicht beendet",
  },
  agents: {
    title: "Teilagenten",
    progress: (ended: number, of: number) => `${number.format(ended)} von ${number.format(of)} fertig`,
    ended: (failed: boolean, { tokens: n, seconds: s }: { tokens: number; seconds: number }) =>
      failed ? "fehlgeschlagen" : `${tokens(n)} · ${seconds(s)}`,
    task: "Aufgabe",
    tools: (names: readonly string[]) =>
      names.length === 0 ? "Er darf keine Werkzeuge aufrufen." : `Er darf ${names.join(", ")} aufrufen.`,
    answer: "Antwort",
  },
  callNamed: (name: string) => `Aufruf von ${name}`,
  arguments: "Argumente",
  output: "Ausgabe",
  result: "Ergebnis",
  noResult: "Es gab keinen Text.",
  truncated: (n: number) =>
    `${count(n, "weiteres Zeichen wurde", "weitere Zeichen wurden")} dem Modell nicht gezeigt.`,
  untrusted: "Das kann jemand anders geschrieben haben.",
  progressOf: (name: string) => `Fortschritt von ${name}`,
  toolSources: "Quellen dieses Ergebnisses",
  reduced: (thinking: number | null, models: readonly string[] | null) =>
    models === null
      ? `Viele warten, deshalb darf es höchstens ${thinking} Tokens lang nachdenken.`
      : `Viele warten, deshalb wurde nur ${models.join(", ")} gefragt.`,
  limit: {
    steps: "Es darf keine Werkzeuge mehr aufrufen: Die Grenze der Schritte ist erreicht.",
    tokens: "Es darf keine Werkzeuge mehr aufrufen: Die Grenze der Tokens ist erreicht.",
    seconds: "Es darf keine Werkzeuge mehr aufrufen: Die Zeit ist abgelaufen.",
    context: "Es darf keine Werkzeuge mehr aufrufen: Der Kontext des Modells ist voll.",
  },

  approvalOf: (name: string) => `${name} braucht deine Zustimmung`,
  risk: { low: "geringes Risiko", medium: "mittleres Risiko", high: "hohes Risiko" },
  preview: "Was genau getan würde",
  allowOnce: "Einmal erlauben",
  allowAlways: "Immer erlauben",
  deny: "Ablehnen",
  allowNever: "Nie erlauben",
  covers: "„Immer“ und „nie“ gelten für",
  scope: { arguments: "genau diesen Aufruf", tool: (name: string) => `jeden Aufruf von ${name}` },
  left: (s: number) => `noch ${s < 60 ? `${Math.ceil(s)} s` : seconds(s)}`,
  tooLate: "Die Zeit zum Antworten ist vorbei.",
  decided: {
    once: "Du hast das einmal erlaubt.",
    always: "Du hast das erlaubt, jetzt und künftig.",
    no: "Du hast das abgelehnt.",
    never: "Du hast das abgelehnt, jetzt und künftig.",
    expired: "Niemand antwortete rechtzeitig, deshalb wurde es nicht getan.",
    gone: "Die Antwort endete, bevor darüber entschieden war.",
  },
  sending: "Wird gesendet…",
  notTaken: (why: string) => `Das wurde nicht angenommen. ${why}`,
  questionOf: (name: string) => `${name} fragt`,
  yourAnswer: "Deine Antwort",
  answer: "Antworten",
  youAnswered: (text: string) => `Deine Antwort: ${text}`,
  nobodyAnswered: "Niemand antwortete rechtzeitig.",
  announceApproval: (name: string) => `${name} braucht deine Zustimmung.`,
  announceQuestion: (name: string, text: string) => `${name} fragt: ${text}`,

  sources: "Quellen",
  nearest: "Die nächstliegenden Stellen",
  cite: (n: string, title: string, page: number | null) => `Quelle ${n}: ${place(title, page)}`,
  citeElsewhere: (n: string, title: string, page: number | null) =>
    `Quelle ${n}, obwohl die Antwort eine andere nannte: ${place(title, page)}`,
  citePartial: (n: string, title: string, page: number | null) =>
    `Quelle ${n} sagt das nur zum Teil: ${place(title, page)}`,
  unsupported: "ohne Quelle",
  unsupportedLong: "Keine der Quellen sagt das",
  beside: "beantwortet es wohl nicht",
  besideLong: "Eine Quelle sagt das, doch es scheint die Frage nicht zu beantworten",
  page: (n: number) => `Seite ${n}`,
  passage: (title: string) => `Stelle aus ${title}`,
  passageText: "Die Stelle",
  cited: "was die Antwort stützt",
  score: (it: number) => `Wert ${part(it)}`,
  noEvidence: "Nichts in den Dokumenten scheint das zu beantworten, deshalb wurde das Modell nicht gefragt.",
  partly: "Die Dokumente scheinen das zum Teil zu beantworten.",
  lookedFor: (questions: readonly string[]) => `Gesucht: ${questions.map((each) => `„${each}“`).join(", ")}`,

  routedAway: (model: string, why: string) => `${model} war nicht sicher genug${why ? ` (${why})` : ""}`,
  routedTo: (model: string, ended: boolean) => `${model} ${ended ? "hat geantwortet" : "antwortet"}`,
  routed: "Welches Modell antwortet",

  search: "Suche",
  nothingFound: "Die Suche endete ohne Antwort.",
  states: (n: number) => count(n, "Zustand", "Zustände"),
  ended: {
    found: "gefunden",
    exhausted: "nichts mehr zu versuchen",
    depth: "tiefste Ebene erreicht",
    tokens: "Grenze der Tokens erreicht",
    nodes: "Grenze der Zustände erreicht",
    seconds: "Zeit abgelaufen",
  },
  best: (it: number) => `bester ${part(it)}`,
  stateScore: part,
  pruned: {
    beam: "ausgelassen: andere waren besser",
    threshold: "ausgelassen: zu schlecht bewertet",
    hopeless: "ausgelassen: führt nirgendwohin",
    context: "ausgelassen: zu lang für den Kontext",
  },
  onTheWay: "auf dem Weg zur Antwort",
  start: "Anfang",
  asTree: "Baum",
  asList: "Liste",
  views: "Die Suche zeigen als",
  treeHelp:
    "Baum der Suche. Die Pfeiltasten gehen zwischen Zuständen, plus und minus vergrößern und verkleinern, 0 zeigt alles.",
  zoomIn: "Vergrößern",
  zoomOut: "Verkleinern",
  fit: "Alles zeigen",
  merged: (n: number) => `${count(n, "weiterer Schritt führte", "weitere Schritte führten")} hierher`,

  candidates: (n: number) => count(n, "Antwort geschrieben", "Antworten geschrieben"),
  stoppedEarly: "früh beendet",
  candidate: (n: number) => `Antwort ${n}`,
  chosen: "gewählt",
  vote: (text: string) => `stimmt für ${text}`,
  candidateScore: (it: number) => `Wert ${number.format(Math.round(it * 1000) / 1000)}`,
  abandoned: (n: number) => `${count(n, "Antwort wurde", "Antworten wurden")} nicht zu Ende geschrieben`,
  tokens,
  told: (n: number) => `Unterwegs gemeldet (${n})`,

  copy: "Kopieren",
  copied: "Kopiert",
  copyAnswer: "Antwort kopieren",

  rate: (perSecond: number) =>
    `${perSecond < 10 ? decimal(perSecond, 1) : number.format(Math.round(perSecond))} Tokens/s`,
  firstToken: (s: number) => `erstes Token nach ${s < 1 ? `${Math.round(s * 1000)} ms` : seconds(s)}`,
  written: (n: number) => `${tokens(n)} geschrieben`,
  read: (n: number, cached: number) =>
    `${tokens(n)} gelesen${cached > 0 ? ` (${number.format(cached)} aus dem Cache)` : ""}`,
  metrics: "Tempo und Größe dieser Antwort",

  stopped: "Du hast diese Antwort angehalten.",
  cutShort: (limit: number | null) =>
    `Die Antwort endet hier, weil ihre Grenze${limit === null ? "" : ` von ${tokens(limit)}`} erreicht ist.`,
  endedEarly: {
    repetition: "Angehalten: Die Antwort wiederholte sich.",
    sources: "Angehalten: Die Antwort wurde länger als ihre Quellen.",
  },
  memory: "Gedächtnis",
  diffusion: "Maskierte Diffusion",
  forgotten: "Was weiter oben steht, sieht das Modell nicht mehr.",
  unshown: "Diese Nachricht ließ sich nicht darstellen. Das ist ihr Text:",
  announceDone: (text: string) => `Antwort: ${text}`,
  announceStopped: "Angehalten.",
  announceFailed: (why: string) => `Die Antwort ist fehlgeschlagen. ${why}`,

  retry: "Noch einmal",
  linkLost: "Die Verbindung ging verloren.",
  tryingAgain: "Neuer Versuch…",
  tryingAgainIn: (s: number) => `Neuer Versuch in ${Math.ceil(s)} s`,
  tryNow: "Jetzt versuchen",
  unreachable: "Der Server ist nicht zu erreichen. Läuft er?",
  busy: "In diesem Chat wird schon geantwortet, vielleicht in einem anderen Tab.",
  busyHere: "In diesem Chat wird gerade geantwortet. Warte die Antwort ab, oder brich sie ab.",
  endings: {
    server_restarted: "Der Server wurde neu gestartet, während diese Antwort geschrieben wurde.",
    server_lost: "Der Server, der diese Antwort schrieb, ist ausgefallen.",
    server_stopping: "Der Server wurde angehalten, während diese Antwort geschrieben wurde.",
    engine_stopped: "Die Engine fiel aus, während diese Antwort geschrieben wurde.",
  },
  kept: "Was schon da war, ist erhalten.",
  failed: "Die Antwort konnte nicht beendet werden.",
  loading: "Der Chat wird geladen…",
  loadingPage: "Wird geladen…",
  noPage: "An dieser Adresse gibt es nichts.",
  missing: "Diesen Chat gibt es nicht. Vielleicht wurde er gelöscht.",
};
