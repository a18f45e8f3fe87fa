import { branch, list, remote } from "./en/chats";
import type { Budget, ToolInfo } from "../api";
import type { NumberField, TextField, Value } from "../asking/options";
import type { SamplingName } from "../asking/sampling";
import type { Conflict, ControlName, Gone, Part } from "../asking/settings";
import { numbersOf } from "./numbers";

/** Every word the page says, in English. Another language is another file like this one. */
const number = numbersOf("en", ",");
const seconds = (s: number): string => (s < 60 ? `${s.toFixed(1)} s` : `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`);
const count = (n: number, one: string, many: string): string => `${number.format(n)} ${n === 1 ? one : many}`;
const tokens = (n: number): string => count(n, "token", "tokens");
const part = (value: number): string => value.toFixed(2);
const place = (title: string, page: number | null): string => (page === null ? title : `${title}, page ${page}`);
const took = (ms: number): string => (ms < 1000 ? `${Math.round(ms)} ms` : seconds(ms / 1000));

const bounds = ({ whole, least, above, most, below }: NumberField): string => {
  const end = (word: string, bound: number | null): string => (bound === null ? "" : ` ${word} ${number.format(bound)}`);
  const from = end("from", least) || end("above", above);
  const up = from === "" ? "up to" : "to";
  const to = end(up, most) || end(`${up} below`, below);
  return `${whole ? "a whole number" : "a number"}${from}${to}`;
};
const value = (it: Value): string => (typeof it === "boolean" ? (it ? "on" : "off") : String(it));
const named = (name: string): string => {
  const words = name.replaceAll("_", " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
};
const several = (names: "all" | readonly string[]): string =>
  names === "all" ? "all" : names.length > 3 ? number.format(names.length) : names.join(", ");
const short = (text: string): string => (text.length > 40 ? `${text.slice(0, 39).trim()}…` : text);
const sampling: Record<SamplingName, { label: string; about: string }> = {
  temperature: { label: "Temperature", about: "0 always takes the likeliest word; higher is more varied." },
  top_p: { label: "Top p", about: "Only the likeliest words that make up this share; 1 is off." },
  top_k: { label: "Top k", about: "Only so many of the likeliest words; 0 is off." },
  min_p: { label: "Min p", about: "Only words at least this likely beside the likeliest; 0 is off." },
  repetition_penalty: { label: "Repetition penalty", about: "Above 1, words that stand anywhere before get rarer." },
  presence_penalty: { label: "Presence penalty", about: "Above 0, words that the answer has used get rarer." },
  frequency_penalty: { label: "Frequency penalty", about: "The same, by how often they were used." },
  seed: { label: "Seed", about: "The same number draws the same words again." },
};
const control: Record<ControlName, string> = {
  model: "Model",
  thinking: "Thinking",
  strategy: "Strategy",
  tools: "Tools",
  documents: "Documents",
  system: "System prompt",
  sampling: "Sampling",
};
const partTitle: Record<Part, string> = {
  model: control.model,
  effort: control.thinking,
  strategy: control.strategy,
  tools: control.tools,
};

export const en = {
  branch,
  list,
  remote,
  product: "Ponder",
  skip: "Skip to the message box",

  newChat: "New chat",
  presets: "Assistants",
  chats: "Chats",
  openChats: "Open the list of chats",
  close: "Close",
  noChats: "Chats you begin will be listed here.",
  untitled: "Untitled chat",

  help: "Keys and language",
  keys: {
    send: "Send the message",
    line: "Start a new line",
    stop: "Stop the answer",
    write: "Go to the message box",
    prompts: "Saved prompts, in an empty message box",
    newChat: "New chat",
    search: "Search the chats",
    above: "The chat above in the list",
    below: "The chat below",
    undo: "Take back a deletion",
    help: "This page of keys",
  },
  keyNames: { ctrl: "Ctrl", shift: "Shift" },
  language: "Language",
  browsersLanguage: "As the browser",

  signOut: (name: string) => `Sign out (${name})`,
  operator: "Operator’s page",

  theme: { system: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" },

  welcome: "Ask, and watch it think.",
  starters: "Start with one of these",
  speech: {
    read: "Read aloud",
    stop: "Stop reading",
    dictate: "Dictate",
    about: "Dictate. Your browser turns speech into text, and may send what it hears to its maker for that.",
    aboutServer: "Dictate. What you say is recorded and written down by the audio server that this one is set to use.",
    failed: (error: string) => `Nothing could be heard${error === "not-allowed" ? ": the microphone is not allowed." : "."}`,
  },
  example: {
    tool: "Call a tool",
    document: "Ask a document",
    sum: "What is 417 * 23?",
    aboutDocument: "Who built the lighthouse? A page about it is added to your documents.",
    reading: "Reading the page…",
    failed: (message: string) => `The sample document could not be added. ${message || "The server could not be reached."}`,
  },
  facts: (context: number) => `${number.format(context)} tokens of context`,

  message: "Message",
  placeholder: "Write a message",
  send: "Send",
  waitsForFiles: "Your message goes as soon as its files are read.",
  addFiles: "Add files",
  pictures: {
    list: "Pictures",
    add: "Show a picture",
    added: (name: string) => `${name || "The picture"} is shown with the next message.`,
    alt: (number: number, name: string) => (name ? `Picture ${number}: ${name}` : `Picture ${number}`),
    remove: (name: string) => `Take away ${name}`,
    unseen: "This model reads text alone. Choose one that sees to show it a picture.",
    unread: (name: string) => `${name} is no picture that this browser reads.`,
    most: (count: number) => `A message has at most ${count} pictures.`,
  },
  stop: "Stop",
  stopping: "Stopping…",
  hint: "Enter sends, Shift + Enter starts a new line, Esc stops",
  latest: "Jump to the latest",

  settings: "How to answer",
  control,
  controlSet: (title: string, what: string) => (what === "" ? title : `${title}: ${what}`),
  usual: "As usual",
  on: "on",
  reset: "Reset",
  resetAll: "Reset how to answer",
  dismiss: "Dismiss",
  modelTitle: "Which model answers next",
  usualModel: (name: string) => `${name}, as usual`,
  auto: "The small model answers first, a larger one where that is not enough.",
  effortTitle: "How much it may think",
  usualEffort: "As much as the model thinks by itself.",
  effort: { none: "None", minimal: "Minimal", low: "Low", medium: "Medium", high: "High", xhigh: "Very high" },
  effortNone: "It answers at once.",
  budgetWords: ({ min_tokens: least, max_tokens: most, waits }: Budget) => {
    const ends = [least > 0 ? `at least ${tokens(least)}` : "", most === null ? "" : `at most ${tokens(most)}`];
    const length = ends.filter(Boolean).join(", ");
    const forced = waits > 0 ? `made to think on ${count(waits, "time", "times")}` : "";
    const told = [length, forced].filter(Boolean).join(", ");
    return told === "" ? "Without a limit." : `${told.charAt(0).toUpperCase()}${told.slice(1)}.`;
  },
  strategyTitle: "How the answer is found",
  usualStrategy: "None",
  usualStrategyAbout: "The model simply answers.",
  optionsOf: (name: string) => `Options of ${name}`,
  moreOptions: "More options",
  named,
  value,
  usualValue: (it: Value | null) => (it === null ? "as usual" : `${value(it)}, as usual`),
  bounds: (field: NumberField) => `Accepted: ${bounds(field)}.`,
  wrong: (field: NumberField | TextField) =>
    field.kind === "number"
      ? `Not taken. Accepted: ${bounds(field)}.`
      : `Not taken. Accepted: up to ${number.format(field.longest ?? 0)} characters.`,
  several,
  toolsTitle: "What the model may call",
  noTools: "None",
  allTools: (n: number) => `All ${number.format(n)}`,
  someTools: "Some",
  chooseSome: "Choose at least one.",
  permission: {
    none: "touches nothing",
    read: "reads",
    write: "writes",
    network: "uses the network",
    execute: "runs code",
  } satisfies Record<ToolInfo["permission"], string>,
  approval: {
    never: "",
    once: "asks once in a chat",
    always: "asks first",
  } satisfies Record<ToolInfo["approval"], string>,
  whatToolsMayDo: "What tools may do",
  mayBeCalled: "May be called at all",
  permissionClass: {
    none: "Tools that touch nothing",
    read: "Tools that read",
    network: "Tools that use the network",
    write: "Tools that write",
    execute: "Tools that run code",
  } satisfies Record<ToolInfo["permission"], string>,
  remembered: "Remembered answers",
  nothingRemembered: "None. “Always allow” and “Never allow” are remembered here.",
  rememberedAs: (allow: boolean, tool: string) => `${tool}: ${allow ? "always allowed" : "never allowed"}`,
  forget: "Forget",
  toolsOff: (n: number) => `Not there (${number.format(n)})`,
  skills: (n: number) => `Skills (${number.format(n)})`,
  skillsTitle: "Which skills the model may read",
  usualSkills: "All, if its tools have read_skill",
  allSkills: "All",
  someSkills: "Those chosen",
  noSkills: "None is chosen: it reads none.",
  documentsTitle: "Answer from documents",
  noDocuments: "No",
  ownDocuments: "From my collections",
  allDocuments: "From all of them, shared ones too",
  someDocuments: "From some collections",
  documents: (n: number) => count(n, "document", "documents"),
  samplingTitle: "How the words are chosen",
  guesses: "Show guessed tokens",
  guessesAbout: "Text that was guessed ahead, and that the model then chose itself, is coloured. It is the same text either way.",
  systemTitle: "What the model reads before everything",
  systemPlaceholder: "You are…",
  systemAbout: "The system prompt: who it is to be, and how it is to answer. It is sent with every question.",
  systemTooLong: (n: number, most: number) =>
    `Not taken: ${number.format(n)} characters. Accepted: up to ${number.format(most)}.`,
  sampling,
  maxTokens: "Most tokens of the answer",
  maxTokensAbout: "Thinking counts too. As usual: as far as the context reaches.",
  conflict: ({ kind, name }: Conflict) =>
    ({
      "auto-tools": "With “auto” there are no tools.",
      "auto-strategy": "With “auto” the one strategy is budget.",
      "effort-strategy": "An amount of thinking and a strategy do not go together.",
      "none-budget": "The strategy budget is about thinking, which is set to none.",
      "strategy-tools": `The strategy ${named(name)} takes no tools.`,
      unthinking: `${name} does not think.`,
      toolless: `${name} takes no tools.`,
    })[kind],
  first: (part: Part) => `To choose this, change “${partTitle[part]}” first.`,
  said: {
    model: (name: string) => `Model: ${name}`,
    effort: (label: string) => `Thinking: ${label.toLowerCase()}`,
    strategy: (name: string, options: readonly [string, Value][]) => {
      const set = options.map(([key, it]) => `${named(key).toLowerCase()} ${value(it)}`).join(", ");
      return `Strategy: ${named(name)}${set === "" ? "" : ` (${set})`}`;
    },
    tools: (names: "all" | readonly string[]) => `Tools: ${several(names)}`,
    skills: (names: "all" | readonly string[]) => (names.length === 0 ? "No skills" : `Skills: ${several(names)}`),
    documents: (names: "own" | "all" | readonly string[]) =>
      names === "own" ? "From my documents" : names === "all" ? "From all documents" : `From ${names.join(", ")}`,
    system: (text: string) => `System prompt: “${short(text)}”`,
    sampling: (name: SamplingName, it: number) => `${sampling[name].label} ${it}`,
    maxTokens: (n: number) => `At most ${tokens(n)}`,
  },
  gone: ({ what, name }: Gone) =>
    ({
      model: `The model “${name}” is not there any more.`,
      effort: `The amount of thinking “${name}” is not there any more.`,
      strategy: `The strategy “${name}” is not there any more.`,
      option: `The option “${name}” of the strategy is not as it was.`,
      tool: `The tool “${name}” is not there any more.`,
      skill: `The skill “${name}” is not there any more.`,
      tools: "There are no tools any more.",
      collections: "Some of the documents to answer from are not there any more.",
      conflict: `What was set for “${partTitle[name as Part]}” does not go with the rest any more.`,
    })[what],
  goneEnd: "That was left out.",

  you: "You",
  conversation: "Conversation",
  thinking: "Thinking…",
  doing: {
    reading: "Reading…",
    searching: "Searching…",
    comparing: "Comparing answers…",
    checking: "Checking the sentence…",
    thinking: "Thinking…",
  },
  queued: (ahead: number) => `Waiting, ${count(ahead, "request", "requests")} ahead`,
  thought: (s: number | null, n: number | null) =>
    ["Thought", s === null ? "" : ` for ${seconds(s)}`, n === null ? "" : ` · ${tokens(n)}`].join(""),
  thoughtCut: "Thinking, cut short",
  trace: "What the model thought",
  budget: "Budget of thinking",
  spent: (n: number, of: number) => `${number.format(n)} of ${tokens(of)}`,
  wait: (n: number, of: number) => `made to think on, ${n} of ${of}`,
  waits: (n: number) => count(n, "wait", "waits"),
  readOf: (n: number, of: number, cached: number) =>
    `${number.format(n)} of ${tokens(of)}${cached > 0 ? `, ${number.format(cached)} from cache` : ""}`,
  readingBar: "Read of what was asked",
  seconds,

  call: {
    running: "running",
    waiting: "waits for you",
    done: (ms: number | null) => (ms === null ? "done" : took(ms)),
    failed: (ms: number | null) => (ms === null ? "failed" : `failed after ${took(ms)}`),
    denied: "denied",
    cut: "not finished",
  },
  agents: {
    title: "Sub-agents",
    progress: (ended: number, of: number) => `${number.format(ended)} of ${number.format(of)} done`,
    ended: (failed: boolean, { tokens: n, seconds: s }: { tokens: number; seconds: number }) =>
      failed ? "failed" : `${tokens(n)} · ${seconds(s)}`,
    task: "Task",
    tools: (names: readonly string[]) => (names.length === 0 ? "It may call no tools." : `It may call ${names.join(", ")}.`),
    answer: "Answer",
  },
  callNamed: (name: string) => `Call of ${name}`,
  arguments: "Arguments",
  output: "Output",
  result: "Result",
  noResult: "It gave no text.",
  truncated: (n: number) => `${count(n, "more character was", "more characters were")} not shown to the model.`,
  untrusted: "Somebody else may have written this.",
  progressOf: (name: string) => `Progress of ${name}`,
  toolSources: "Sources of this result",
  reduced: (thinking: number | null, models: readonly string[] | null) =>
    models === null
      ? `Many are waiting, so it may think ${thinking} tokens at most.`
      : `Many are waiting, so only ${models.join(", ")} was asked.`,
  limit: {
    steps: "It may call no more tools: the limit of steps is reached.",
    tokens: "It may call no more tools: the limit of tokens is reached.",
    seconds: "It may call no more tools: the limit of time is reached.",
    context: "It may call no more tools: the model’s context is full.",
  },

  approvalOf: (name: string) => `${name} needs your approval`,
  risk: { low: "low risk", medium: "medium risk", high: "high risk" },
  preview: "What would be done, exactly",
  allowOnce: "Allow once",
  allowAlways: "Always allow",
  deny: "Deny",
  allowNever: "Never allow",
  covers: "“Always” and “never” cover",
  scope: { arguments: "exactly this call", tool: (name: string) => `every call of ${name}` },
  left: (s: number) => `${s < 60 ? `${Math.ceil(s)} s` : seconds(s)} left`,
  tooLate: "The time to answer is over.",
  decided: {
    once: "You allowed this once.",
    always: "You allowed this, now and later.",
    no: "You denied this.",
    never: "You denied this, now and later.",
    expired: "Nobody answered in time, so it was not done.",
    gone: "The run ended before this was answered.",
  },
  sending: "Sending…",
  notTaken: (why: string) => `That was not taken. ${why}`,
  questionOf: (name: string) => `${name} asks`,
  yourAnswer: "Your answer",
  answer: "Answer",
  youAnswered: (text: string) => `You answered: ${text}`,
  nobodyAnswered: "Nobody answered in time.",
  announceApproval: (name: string) => `${name} needs your approval.`,
  announceQuestion: (name: string, text: string) => `${name} asks: ${text}`,

  sources: "Sources",
  nearest: "The nearest passages",
  cite: (n: string, title: string, page: number | null) => `Source ${n}: ${place(title, page)}`,
  citeElsewhere: (n: string, title: string, page: number | null) =>
    `Source ${n}, though the answer named another: ${place(title, page)}`,
  citePartial: (n: string, title: string, page: number | null) =>
    `Source ${n} says this only in part: ${place(title, page)}`,
  unsupported: "no source",
  unsupportedLong: "None of the sources says this",
  beside: "may not answer",
  besideLong: "A source says this, but it does not seem to answer the question",
  page: (n: number) => `page ${n}`,
  passage: (title: string) => `Passage of ${title}`,
  passageText: "The passage",
  cited: "what supports the answer",
  score: (value: number) => `score ${part(value)}`,
  noEvidence: "Nothing in the documents seems to answer this, so the model was not asked.",
  partly: "The documents seem to answer this in part.",
  lookedFor: (questions: readonly string[]) => `Looked for: ${questions.map((each) => `“${each}”`).join(", ")}`,

  routedAway: (model: string, why: string) => `${model} was not sure enough${why ? ` (${why})` : ""}`,
  routedTo: (model: string, ended: boolean) => `${model} ${ended ? "answered" : "answers"}`,
  routed: "Which model answers",

  search: "Search",
  nothingFound: "The search ended without an answer.",
  states: (n: number) => count(n, "state", "states"),
  ended: {
    found: "found",
    exhausted: "nothing left to try",
    depth: "deepest level reached",
    tokens: "limit of tokens reached",
    nodes: "limit of states reached",
    seconds: "limit of time reached",
  },
  best: (value: number) => `best ${part(value)}`,
  stateScore: part,
  pruned: {
    beam: "left out: others were better",
    threshold: "left out: scored too low",
    hopeless: "left out: it leads nowhere",
    context: "left out: too long for the context",
  },
  onTheWay: "on the way to the answer",
  start: "Start",
  asTree: "Tree",
  asList: "List",
  views: "Show the search as",
  treeHelp: "Tree of the search. Arrow keys move between states, plus and minus zoom, 0 shows all of it.",
  zoomIn: "Zoom in",
  zoomOut: "Zoom out",
  fit: "Show all of it",
  merged: (n: number) => `${count(n, "step", "steps")} led here again`,

  candidates: (n: number) => count(n, "answer written", "answers written"),
  stoppedEarly: "stopped early",
  candidate: (n: number) => `Answer ${n}`,
  chosen: "chosen",
  vote: (text: string) => `votes for ${text}`,
  candidateScore: (value: number) => `score ${number.format(Math.round(value * 1000) / 1000)}`,
  abandoned: (n: number) => `${count(n, "answer was", "answers were")} not written to the end`,
  tokens,
  told: (n: number) => `Reported on the way (${n})`,

  copy: "Copy",
  copied: "Copied",
  copyAnswer: "Copy the answer",

  rate: (perSecond: number) => `${perSecond < 10 ? perSecond.toFixed(1) : number.format(Math.round(perSecond))} tokens/s`,
  firstToken: (s: number) => `first token in ${s < 1 ? `${Math.round(s * 1000)} ms` : seconds(s)}`,
  written: (n: number) => `${tokens(n)} out`,
  read: (n: number, cached: number) =>
    `${tokens(n)} in${cached > 0 ? ` (${number.format(cached)} from cache)` : ""}`,
  metrics: "Speed and size of this answer",

  stopped: "You stopped this answer.",
  cutShort: (limit: number | null) =>
    `The answer ends here because it reached its limit${limit === null ? "" : ` of ${tokens(limit)}`}.`,
  endedEarly: {
    repetition: "Stopped: the answer repeated itself.",
    sources: "Stopped: the answer grew longer than its sources.",
  },
  memory: "Memory",
  diffusion: "Masked diffusion",
  forgotten: "The model no longer sees what was said above.",
  unshown: "This message could not be shown. This is its text:",
  announceDone: (text: string) => `Answer: ${text}`,
  announceStopped: "Stopped.",
  announceFailed: (why: string) => `The answer failed. ${why}`,

  retry: "Retry",
  linkLost: "The connection was lost.",
  tryingAgain: "Trying again…",
  tryingAgainIn: (s: number) => `Trying again in ${Math.ceil(s)} s`,
  tryNow: "Try now",
  unreachable: "The server cannot be reached. Is it running?",
  busy: "This chat is already being answered, perhaps in another tab.",
  busyHere: "This chat is being answered. Wait for the answer, or stop it.",
  endings: {
    server_restarted: "The server restarted while this answer was being written.",
    server_lost: "The server that wrote this answer was lost.",
    server_stopping: "The server was stopped while this answer was being written.",
    engine_stopped: "The engine failed while this answer was being written.",
  },
  kept: "What is there was kept.",
  failed: "The answer could not be finished.",
  loading: "Loading the chat…",
  loadingPage: "Loading…",
  noPage: "There is nothing at this address.",
  missing: "There is no such chat. It may have been deleted.",
};

export type Strings = typeof en;
