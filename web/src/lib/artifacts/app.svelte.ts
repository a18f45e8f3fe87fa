/**
 * An MCP app that is open: what it asks the person, one thing at a time, and what it has called. Whoever was declined
 * three times asks nothing more. Knows nothing of frames.
 */
import { ApiError, post, type Decision, type Scope } from "../api";
import type { Approval } from "../answer/tools";
import { clock } from "../clock";
import { filePath } from "./api";
import { REFUSED, RpcError } from "./bridge";

/** What an app shows, as the server tells it. */
export interface AppShown {
  server: string;
  tool: string;
  uri: string;
  arguments: Record<string, unknown>;
  result: Record<string, unknown>; // a CallToolResult
  domains: string[]; // that it asks to reach, and may not
  permissions: string[];
  connected: boolean;
}

interface AppAnswer {
  result: object | null;
  approval: { name: string; reason: string; risk: Approval["risk"]; preview: string; arguments_hash: string } | null;
  error: { code: number; message: string } | null;
}

export const appPath = (id: string): string => `${filePath(id)}/app`;

/** A request of the app to its server, as the person sees it. */
export interface AppCall {
  readonly name: string;
  readonly given: string; // JSON
  readonly state: "running" | "done" | "failed";
}

export type Wish =
  | { readonly kind: "link"; readonly url: string }
  | { readonly kind: "message"; readonly text: string }
  | { readonly kind: "approval"; readonly name: string; readonly approval: Approval };

type Verdict = { decision: Decision; scope: Scope };

interface Asked {
  readonly key: number;
  readonly wish: Wish;
  readonly resolve: (verdict: Verdict) => void;
}

const MOST_DECLINED = 3;
const MOST_CALLS = 20; // that are shown, the newest
const WAIT_S = 900; // as long as a run waits for a person

export class AppSession {
  asked = $state.raw<readonly Asked[]>([]);
  calls = $state.raw<readonly AppCall[]>([]);
  #declined = 0;
  #keys = 0;
  #closed = false;

  constructor(
    private readonly id: string,
    private readonly suggest: (text: string) => void, // puts a text where messages are written
  ) {}

  readonly call = (name: string, given: object): Promise<unknown> =>
    this.#ask("tools/call", { name, arguments: given }, name, given);
  readonly read = (uri: string): Promise<unknown> => this.#ask("resources/read", { uri }, uri, {});

  async openLink(url: string): Promise<void> {
    await this.#agreed({ kind: "link", url });
    open(url, "_blank", "noopener,noreferrer");
  }

  async message(text: string): Promise<void> {
    await this.#agreed({ kind: "message", text });
    this.suggest(text);
  }

  /** Nothing that waits is decided any more. */
  close(): void {
    this.#closed = true;
    this.#declineAll();
  }

  decide(key: number, decision: Decision, scope: Scope = "arguments"): void {
    const found = this.asked.find((each) => each.key === key);
    if (found === undefined) return;
    this.asked = this.asked.filter((each) => each !== found);
    found.resolve({ decision, scope });
    if (decision === "no" || decision === "never") this.#declined += 1;
    if (this.#declined === MOST_DECLINED) this.#declineAll();
  }

  #declineAll(): void {
    for (const { resolve } of this.asked) resolve({ decision: "no", scope: "arguments" });
    this.asked = [];
  }

  async #agreed(wish: Wish): Promise<Verdict> {
    const verdict = await this.#put(wish);
    if (verdict.decision === "no") throw new RpcError(REFUSED, "The person declined.");
    return verdict;
  }

  /** Puts a wish to the person, behind those that wait already. */
  #put(wish: Wish): Promise<Verdict> {
    if (this.#closed || this.#declined >= MOST_DECLINED) {
      return Promise.reject(new RpcError(REFUSED, `The person has declined ${MOST_DECLINED} times, and is not asked again.`));
    }
    return new Promise((resolve) => {
      const key = (this.#keys += 1);
      this.asked = [...this.asked, { key, wish, resolve }];
      setTimeout(() => this.decide(key, "no"), WAIT_S * 1000);
    });
  }

  async #ask(method: string, params: object, name: string, given: object): Promise<unknown> {
    const begun: AppCall = { name, given: JSON.stringify(given), state: "running" };
    let shown = begun;
    const tell = (state: AppCall["state"]): void => {
      const now = { ...begun, state };
      this.calls = this.calls.map((each) => (each === shown ? now : each));
      shown = now;
    };
    this.calls = [...this.calls, begun].slice(-MOST_CALLS);
    try {
      const result = await this.#answered(method, params);
      tell("done");
      return result;
    } catch (error) {
      tell("failed");
      throw error;
    }
  }

  async #answered(method: string, params: object): Promise<object> {
    const { result, approval, error } = await this.#sent({ method, params });
    if (approval === null) return taken(result, error);
    const { name, arguments_hash, reason, risk, preview } = approval;
    const asks: Approval = { id: "", reason, risk, preview, expiresAt: clock.now() + WAIT_S, decision: null };
    const { decision, scope } = await this.#put({ kind: "approval", name, approval: asks });
    if (this.#closed) throw new RpcError(REFUSED, "The app was closed.");
    const remembered = decision === "always" || decision === "never" ? { scope } : {};
    const decided = await this.#sent({ method, params, decision, arguments_hash, ...remembered });
    return taken(decided.result, decided.error);
  }

  async #sent(body: object): Promise<AppAnswer> {
    try {
      return (await (await post(appPath(this.id), body)).json()) as AppAnswer;
    } catch (error) {
      throw new RpcError(REFUSED, error instanceof ApiError ? error.message || "The server is not reached." : "The request failed.");
    }
  }
}

function taken(result: object | null, error: AppAnswer["error"]): object {
  if (error !== null) throw new RpcError(error.code, error.message);
  return result ?? {};
}
