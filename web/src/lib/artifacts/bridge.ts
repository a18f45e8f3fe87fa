/**
 * The host's side of an MCP app: JSON-RPC 2.0 over the messages of its frame (SEP-1865, version 2026-01-26). All that
 * comes is a stranger's: it is taken in one form, up to a size and a rate, and answered with an error otherwise. Knows
 * nothing of the page, and of nobody's rights: what asks for something is put to its `Host`.
 */
export const PROTOCOL = "2026-01-26";
export const MOST_HEIGHT = 800; // px
export const LEAST_HEIGHT = 60;
export const MOST_MESSAGES = 200; // in a second; a frame that sends more is closed
const MOST_PENDING = 8; // requests that are not answered yet
const MOST_CHARACTERS = 1 << 19; // of a message
const MOST_DEPTH = 100;
const MOST_TEXT = 10_000; // characters of a message to the person
const MOST_ADDRESS = 2048;
const TEARDOWN_MS = 500;

const INVALID_REQUEST = -32600;
const METHOD_NOT_FOUND = -32601;
const INVALID_PARAMS = -32602;
export const REFUSED = -32000; // of the range that implementations have

type Id = string | number;
type Fields = Readonly<Record<string, unknown>>;

/** An error that the app is told. */
export class RpcError extends Error {
  constructor(
    readonly code: number,
    message: string,
  ) {
    super(message);
  }
}

/** The fields of `HostContext` that an app is told. */
export interface HostContext {
  theme: "light" | "dark";
  locale: string;
  displayMode: "inline";
  availableDisplayModes: readonly ["inline"];
  containerDimensions: { width: number; maxHeight: number };
  platform: "web";
}

/** What an app may ask for. A promise that is rejected with an `RpcError` is a refusal. */
export interface Host {
  context(): HostContext;
  call(name: string, given: Fields): Promise<unknown>;
  read(uri: string): Promise<unknown>;
  openLink(url: string): Promise<void>;
  message(text: string): Promise<void>;
  resize(height: number): void;
  flooded(): void; // more messages come than are taken
}

export class Bridge {
  #state: "new" | "greeted" | "ready" | "closed" = "new";
  readonly #pending = new Set<Id>();
  #second = 0;
  #messages = 0;
  #torn: (() => void) | null = null;

  /** `call` and `result` are what the app shows: the arguments, and a `CallToolResult`. */
  constructor(
    private readonly send: (message: object) => void,
    private readonly host: Host,
    private readonly call: Fields,
    private readonly result: Fields,
    private readonly now: () => number = () => performance.now(),
  ) {}

