/** The server's HTTP interface, typed. Knows nothing of the page. */
import type { Schema, Value } from "./asking/options";
import type { Sampling } from "./asking/sampling";
import { clock } from "./clock";
import type { DiffusionModel } from "./diffusion/run";
import type { MessageFile } from "./documents/api";
import type { Usage } from "./protocol";

export interface ServerInfo {
  version: string;
  model: string;
  max_model_len: number;
  device: string;
  dtype: string;
  about: string;
  starters: string[];
  max_upload: number; // bytes
  audio?: AudioServer | null; // where there is one
  diffusion?: DiffusionModel | null; // likewise
}

/** What the server that hears and speaks is asked for. */
export interface AudioServer {
  transcription_model: string;
  speech_model: string;
  voice: string;
}

export interface ChatSummary {
  id: string;
  title: string;
  created_at: number; // seconds since the epoch
  updated_at: number;
  pinned: boolean;
  private: boolean; // it is kept from models of other servers
  folder_id: string | null;
  running?: boolean; // is an answer being made? Said in lists
  waiting_for?: "approval" | "answer" | null; // what it waits for from a person; said in lists
  settings?: KeptSettings | null; // null: none were kept; said of one chat, not in lists
}

export type Status = "running" | "completed" | "failed" | "cancelled";

/** What a step of an answer wrote, what it then called, and what came of it. */
export interface StoredStep {
  content: string;
  calls: { id: string; name: string; arguments: string }[];
  results: { call_id: string; text: string; untrusted: boolean }[];
}

export interface StoredMessage {
  id: string;
  parent_id?: string | null;
  role: "user" | "assistant";
  siblings?: string[]; // ids of all that stand in its place, the oldest first
  content: string;
  thinking: string;
  run_id: string | null;
  thinking_s: number | null;
  tokens_per_s: number | null;
  ttft_s?: number | null;
  steps?: StoredStep[];
  images?: string[]; // of a question, data: URLs
  files?: MessageFile[]; // of a question
  usage: Usage | null;
  model?: string | null; // that wrote it
  status: Status;
  error: string | null;
}

export interface Chat extends ChatSummary {
  messages: StoredMessage[];
  active_run_id: string | null;
  active_run_ids?: string[]; // several while answers are compared
  earlier?: number; // messages of the branch before these
}

export interface StartedRun {
  run_id: string;
  message_id: string; // the answer's
  question_id: string;
}

/** What is to be answered: a new question, below an answer or at the beginning, or one that stands there already. */
export type Place =
  | { content: string; images?: readonly string[]; files?: readonly string[]; parent_id?: string | null }
  | { regenerate: string; compare?: true }; // compare: while other answers to it are being made

export type Effort = "none" | "minimal" | "low" | "medium" | "high" | "xhigh";

/** How an answer is to be made, as fields of a run's request. */
export interface Wishes extends Sampling {
  model?: string;
  reasoning_effort?: Effort;
  strategy?: string;
  strategy_options?: Record<string, Value>;
  tools?: "all" | readonly string[];
  skills?: "all" | readonly string[];
  collections?: "own" | "all" | readonly number[]; // all: also those that others share
  system?: string;
  max_tokens?: number;
}

/** The same of one run; null takes away what the chat keeps. */
export type RunWishes = Omit<Wishes, "model" | "strategy"> & { model?: string | null; strategy?: string | null };

/** How a chat's answers are made, as the server keeps it. */
export interface KeptSettings extends Wishes {
  thinking?: boolean | Record<string, Value>;
}

/** How much an answer may think. */
export interface Budget {
  min_tokens: number;
  max_tokens: number | null;
  waits: number;
  wait_text: string;
}

/** `thinks`, `tools` and `sees`: whether it does, takes any, and reads pictures. `embeds`: it answers nothing. `remote`: another server's, or `auto` that may ask one. */
export interface Model {
  id: string;
  remote?: boolean;
  embeds?: boolean;
  thinks?: boolean;
  tools?: boolean;
  sees?: boolean;
}

