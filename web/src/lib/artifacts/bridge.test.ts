import { describe, expect, it, vi } from "vitest";
import { Bridge, isJson, MOST_MESSAGES, RpcError, type Host } from "./bridge";

type Message = { id?: unknown; method?: string; params?: unknown; result?: unknown; error?: { code: number; message: string } };

function staged(host: Partial<Host> = {}) {
  const sent: Message[] = [];
  let now = 0;
  const all: Host = {
    context: () => ({
      theme: "dark",
      locale: "de",
      displayMode: "inline",
      availableDisplayModes: ["inline"],
      containerDimensions: { width: 640, maxHeight: 800 },
      platform: "web",
    }),
    call: vi.fn(() => Promise.resolve({ content: [] })),
    read: vi.fn(() => Promise.resolve({ contents: [] })),
    openLink: vi.fn(() => Promise.resolve()),
    message: vi.fn(() => Promise.resolve()),
    resize: vi.fn(),
    flooded: vi.fn(),
    ...host,
  };
  const bridge = new Bridge((message) => sent.push(message), all, { zone: "Ulm" }, { content: [] }, () => now);
  const say = async (message: object): Promise<Message | undefined> => {
    const before = sent.length;
    bridge.receive({ jsonrpc: "2.0", ...message });
    for (let i = 0; i < 9; i++) await Promise.resolve();
    return sent[before];
  };
  const greet = async (): Promise<Message | undefined> => {
    const params = { appInfo: { name: "x", version: "1" }, appCapabilities: {}, protocolVersion: "2025-11-21" };
    const said = await say({ id: 0, method: "ui/initialize", params });
    await say({ method: "ui/notifications/initialized" });
    return said;
  };
  return { bridge, host: all, sent, say, greet, wait: (ms: number) => (now += ms) };
}

describe("an app's greeting", () => {
  it("is answered with the host's version, and what the app shows follows once it is ready", async () => {
    const { sent, greet, say } = staged();
    const said = await greet();
    expect(said).toMatchObject({ jsonrpc: "2.0", id: 0, result: { protocolVersion: "2026-01-26", hostContext: { theme: "dark" } } });
    expect(sent.slice(1)).toEqual([
      { jsonrpc: "2.0", method: "ui/notifications/tool-input", params: { arguments: { zone: "Ulm" } } },
      { jsonrpc: "2.0", method: "ui/notifications/tool-result", params: { content: [] } },
    ]);
    await say({ method: "ui/notifications/initialized" });
    expect(sent).toHaveLength(3); // at most once
  });

  it("comes before anything else but a ping", async () => {
    const { say, host } = staged();
    expect(await say({ id: 1, method: "tools/call", params: { name: "x" } })).toMatchObject({ id: 1, error: { code: -32600 } });
    expect(await say({ id: 1, method: "ping" })).toEqual({ jsonrpc: "2.0", id: 1, result: {} });
    expect(host.call).not.toHaveBeenCalled();
  });
});

describe("requests", () => {
  it("are passed on as they are, and their refusals too", async () => {
    const call = vi.fn(() => Promise.reject(new RpcError(-32000, "no")));
    const { say, greet, host } = staged({ call });
    await greet();
    const params = { name: "look", arguments: { a: [1, null, { b: "c" }] } };
    expect(await say({ id: "a", method: "tools/call", params })).toEqual({ jsonrpc: "2.0", id: "a", error: { code: -32000, message: "no" } });
    expect(call).toHaveBeenCalledWith("look", params.arguments);
    expect(await say({ id: 3, method: "resources/read", params: { uri: "ui://x" } })).toMatchObject({ result: { contents: [] } });
    expect(host.read).toHaveBeenCalledWith("ui://x");
    expect(await say({ id: 4, method: "ui/request-display-mode", params: { mode: "fullscreen" } })).toMatchObject({ result: { mode: "inline" } });
    expect(await say({ id: 5, method: "ui/update-model-context", params: {} })).toMatchObject({ error: { code: -32601 } });
  });

  it("do not tell an app what went wrong within the host", async () => {
    const { say, greet } = staged({ call: () => Promise.reject(new Error("at /home/me/secret")) });
    await greet();
    expect(await say({ id: 1, method: "tools/call", params: { name: "x" } })).toMatchObject({ error: { message: "The request failed." } });
  });

  it("wait in a limited number, each under an id of its own", async () => {
    const { say, greet } = staged({ call: () => new Promise(() => undefined) });
    await greet();
    for (let id = 1; id <= 8; id++) expect(await say({ id, method: "tools/call", params: { name: "x" } })).toBeUndefined();
    expect(await say({ id: 9, method: "ping" })).toMatchObject({ id: 9, error: { code: -32000 } });
    expect(await say({ id: 8, method: "ping" })).toMatchObject({ id: 8, error: { code: -32600 } });
  });

  it.each(["https://example.org/a", "http://127.0.0.1:8000"])("put the address %s to the person", async (url) => {
    const { say, greet, host } = staged();
    await greet();
    expect(await say({ id: 1, method: "ui/open-link", params: { url } })).toMatchObject({ result: {} });
    expect(host.openLink).toHaveBeenCalledWith(new URL(url).href);
  });

  it.each(["javascript:alert(1)", "file:///etc/passwd", "data:text/html,x", "/api", "https://me@example.org", "", 5])(
    "put no address such as %s to anybody",
    async (url) => {
      const { say, greet, host } = staged();
      await greet();
      expect(await say({ id: 1, method: "ui/open-link", params: { url } })).toMatchObject({ error: { code: -32602 } });
      expect(host.openLink).not.toHaveBeenCalled();
    },
  );
});