  /** A message of the app's own window; whether it is that, the caller has seen. */
  receive(data: unknown): void {
    if (this.#state === "closed" || this.#floods()) return;
    if (!isFields(data) || data.jsonrpc !== "2.0") return;
    const { id, method } = data;
    if (method === undefined) {
      if (id === TEARDOWN_ID) this.#torn?.();
      return;
    }
    if (id === undefined) {
      if (typeof method === "string" && isJson(data)) this.#notified(method, data.params);
      return;
    }
    if (!isId(id)) return this.#fail(null, INVALID_REQUEST, "The id is no text and no whole number.");
    if (this.#pending.has(id)) return this.#fail(id, INVALID_REQUEST, "A request with this id is not answered yet.");
    if (!isJson(data)) return this.#fail(id, INVALID_REQUEST, `The message is no JSON, or has over ${MOST_CHARACTERS} characters.`);
    if (this.#pending.size >= MOST_PENDING) {
      return this.#fail(id, REFUSED, `${MOST_PENDING} requests are not answered yet; wait for one of them.`);
    }
    void this.#answer(id, method, data.params);
  }

  /** Some of the context is another now. */
  changed(context: Partial<HostContext>): void {
    if (this.#state === "ready") this.#notify("ui/notifications/host-context-changed", context);
  }

  /** Tells the app that it ends, and waits for its answer, though not for long. Nothing is taken from it after. */
  async teardown(reason: string): Promise<void> {
    if (this.#state === "greeted" || this.#state === "ready") {
      const answered = new Promise<void>((resolve) => (this.#torn = resolve));
      this.#post({ id: TEARDOWN_ID, method: "ui/resource-teardown", params: { reason } });
      await Promise.race([answered, new Promise((resolve) => setTimeout(resolve, TEARDOWN_MS))]);
    }
    this.close();
  }

  close(): void {
    this.#state = "closed";
  }

  async #answer(id: Id, method: unknown, params: unknown): Promise<void> {
    this.#pending.add(id);
    try {
      const result = await this.#asked(method, isFields(params) ? params : {});
      this.#post({ id, result });
    } catch (error) {
      if (error instanceof RpcError) this.#fail(id, error.code, error.message);
      else this.#fail(id, REFUSED, "The request failed.");
    } finally {
      this.#pending.delete(id);
    }
  }

  async #asked(method: unknown, params: Fields): Promise<unknown> {
    if (method === "ping") return {};
    if (method === "ui/initialize") return this.#greet(params);
    if (this.#state === "new") throw new RpcError(INVALID_REQUEST, "ui/initialize comes first.");
    switch (method) {
      case "tools/call": {
        const { name, arguments: given = {} } = params;
        if (typeof name !== "string" || !isFields(given)) throw wrong("name is a text, and arguments an object");
        return this.host.call(name, given);
      }
      case "resources/read": {
        if (typeof params.uri !== "string") throw wrong("uri is a text");
        return this.host.read(params.uri);
      }
      case "ui/open-link": {
        await this.host.openLink(addressOf(params.url));
        return {};
      }
      case "ui/message": {
        await this.host.message(textOf(params));
        return {};
      }
      case "ui/request-display-mode":
        return { mode: "inline" };
      default:
        throw new RpcError(METHOD_NOT_FOUND, `${String(method).slice(0, 80)} is not supported here.`);
    }
  }

  #greet({ appInfo, appCapabilities, protocolVersion }: Fields): unknown {
    if (this.#state !== "new") throw new RpcError(INVALID_REQUEST, "ui/initialize was answered already.");
    if (!isFields(appInfo) || typeof appInfo.name !== "string" || typeof appInfo.version !== "string") {
      throw wrong("appInfo has a name and a version");
    }
    if (!isFields(appCapabilities) || typeof protocolVersion !== "string") {
      throw wrong("appCapabilities is an object, and protocolVersion a text");
    }
    this.#state = "greeted";
    return {
      protocolVersion: PROTOCOL,
      hostInfo: { name: "ponder", version: "1" },
      hostCapabilities: { openLinks: {}, serverTools: {}, serverResources: {}, message: { text: {} }, sandbox: { csp: {} } },
      hostContext: this.host.context(),
    };
  }

  #notified(method: string, params: unknown): void {
    if (method === "ui/notifications/initialized" && this.#state === "greeted") {
      this.#state = "ready";
      this.#notify("ui/notifications/tool-input", { arguments: this.call });
      this.#notify("ui/notifications/tool-result", this.result);
    } else if (method === "ui/notifications/size-changed" && isFields(params)) {
      const { height } = params;
      if (typeof height !== "number" || !(height >= 0)) return;
      this.host.resize(Math.min(MOST_HEIGHT, Math.max(LEAST_HEIGHT, Math.ceil(height))));
    }
  }

  #floods(): boolean {
    const second = Math.floor(this.now() / 1000);
    this.#messages = second === this.#second ? this.#messages + 1 : 1;
    this.#second = second;
    if (this.#messages <= MOST_MESSAGES) return false;
    this.close();
    this.host.flooded();
    return true;
  }

  #notify(method: string, params: object): void {
    this.#post({ method, params });
  }

  #fail(id: Id | null, code: number, message: string): void {
    this.#post({ id, error: { code, message } });
  }

  #post(message: object): void {
    if (this.#state !== "closed") this.send({ jsonrpc: "2.0", ...message });
  }
}

const TEARDOWN_ID = "ponder-teardown";

const wrong = (what: string): RpcError => new RpcError(INVALID_PARAMS, `The params have a wrong form; accepted: ${what}.`);

function isFields(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isId(value: unknown): value is Id {
  return (typeof value === "string" && value.length <= 200 && value !== TEARDOWN_ID) || Number.isSafeInteger(value);
}

/** Whether it is JSON, though undefined may stand in it, of a bounded size and depth. Cycles have neither. */
export function isJson(value: unknown, most = MOST_CHARACTERS): boolean {
  const open: [unknown, number][] = [[value, 0]];
  let size = 0;
  for (let next = open.pop(); next !== undefined; next = open.pop()) {
    const [each, depth] = next;
    size += typeof each === "string" ? each.length + 2 : 4;
    if (size > most || depth > MOST_DEPTH) return false;
    if (Array.isArray(each)) {
      if (size + each.length > most) return false;
      for (const part of each as unknown[]) open.push([part, depth + 1]);
    } else if (typeof each === "object" && each !== null) {
      const prototype: unknown = Object.getPrototypeOf(each);
      if (prototype !== Object.prototype && prototype !== null) return false;
      for (const [key, part] of Object.entries(each)) {
        size += key.length;
        open.push([part, depth + 1]);
      }
    } else if (typeof each === "number" ? !Number.isFinite(each) : !["string", "boolean", "undefined", "object"].includes(typeof each)) {
      return false;
    }
  }
  return true;
}

/** An address that may be put to a person: of the web, and of no account. */
function addressOf(given: unknown): string {
  const fault = wrong(`url is an address that begins with http:// or https://, without a name and a password, of up to ${MOST_ADDRESS} characters`);
  if (typeof given !== "string" || given.length > MOST_ADDRESS) throw fault;
  let url: URL;
  try {
    url = new URL(given);
  } catch {
    throw fault;
  }
  if ((url.protocol !== "http:" && url.protocol !== "https:") || url.username !== "" || url.password !== "") throw fault;
  return url.href;
}

/** The text of a message: one block, as the stable version has it, or a list of them, as the SDK sends it. */
function textOf({ role, content }: Fields): string {
  const blocks: readonly unknown[] = Array.isArray(content) ? content : [content];
  const texts = blocks.map((block) => (isFields(block) && block.type === "text" && typeof block.text === "string" ? block.text : null));
  const text = texts.join("\n");
  if (role !== "user" || texts.includes(null) || text.trim() === "" || text.length > MOST_TEXT) {
    throw wrong(`role is user, and content is text, of 1 to ${MOST_TEXT} characters`);
  }
  return text;
}