export interface StrategyInfo {
  name: string;
  about: string;
  options: Schema;
  origin: string;
}

export interface ToolInfo {
  name: string;
  description: string;
  permission: "none" | "read" | "write" | "network" | "execute";
  approval: "never" | "once" | "always";
  origin: string;
}

export type Permission = ToolInfo["permission"];

/** An answer to an approval that holds for later calls too. */
export interface Remembered {
  id: string;
  tool: string;
  scope: Scope;
  preview: string; // of the call that it was given for
  allow: boolean;
}

/** Which classes of tools may be called at all, and what was answered once and for all. */
export interface Permissions {
  classes: Permission[];
  remembered: Remembered[];
}

export interface Collection {
  id: number;
  name: string;
  documents: number;
}

/** What the server refused and why, or status 0 when it could not be reached. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly param: string | null = null, // the field that is at fault
    readonly retryAfterS: number | null = null, // when it may go better
  ) {
    super(message);
    this.name = "ApiError";
  }
}

type Gate = (signal: AbortSignal | null | undefined) => Promise<void>;
let gate: Gate | null = null;

/** What a request waits for that is refused because nobody is signed in. It is then made again: nothing came of it. */
export function onUnauthorised(wait: Gate): void {
  gate = wait;
}

/** Waits until somebody has signed in; false where nobody is asked to. */
export async function signedIn(signal?: AbortSignal | null): Promise<boolean> {
  await gate?.(signal);
  return gate !== null;
}

export async function request(path: string, init: RequestInit = {}): Promise<Response> {
  const sent = Date.now() / 1000;
  let response: Response;
  try {
    response = await fetch(path, init);
  } catch (cause) {
    if (init.signal?.aborted) throw cause;
    throw new ApiError(0, "unreachable", "");
  }
  clock.observe(response.headers.get("date"), sent, Date.now() / 1000);
  if (response.ok) return response;
  const refused = await refusal(response);
  if (refused.status !== 401 || path === "/api/session" || !(await signedIn(init.signal))) throw refused;
  return request(path, init);
}

async function refusal(response: Response): Promise<ApiError> {
  try {
    const { error } = (await response.json()) as {
      error: { message?: string; code?: string | null; param?: string | null };
    };
    const wait = Number(response.headers.get("retry-after") || NaN);
    const retryAfterS = Number.isFinite(wait) ? wait : null;
    return new ApiError(response.status, error.code ?? "", error.message ?? "", error.param ?? null, retryAfterS);
  } catch {
    return new ApiError(response.status, "", "");
  }
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await (await request(path, signal ? { signal } : {})).json()) as T;
}

export function send(method: string, path: string, body: object, more: Record<string, string> = {}): Promise<Response> {
  const headers = { "content-type": "application/json", ...more };
  return request(path, { method, headers, body: JSON.stringify(body) });
}

export const post = (path: string, body: object): Promise<Response> => send("POST", path, body);

export const chatPath = (id: string): string => `/api/chats/${encodeURIComponent(id)}`;
const runPath = (id: string): string => `/api/runs/${encodeURIComponent(id)}`;

/** A recording's words. */
export async function transcribed(sound: Blob, { transcription_model: model }: AudioServer): Promise<string> {
  const form = new FormData();
  form.set("model", model);
  form.set("file", sound, `recording.${/\/(\w+)/.exec(sound.type)?.[1] ?? "webm"}`);
  const reply = await request("/v1/audio/transcriptions", { method: "POST", body: form });
  return ((await reply.json()) as { text: string }).text;
}

/** A text, spoken. */
export async function spoken(text: string, { speech_model, voice }: AudioServer, signal: AbortSignal): Promise<Blob> {
  const body = JSON.stringify({ model: speech_model, voice, input: text });
  const init = { method: "POST", headers: { "content-type": "application/json" }, body, signal };
  return (await request("/v1/audio/speech", init)).blob();
}