describe("notifications", () => {
  it.each([
    [500.2, 501],
    [1e9, 800],
    [0, 60],
  ])("of a height of %s px make it %s px", async (height, is) => {
    const { say, host } = staged();
    await say({ method: "ui/notifications/size-changed", params: { width: 1, height } });
    expect(host.resize).toHaveBeenCalledWith(is);
  });

  it.each([-1, NaN, "500", null, undefined])("of a height of %s are none", async (height) => {
    const { say, host } = staged();
    await say({ method: "ui/notifications/size-changed", params: { height } });
    expect(host.resize).not.toHaveBeenCalled();
  });

  it("of the theme reach an app that is ready, and none that is not", async () => {
    const { bridge, sent, greet } = staged();
    bridge.changed({ theme: "light" });
    expect(sent).toEqual([]);
    await greet();
    bridge.changed({ theme: "light" });
    expect(sent.at(-1)).toEqual({ jsonrpc: "2.0", method: "ui/notifications/host-context-changed", params: { theme: "light" } });
  });
});

describe("a flood", () => {
  it("closes the bridge, and nothing is taken or told any more", () => {
    const { bridge, sent, host, wait } = staged();
    for (let i = 0; i < MOST_MESSAGES; i++) bridge.receive(null);
    expect(host.flooded).not.toHaveBeenCalled();
    wait(1000);
    for (let i = 0; i <= MOST_MESSAGES; i++) bridge.receive({});
    expect(host.flooded).toHaveBeenCalledOnce();
    bridge.receive({ jsonrpc: "2.0", id: 1, method: "ping" });
    expect(sent).toEqual([]);
  });
});

describe("the end", () => {
  it("waits for the app's answer", async () => {
    const { bridge, sent, greet } = staged();
    await greet();
    const ended = bridge.teardown("closed");
    expect(sent.at(-1)).toMatchObject({ method: "ui/resource-teardown", params: { reason: "closed" } });
    bridge.receive({ jsonrpc: "2.0", id: sent.at(-1)?.id, result: {} });
    await ended;
  });

  it("does not wait long for one that says nothing", async () => {
    vi.useFakeTimers();
    const { bridge, greet } = staged();
    await greet();
    const ended = bridge.teardown("closed");
    await vi.advanceTimersByTimeAsync(500);
    await ended;
    vi.useRealTimers();
  });
});

describe("JSON", () => {
  const round: Record<string, unknown> = {};
  round.round = round;
  let deep: object = {};
  for (let i = 0; i < 5000; i++) deep = { deep };
  it.each([["a cycle", round], ["depth", deep], ["a map", new Map()], ["a date", new Date()], ["bytes", new ArrayBuffer(1)],
    ["a pattern", /x/], ["a large integer", 10n], ["no number", NaN], ["no end", Infinity], ["a set within", [[new Set()]]],
    ["a long text", "x".repeat(1 << 20)], ["many parts", new Array(1e6).fill(0)]])("is not %s", (_, value) => {
    expect(isJson({ value })).toBe(false);
  });
  it("is what JSON can write, and undefined", () => {
    expect(isJson({ a: [1, "b", null, true, { c: undefined }], d: JSON.parse('{"__proto__": 1}') as object })).toBe(true);
  });
});
