import type { Status, ToolInfo } from "../../api";
import type { Bottleneck, Key, Limit, Role, Stats } from "../../operator/api";

/** What the operator's page says, in English. */
const number = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });
const day = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeStyle: "short" });
const hour = new Intl.DateTimeFormat("en", { timeStyle: "medium" });
const count = (n: number, one: string, many: string): string => `${number.format(n)} ${n === 1 ? one : many}`;
const took = (s: number): string => (s < 1 ? `${short.format(s * 1000)} ms` : s < 100 ? `${short.format(s)} s` : lasted(s));
const lasted = (s: number): string => {
  const [days, hours, minutes] = [Math.floor(s / 86_400), Math.floor(s / 3600) % 24, Math.floor(s / 60) % 60];
  if (days > 0) return `${days} d ${hours} h`;
  if (hours > 0) return `${hours} h ${minutes} min`;
  return minutes > 0 ? `${minutes} min ${Math.floor(s) % 60} s` : `${Math.floor(s)} s`;
};
const bytes = (n: number): string => (n < 1e9 ? `${Math.round(n / 2 ** 20)} MiB` : `${short.format(n / 2 ** 30)} GiB`);

export const en = {
  title: "Operator",
  parts: "Parts of this page",
  part: { live: "Live", runs: "Runs", users: "Users and keys", tools: "Tools" },
  facts: (version: string, uptimeS: number, memory: number) =>
    [`Version ${version}`, `up ${lasted(uptimeS)}`, bytes(memory)].join(" · "),
  notYours: "This page is for operators. Another operator can make you one.",
  stale: (at: number) => `The server does not answer; this is how it was at ${hour.format(at * 1000)}.`,
  window: "Figures of",
  lastMinute: "Last minute",
  lastQuarter: "Last 15 minutes",

  ttft: "First token",
  interToken: "Between tokens",
  duration: "Whole answer",
  generated: "Tokens written",
  answering: "Being answered",
  memory: "KV blocks in use",
  memoryAbout: "of the fullest model",
  hits: "Found in the cache",
  errors: "Errors",
  median: "median",
  rest: (p95: number, p99: number) => `p95\u00a0${took(p95)} · p99\u00a0${took(p99)}`,
  took,
  noneYet: "nothing yet",
  perSecond: (n: number) => `${short.format(n)}/s`,
  read: (n: number) => `${short.format(n)}/s read`,
  cost: (n: number) => `a million costs ${short.format(n)}`,
  energy: ({ watts, source, wh_per_thousand_tokens: wattHours }: NonNullable<Stats["energy"]>): string => {
    if (watts === null) return "energy unknown: set power_watts";
    const counters = { rapl: "CPU and memory", nvml: "GPUs", "rapl+nvml": "CPU, memory and GPUs" };
    const what = source === null || source === "power_watts" ? "as set" : counters[source];
    const per = wattHours === null ? "" : `1,000 take ${short.format(wattHours)} Wh, `;
    return `${per}${short.format(watts)} W (${what})`;
  },
  ofClass: (priority: string, n: number) => `${number.format(n)} of class ${priority}`,
  queue: (running: number, waiting: number) => `${number.format(running)} running, ${number.format(waiting)} waiting`,
  percent: (n: number) => percent.format(n),
  sinceStart: (n: number | null) => (n === null ? "" : `${percent.format(n)} since the start`),
  number: (n: number) => number.format(n),
  ends: (by: Record<string, number>) =>
    Object.entries(by)
      .map(([how, n]) => `${number.format(n)} ${outcome[how] ?? how}`)
      .join(", "),
  chart: (what: string, least: string, most: string, last: string) =>
    `${what} over the last 15 minutes: ${least} to ${most}, now ${last}`,
  chartEmpty: (what: string) => `${what} over the last 15 minutes: nothing yet`,
  table: "The charts as a table",
  time: "Time",
  ago: (s: number) => (s === 0 ? "now" : `${lasted(s)} ago`),
  none: "–",

  engines: "Models",
  stopped: "The engine has stopped.",
  blocks: (used: number, adapters: number, cached: number, free: number) =>
    `KV blocks: ${number.format(used)} used, ${adapters === 0 ? "" : `${number.format(adapters)} of adapters, `}${number.format(cached)} cached, ${number.format(free)} free`,
  block: { used: "used", adapters: "of adapters", cached: "cached", free: "free" },
  blocksOf: (size: number) => `KV blocks of ${count(size, "token", "tokens")}`,
  sequences: (n: number) => count(n, "open sequence", "open sequences"),
  preemptions: (n: number) => count(n, "preemption", "preemptions"),
  heldBack: "What holds it back",
  limit: {
    idle: "Nothing: it has time to spare.",
    kv_memory: "Memory for K/V.",
    max_running: "The size of the batch.",
    host: "The host.",
    prefill: "Reading prompts.",
    bandwidth: "Memory bandwidth.",
    compute: "Computing.",
    decode: "Decoding.",
  } satisfies Record<Limit, string>,
  limitAbout: ({ limit, ...of }: Bottleneck): string => {
    const step = of.step_s === null ? "" : `A step takes ${took(of.step_s)} for ${short.format(of.rows)} sequences`;
    const twice = of.growth === null ? "" : `; for twice as many ${short.format(2 ** of.growth)} times as long`;
    switch (limit) {
      case "idle":
        return "";
      case "kv_memory":
        return `${percent.format(of.kv_used)} of the blocks were used, with ${count(of.preemptions, "preemption", "preemptions")} in the last minute.`;
      case "max_running":
        return `${short.format(of.waiting)} sequences wait on average while it is full.`;
      case "host":
        return `Steps take ${percent.format(of.busy)} of the time with work; the rest is tokenizing, tools and other programs.`;
      case "prefill":
        return `${percent.format(of.prompts)} of the steps’ time goes into prompts that the cache does not have.`;
      default:
        return `${step}${twice}.`;
    }
  },
  wouldHelp: "Would help:",
  drafts: "Drafts",
  accepted: (accepted: number, drafted: number) =>
    `${number.format(accepted)} of ${count(drafted, "guessed token", "guessed tokens")} accepted`,
  perStep: (n: number) => `${short.format(n)} tokens a step`,
  saved: (s: number) => (s < 0 ? `${took(-s)} lost` : `${took(s)} saved`),
  acceptance: (shares: readonly number[]) =>
    `Accepted by position in the draft: ${shares.map((share) => percent.format(share)).join(", ")}`,
  acceptedAt: (position: number, share: number) => `Position ${position}: ${percent.format(share)}`,
  byPosition: "accepted by position in the draft",
  errorCodes: "Errors by code",
  noErrors: "None.",
  settings: "Settings that are not as they come",
  asTheyCome: "All settings are as they come.",

  runsTitle: "The newest runs",
  runsAbout: "Without what was asked and answered.",
  noRuns: "There are no runs yet.",
  status: { running: "running", completed: "done", failed: "failed", cancelled: "stopped" } satisfies Record<Status, string>,
  begun: "Begun",
  user: "User",
  model: "Model",
  state: "State",
  lasted: "Took",
  tokens: "Tokens",
  rate: "Tokens/s",
  at: (s: number) => day.format(s * 1000),
  atHour: (s: number) => hour.format(s * 1000),

  usersTitle: "Users",
  keysTitle: "API keys",
  authOff: "This server asks nobody for a key: whoever reaches it is the user local. Keys count once it is started with",
  role: { operator: "operator", user: "user" } satisfies Record<Role, string>,
  roleOf: (id: string) => `Role of ${id}`,
  you: "you",
  newUser: "New user",
  id: "Id",
  idHint: "Small letters, digits, dots and dashes. It does not change.",
  name: "Name",
  roleTitle: "Role",
  optional: "optional",
  create: "Create",
  cancel: "Cancel",
  newKey: "New key",
  keyFor: "For",
  keyName: "What it is for",
  expires: "Valid",
  expiry: { never: "until it is revoked", day: "a day", month: "30 days", year: "a year" },
  madeKey: (user: string) => `A key of ${user}`,
  once: "Copy it now: it is not shown again.",
  copyKey: "Copy the key",
  copied: "Copied",
  done: "Done",
  noKeys: "There are no keys yet.",
  key: "Key",
  made: "Made",
  until: "Valid until",
  used: "Last used",
  never: "never",
  endless: "Does not expire",
  keyState: { valid: "valid", expired: "expired", revoked: "revoked", disabled: "user disabled" } satisfies Record<Key["state"], string>,
  scoped: (scopes: string): string => `for ${scopes}`,
  revoke: "Revoke",
  revokeNamed: (prefix: string, user: string) => `Revoke the key ${prefix}… of ${user}`,
  revokeSure: (current: boolean): string => (current ? "Revoke, and sign out?" : "Really revoke?"),
  spent: (tokens: number, cost: number | null, wattHours: number | null) =>
    `${count(tokens, "token", "tokens")} this month${cost === null ? "" : `, about ${short.format((tokens / 1e6) * cost)} at today’s cost`}${wattHours === null ? "" : `, about ${short.format((tokens / 1e3) * wattHours)} Wh at today’s rate`}`,
  limits: "Limits",
  limitsOf: (whose: string) => `Limits of ${whose}`,
  save: "Save",
  unlimited: "none of its own",
  scopes: "For these parts of the interface",
  models: "Models",
  allModels: "all; or names, with commas",
  forModels: (names: string): string => `models: ${names}`,
  quota: {
    requests_per_minute: "Requests a minute",
    tokens_per_minute: "Tokens a minute",
    concurrent_requests: "Requests at once",
    requests_per_day: "Requests a day",
    tokens_per_day: "Tokens a day",
    tokens_per_month: "Tokens a month",
    priority: "Best class",
    deadline_s: "Seconds an answer may take",
    max_output_tokens: "Tokens of an answer",
  } as Record<string, string>,
  delete: "Delete",
  deleteNamed: (id: string) => `Delete ${id} with all data`,
  deleteSure: "Really delete, with all data?",
  deleted: (id: string, chats: number, documents: number) =>
    `${id} is deleted, with ${count(chats, "chat", "chats")} and ${count(documents, "document", "documents")}.`,
  revoked: (prefix: string) => `The key ${prefix}… is revoked.`,

  toolsTitle: "Tools",
  from: "From",
  permission: {
    none: "touches nothing",
    read: "reads",
    write: "writes",
    network: "uses the network",
    execute: "runs code",
  } satisfies Record<ToolInfo["permission"], string>,
  approval: { never: "–", once: "once in a chat", always: "always" } satisfies Record<ToolInfo["approval"], string>,
  tool: "Tool",
  may: "What it does",
  asks: "Asks first",
  off: "Not there",
  faults: "Could not be loaded",
  allowedTitle: "What users let tools do",
  remembered: (n: number) => count(n, "answer remembered", "answers remembered"),
  nothingAllowed: "nothing",
};

const outcome: Record<string, string> = {
  completed: "done",
  cancelled: "stopped",
  refused: "refused",
  failed: "failed",
};

export type OperatorStrings = typeof en;