export const getServer = (): Promise<ServerInfo> => get("/api/server");
/** With the messages of its current branch, the last of them, or those of all branches. */
export const getChat = (id: string, signal?: AbortSignal, which: "branch" | "last" | "all" = "branch"): Promise<Chat> =>
  get(chatPath(id) + { branch: "", last: "?last=24", all: "?all=true" }[which], signal); // app/page.py preloads the last
/** `stay`: as they come, rather than those that are there. */
export const eventsPath = (runId: string, after: number, stay = true): string =>
  `${runPath(runId)}/events?after=${after}${stay ? "" : "&follow=false"}`;

export const getStrategies = (): Promise<{ strategies: StrategyInfo[]; efforts: Record<string, Budget> }> =>
  get("/api/strategies");

/** Instructions that the model reads when they are needed. */
export interface SkillInfo {
  name: string;
  description: string;
}

/** `off` says of tools that are not there what would bring them, `faults` what could not be loaded. */
export const getTools = (): Promise<{
  tools: ToolInfo[];
  skills?: SkillInfo[];
  off: Record<string, string>;
  faults: { origin: string; message: string }[];
}> => get("/api/tools");

export async function getModels(): Promise<Model[]> {
  return (await get<{ data: Model[] }>("/v1/models")).data;
}

export async function getCollections(): Promise<Collection[]> {
  return (await get<{ collections: Collection[] }>("/api/collections")).collections;
}

/** `preset`: the id of the one that its settings come from. */
export async function createChat(isPrivate: boolean, settings: Wishes, preset: string | null): Promise<ChatSummary> {
  const from = preset === null ? {} : { preset_id: preset };
  return (await (await post("/api/chats", { private: isPrivate, settings, ...from })).json()) as ChatSummary;
}

/** Some of a chat's properties. `leaf_id`: the message that its current branch is to lead over. */
export type ChatChange = Partial<{
  title: string;
  pinned: boolean;
  private: boolean;
  folder_id: string | null;
  leaf_id: string;
  settings: Wishes;
}>;

export async function changeChat(id: string, change: ChatChange): Promise<ChatSummary> {
  return (await (await send("PATCH", chatPath(id), change)).json()) as ChatSummary;
}

/** However often it is sent with one `key`, it is taken once. */
export async function startRun(chatId: string, place: Place, wishes: RunWishes, key: string): Promise<StartedRun> {
  const sent = send("POST", `${chatPath(chatId)}/runs`, { ...place, ...wishes }, { "idempotency-key": key });
  return (await (await sent).json()) as StartedRun;
}

/** A key for a request that must not be taken twice. */
export const newKey = (): string =>
  [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

export async function cancelRun(id: string): Promise<void> {
  await post(`${runPath(id)}/cancel`, {});
}

export type Decision = "once" | "no" | "always" | "never";
export type Scope = "arguments" | "tool";

/** Answer an approval. `scope` is for what is to be remembered: that call alone, or every call of its tool. */
export async function decide(runId: string, approvalId: string, decision: Decision, scope: Scope): Promise<void> {
  const path = `${runPath(runId)}/approvals/${encodeURIComponent(approvalId)}`;
  await post(path, decision === "always" || decision === "never" ? { decision, scope } : { decision });
}

export async function answerQuestion(runId: string, questionId: string, text: string): Promise<void> {
  await post(`${runPath(runId)}/questions/${encodeURIComponent(questionId)}`, { text });
}

export const getPermissions = (): Promise<Permissions> => get("/api/permissions");

export async function allowClasses(classes: readonly Permission[]): Promise<Permissions> {
  const headers = { "content-type": "application/json" };
  const body = JSON.stringify({ classes });
  return (await (await request("/api/permissions", { method: "PUT", headers, body })).json()) as Permissions;
}

/** Let an answer not hold any more: the next such call asks again. */
export async function forgetAnswer(id: string): Promise<void> {
  await request(`/api/permissions/${encodeURIComponent(id)}`, { method: "DELETE" });
}
