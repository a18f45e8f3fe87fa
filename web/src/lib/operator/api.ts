/** The operator's part of the server's interface, typed. */
import { request, type Status, type ToolInfo } from "../api";

export interface Latency {
  count: number;
  p50: number;
  p95: number;
  p99: number;
}

/** The last `seconds`. */
export interface Window {
  seconds: number;
  ttft_s: Latency | null;
  inter_token_s: Latency | null;
  duration_s: Latency | null;
  requests: Record<string, number>; // by how they ended
  errors: Record<string, number>; // by code
  prompt_tokens_per_s: number;
  generated_tokens_per_s: number;
  prefix_hit_rate: number | null;
}

export interface Point {
  ttft_p50_s: number | null;
  inter_token_p50_s: number | null;
  generated_tokens_per_s: number;
  prompt_tokens_per_s: number;
  in_flight: number;
  blocks_share: number;
  errors: number;
}

export interface Engine {
  name: string;
  running: number;
  waiting: number;
  sequences: number;
  blocks: { used: number; adapters: number; cached: number; free: number };
  block_size: number;
  prefix_hit_rate: number | null;
  preemptions: number;
  speculation: Speculation | null; // null: nothing was drafted
  bottleneck: Bottleneck | null; // null: it was not looked at for long enough
}

export type Limit = "idle" | "kv_memory" | "max_running" | "host" | "prefill" | "bandwidth" | "compute" | "decode";

/** What limits an engine, by its last minute. Shares are of 1. */
export interface Bottleneck {
  limit: Limit;
  busy: number; // of the time with work, in steps
  prompts: number; // of the steps' time, in steps that read prompts
  rows: number; // sequences of a decode step
  step_s: number | null; // of a decode step
  growth: number | null; // exponent of a decode step's time in its sequences
  kv_used: number;
  waiting: number;
  preemptions: number;
  settings: string[]; // that would help
}

/** What became of drafts since the start. `acceptance` is the share that was right, by position in the draft. */
export interface Speculation {
  drafted: number;
  accepted: number;
  acceptance: number[];
  tokens_per_step: number;
  saved_s: number;
}

export interface Stats {
  at: number;
  version: string;
  uptime_s: number;
  memory_bytes: number;
  answering: number;
  by_priority: Record<string, number>; // requests under way by class
  windows: Window[];
  series: { step_s: number; points: Point[] };
  models: (({ stopped: false } & Engine) | { stopped: true; name: string })[];
  settings: Record<string, unknown>;
  energy?: {
    watts: number | null; // null: neither measured nor set
    source: "power_watts" | "rapl" | "nvml" | "rapl+nvml" | null;
    wh_per_thousand_tokens: number | null; // null: also where nothing passed
  };
  cost_per_million_tokens: number | null; // null: no price of the machine is set, or nothing passed
}

export interface RunRow {
  id: string;
  user: string;
  model: string;
  status: Status;
  error_code: string | null;
  created_at: number;
  ended_at: number | null;
  ttft_s: number | null;
  tokens_per_s: number | null;
  completion_tokens: number | null;
}

export interface RunsTold {
  by_status: Partial<Record<Status, number>>;
  runs: RunRow[];
}

export type Role = "operator" | "user";

export type Quota = Readonly<Record<string, number | null>>; // null: no limit of one's own

/** The parts of the interface that a key may be limited to. */
export const SCOPES = ["chat", "v1", "sequences", "documents", "tools", "metrics", "operator"] as const;

export interface User {
  id: string;
  name: string;
  role: Role;
  created_at: number;
  quota: Quota;
  models: readonly string[] | null; // null: all
  used: Used;
}

export interface Used {
  requests_today: number;
  tokens_today: number;
  tokens_this_month: number;
}

export interface Key {
  id: string;
  user: string;
  name: string;
  prefix: string;
  created_at: number;
  expires_at: number | null;
  revoked_at: number | null;
  used_at: number | null;
  scopes: readonly string[] | null; // null: everything
  models: readonly string[] | null; // null: all
  quota: Quota;
  state: "valid" | "expired" | "revoked" | "disabled";
  current: boolean; // the one that asks
}

export interface ToolsTold {
  tools: ToolInfo[];
  off: Record<string, string>;
  faults: { origin: string; message: string }[];
  users: { user: string; classes: ToolInfo["permission"][]; remembered: number }[];
}

const BASE = "/api/operator";

async function ask<T>(path: string, method = "GET", body?: object): Promise<T> {
  const init: RequestInit = { method };
  if (body !== undefined) {
    init.headers = { "content-type": "application/json" };
    init.body = JSON.stringify(body);
  }
  return (await (await request(BASE + path, init)).json()) as T;
}

export const getStats = (): Promise<Stats> => ask("/stats");
export const getRuns = (): Promise<RunsTold> => ask("/runs");
export const getOperatorsTools = (): Promise<ToolsTold> => ask("/tools");
export const getUsers = async (): Promise<User[]> => (await ask<{ users: User[] }>("/users")).users;
export const getKeys = async (): Promise<Key[]> => (await ask<{ keys: Key[] }>("/keys")).keys;
export const createUser = (id: string, name: string, role: Role): Promise<User> =>
  ask("/users", "POST", name === "" ? { id, role } : { id, name, role });
export const setRole = (id: string, role: Role): Promise<User> =>
  ask(`/users/${encodeURIComponent(id)}`, "PATCH", { role });
type Limits = { quota: Quota; models: readonly string[] | null };
export const setUserLimits = (id: string, limits: Limits): Promise<User> =>
  ask(`/users/${encodeURIComponent(id)}`, "PATCH", limits);
/** With all data, for ever. */
export const deleteUser = (id: string): Promise<{ chats: number; documents: number }> =>
  ask(`/users/${encodeURIComponent(id)}`, "DELETE");
export const setKeyLimits = (id: string, limits: Limits & { scopes: readonly string[] | null }): Promise<Key> =>
  ask(`/keys/${encodeURIComponent(id)}`, "PATCH", limits);
/** With the key itself, which is told this once. */
export const createKey = (user: string, name: string, expiresS: number | null): Promise<Key & { key: string }> =>
  ask("/keys", "POST", { user, name, expires_s: expiresS });
export const revokeKey = (id: string): Promise<Key> => ask(`/keys/${encodeURIComponent(id)}`, "DELETE");
