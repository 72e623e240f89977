// The openai package of Node and the Vercel AI SDK against a server: BASE_URL (with /v1), API_KEY, MODEL.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const { BASE_URL: baseURL, API_KEY: apiKey, MODEL: model } = process.env;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];

async function completions() {
  const asked = { model, prompt: "Once upon a time", max_tokens: 16, temperature: 0 };
  const plain = await client.completions.create(asked);
  let text = "";
  for await (const chunk of await client.completions.create({ ...asked, stream: true })) text += chunk.choices[0]?.text ?? "";
  assert.equal(text, plain.choices[0].text);
}

async function chat() {
  const asked = { model, messages, max_completion_tokens: 16, temperature: 0 };
  const plain = await client.chat.completions.create(asked);
  const stream = client.chat.completions.stream(asked);
  assert.equal(await stream.finalContent(), plain.choices[0].message.content);
}

async function responses() {
  const stream = client.responses.stream({ model, input: "Say hello.", max_output_tokens: 16, temperature: 0 });
  let text = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  assert.equal((await stream.finalResponse()).output_text, text);
}

async function errors() {
  await assert.rejects(
    client.chat.completions.create({ model, messages, temperature: -1 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
  );
  await assert.rejects(client.models.retrieve("nothing"), (error) => error.code === "model_not_found");
}

async function vercel() {
  const provider = createOpenAICompatible({ name: "pagemill", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true });
  const { text } = await generateText({ model: provider(model), prompt: "Say hello.", maxOutputTokens: 16, temperature: 0 });
  const stream = streamText({ model: provider(model), prompt: "Say hello.", maxOutputTokens: 16, temperature: 0 });
  let streamed = "";
  for await (const part of stream.textStream) streamed += part;
  assert.equal(streamed, text);
  assert.ok((await stream.usage).outputTokens > 0);
  const person = z.object({ name: z.string().max(20), age: z.number().int() });
  const { output } = await generateText({
    model: provider(model), prompt: "Invent a person.", maxOutputTokens: 200, output: Output.object({ schema: person }),
  });
  person.parse(output);
  const weather = tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string().max(20) }),
    execute: async ({ city }) => `sunny in ${city}`,
  });
  const called = await generateText({
    model: provider(model), prompt: "The weather in Paris?", tools: { weather }, toolChoice: "required", maxOutputTokens: 200,
  });
  assert.equal(called.toolCalls[0].toolName, "weather");
  const streamedCall = streamText({
    model: provider(model), prompt: "The weather in Paris?", tools: { weather }, toolChoice: "required", maxOutputTokens: 200,
  });
  assert.equal((await streamedCall.toolCalls)[0].toolName, "weather");
}

const all = { completions, chat, responses, errors, vercel };
await all[process.argv[2]]();
