// An agent with the clients of OpenAI and Anthropic for JavaScript: node sdks.mjs chat|responses|messages [stream]
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [dialect, ...modes] = process.argv.slice(3);
const stream = modes.includes("stream");
const required = createRequire(process.argv[2] + "/package.json");
const load = async (name) => (await import(pathToFileURL(required.resolve(name)))).default;
const version = (name) => JSON.parse(readFileSync(`${process.argv[2]}/node_modules/${name}/package.json`)).version;
const SYSTEM = "You are a calculator. Use the tools.";
const QUESTIONS = ["Add 2 and 3, then multiply the sum by 7.", "And one less than that?"];
const NUMBERS = {
  type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"],
};
const TOOLS = [
  { name: "add", description: "Adds two numbers.", parameters: NUMBERS },
  { name: "multiply", description: "Multiplies two numbers.", parameters: NUMBERS },
];
const run = (name, { a, b }) => String(name === "add" ? a + b : a * b);
const wire = { calls: 0, requests: 0 };
const counted = (...request) => { wire.requests += 1; return fetch(...request); };
const must = (good, what) => { if (!good) throw new Error(JSON.stringify(what)); };

async function chat(client) {
  const messages = [{ role: "system", content: SYSTEM }];
  const tools = TOOLS.map((tool) => ({ type: "function", function: tool }));
  for (const question of QUESTIONS) {
    messages.push({ role: "user", content: question });
    for (let going = true; going; ) {
      wire.calls += 1;
      const asked = { model: "policy", messages, tools, max_completion_tokens: 900 };
      const answer = stream
        ? await client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } }).finalChatCompletion()
        : await client.chat.completions.create(asked);
      const [{ message, finish_reason }] = answer.choices;
      must(answer.usage.completion_tokens > 1 && ["stop", "tool_calls"].includes(finish_reason), answer);
      messages.push(message);
      going = finish_reason === "tool_calls";
      for (const call of message.tool_calls ?? []) {
        const content = run(call.function.name, JSON.parse(call.function.arguments));
        messages.push({ role: "tool", tool_call_id: call.id, content });
      }
    }
  }
  return messages;
}

async function responses(client) {
  const input = [];
  const tools = TOOLS.map((tool) => ({ type: "function", strict: false, ...tool }));
  for (const question of QUESTIONS) {
    input.push({ role: "user", content: question });
    for (let going = true; going; ) {
      wire.calls += 1;
      const asked = { model: "policy", input, tools, instructions: SYSTEM, store: false };
      const answer = stream
        ? await client.responses.stream(asked).finalResponse()
        : await client.responses.create(asked);
      must(answer.status === "completed", answer);
      input.push(...answer.output);
      const called = answer.output.filter((item) => item.type === "function_call");
      going = called.length > 0;
      for (const call of called) {
        const output = run(call.name, JSON.parse(call.arguments));
        input.push({ type: "function_call_output", call_id: call.call_id, output });
      }
    }
  }
  return input;
}

async function messages(client) {
  const said = [];
  const tools = TOOLS.map(({ parameters, ...tool }) => ({ ...tool, input_schema: parameters }));
  for (const question of QUESTIONS) {
    said.push({ role: "user", content: question });
    for (let going = true; going; ) {
      wire.calls += 2;
      const asked = { model: "policy", messages: said, tools, system: SYSTEM };
      const { input_tokens } = await client.messages.countTokens(asked);
      const answer = stream
        ? await client.messages.stream({ ...asked, max_tokens: 900 }).finalMessage()
        : await client.messages.create({ ...asked, max_tokens: 900 });
      must(["end_turn", "tool_use"].includes(answer.stop_reason) && answer.usage.input_tokens === input_tokens, answer);
      said.push({ role: "assistant", content: answer.content });
      going = answer.stop_reason === "tool_use";
      const results = answer.content
        .filter((block) => block.type === "tool_use")
        .map((block) => ({ type: "tool_result", tool_use_id: block.id, content: run(block.name, block.input) }));
      if (results.length) said.push({ role: "user", content: results });
    }
  }
  return said;
}

const name = dialect === "messages" ? "@anthropic-ai/sdk" : "openai";
const Client = await load(name);
const transcript = await { chat, responses, messages }[dialect](new Client({ fetch: counted }));
process.stdout.write(JSON.stringify({ transcript, versions: { [name]: version(name), node: process.version }, ...wire }));
