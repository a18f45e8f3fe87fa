// OpenAI's official client for JavaScript: chat completions, embeddings, and the Responses API for reasoning.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { assert, cached, refused, run, same, stops, talk, url } from "./cell.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const Person = z.object({ name: z.string(), age: z.number().int() });
const turns = (...messages) =>
  messages.map((each) => (typeof each === "string" ? { role: "user", content: each } : each));
const ask = async (messages, fields = {}) =>
  (await client.chat.completions.create({ model: "default", messages: turns(...messages), ...fields })).choices[0];
const answered = (call, content) => ({ role: "tool", tool_call_id: call.id, content });

await run("openai (Node)", "openai", {
  plain: async () => {
    const { message } = await ask([talk.SAYS_HELLO]);
    same(message.content, talk.HELLO);
    same((await ask([talk.SAYS_HELLO, message, "And?"])).message.content, "And again.");
  },
  stream: async () => {
    const stream = client.chat.completions.stream({ model: "default", messages: turns(talk.SAYS_HELLO) });
    const deltas = [];
    stream.on("content", (delta) => deltas.push(delta));
    same(await stream.finalContent(), talk.HELLO);
    assert(deltas.join("") === talk.HELLO && deltas.length > 3, deltas);
  },
  tools: async () => {
    const { message } = await ask([talk.ASKS_WEATHER], { tools: [talk.GET_WEATHER] });
    const [call] = message.tool_calls;
    same([call.function.name, JSON.parse(call.function.arguments)], ["get_weather", { city: "Oslo" }]);
    const then = await ask([talk.ASKS_WEATHER, message, answered(call, "12 degrees")], { tools: [talk.GET_WEATHER] });
    same(then.message.content, talk.SUMMARY);
  },
  "parallel tools": async () => {
    const { message } = await ask([talk.ASKS_BOTH], { tools: [talk.GET_WEATHER] });
    same(message.tool_calls.map((call) => JSON.parse(call.function.arguments).city), ["Oslo", "Rome"]);
    const results = message.tool_calls.map((call) => answered(call, "warm"));
    const then = await ask([talk.ASKS_BOTH, message, ...results], { tools: [talk.GET_WEATHER] });
    same(then.message.content, talk.BOTH);
  },
  "typed result": async () => {
    const made = await client.chat.completions.parse({
      model: "default", messages: turns(talk.WRITES_PERSON), response_format: zodResponseFormat(Person, "person"),
    });
    same(made.choices[0].message.parsed, talk.PERSON);
  },
  "typed result + tools": async () => {
    const fields = { tools: [talk.GET_WEATHER], response_format: zodResponseFormat(Person, "person") };
    const { message } = await ask([talk.READS_AND_WRITES_PERSON], fields);
    const history = [talk.READS_AND_WRITES_PERSON, message, answered(message.tool_calls[0], "12 degrees")];
    same(JSON.parse((await ask(history, fields)).message.content), talk.PERSON);
  },
  reasoning: async () => {
    const response = await client.responses.create({
      model: "default", input: talk.SAYS_HELLO, reasoning: { effort: "low", summary: "auto" },
    });
    const [thought] = response.output.filter((item) => item.type === "reasoning");
    same([thought.content[0].text.trim(), response.output_text], [talk.THOUGHT, talk.HELLO]);
    const { message } = await ask([talk.SAYS_HELLO], { reasoning_effort: "low" });
    same(message.reasoning_content.trim(), talk.THOUGHT);
  },
  embeddings: async () => {
    const made = await client.embeddings.create({ model: "default", input: ["a", "b"] });
    assert(made.data.length === 2 && made.data[0].embedding.length > 0);
  },
  errors: async () => {
    await refused(ask(["hi"], { model: "gpt-5" }), 404, "gpt-5");
    await refused(ask(["hi"], { temperature: 9 }), 400, "temperature");
  },
  disconnect: () =>
    stops(async () => {
      const stream = await client.chat.completions.create({
        model: "default", messages: turns(talk.NEVER_ENDS), stream: true,
      });
      let heard = 0;
      for await (const _ of stream) if (++heard === 20) break;
    }),
  "long agent": async () => {
    const shares = [];
    const runner = client.chat.completions.runTools(
      {
        model: "default",
        messages: turns(talk.WORKS_LONG),
        tools: [{
          type: "function",
          function: {
            ...talk.READ_PART.function, parse: JSON.parse, function: ({ number }) => talk.PARTS[number],
          },
        }],
      },
      { maxChatCompletions: 20 },
    );
    runner.on("chatCompletion", ({ usage }) =>
      shares.push(usage.prompt_tokens_details.cached_tokens / usage.prompt_tokens),
    );
    same(await runner.finalContent(), talk.FINISHED);
    return cached(shares.slice(1));
  },
});
