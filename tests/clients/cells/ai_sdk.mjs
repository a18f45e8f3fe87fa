// The AI SDK with its provider for compatible servers, and with OpenAI's for the Responses API.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { assert, cached, refused, run, same, stops, talk, url } from "./cell.mjs";

const provider = createOpenAICompatible({
  name: "ponder", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true,
});
const responses = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const Person = z.object({ name: z.string(), age: z.number().int() });
const weather = { Oslo: "12 degrees", Rome: "30 degrees" };
const get_weather = tool({
  description: "The weather of a city.", inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => weather[city],
});
const read_part = tool({
  description: "Reads a part of the text.", inputSchema: z.object({ number: z.number().int() }),
  execute: async ({ number }) => talk.PARTS[number],
});
const asked = (prompt, fields = {}) => ({ model: provider("default"), prompt, maxRetries: 0, ...fields });

await run("AI SDK", "ai", {
  plain: async () => {
    for (const model of [provider("default"), responses("default")]) {
      const first = await generateText(asked(talk.SAYS_HELLO, { model }));
      same(first.text, talk.HELLO);
      const messages = [
        { role: "user", content: talk.SAYS_HELLO }, ...first.response.messages, { role: "user", content: "And?" },
      ];
      same((await generateText({ model, messages, maxRetries: 0 })).text, "And again.");
    }
  },
  stream: async () => {
    for (const model of [provider("default"), responses("default")]) {
      const deltas = [];
      for await (const delta of streamText(asked(talk.SAYS_HELLO, { model })).textStream) deltas.push(delta);
      assert(deltas.join("") === talk.HELLO && deltas.length > 3, deltas);
    }
  },
  tools: async () => {
    for (const model of [provider("default"), responses("default")]) {
      const fields = { model, tools: { get_weather }, stopWhen: stepCountIs(5) };
      same((await generateText(asked(talk.ASKS_WEATHER, fields))).text, talk.SUMMARY);
    }
  },
  "parallel tools": async () => {
    const made = await generateText(asked(talk.ASKS_BOTH, { tools: { get_weather }, stopWhen: stepCountIs(5) }));
    same([made.steps[0].toolCalls.map((call) => call.input.city), made.text], [["Oslo", "Rome"], talk.BOTH]);
  },
  "typed result": async () => {
    for (const model of [provider("default"), responses("default")]) {
      const made = await generateText(asked(talk.WRITES_PERSON, { model, output: Output.object({ schema: Person }) }));
      same(made.output, talk.PERSON);
    }
  },
  "typed result + tools": async () => {
    const fields = { tools: { get_weather }, stopWhen: stepCountIs(5), output: Output.object({ schema: Person }) };
    same((await generateText(asked(talk.READS_AND_WRITES_PERSON, fields))).output, talk.PERSON);
  },
  reasoning: async () => {
    const made = await generateText(asked(talk.SAYS_HELLO, { providerOptions: { ponder: { reasoningEffort: "low" } } }));
    same([made.reasoningText.trim(), made.text], [talk.THOUGHT, talk.HELLO]);
  },
  embeddings: async () => {
    const made = await embedMany({ model: provider.embeddingModel("default"), values: ["a", "b"] });
    same(made.embeddings.length, 2);
  },
  errors: async () => {
    await refused(generateText(asked("hi", { model: provider("gpt-5") })), 404, "gpt-5");
    await refused(generateText(asked("hi", { temperature: 9 })), 400, "temperature");
  },
  disconnect: () =>
    stops(async () => {
      const left = new AbortController();
      let heard = 0;
      const { textStream } = streamText(asked(talk.NEVER_ENDS, { abortSignal: left.signal }));
      for await (const _ of textStream) if (++heard === 20) left.abort();
    }),
  "long agent": async () => {
    const made = await generateText(asked(talk.WORKS_LONG, { tools: { read_part }, stopWhen: stepCountIs(20) }));
    same(made.text, talk.FINISHED);
    return cached(made.steps.slice(1).map(({ usage }) => usage.inputTokenDetails.cacheReadTokens / usage.inputTokens));
  },
});
