// A conversation: its messages, and one streamed answer at a time.
import {readEvents} from "./sse.js";

// What an answer has been so far; the same object grows until the stream ends.
function emptyAnswer() {
  return {reasoning: "", content: "", toolCalls: [], finishReason: null, usage: null, error: null, times: {start: performance.now()}};
}

export class Chat {
  messages = [];
  #abort = null;

  get busy() {
    return this.#abort !== null;
  }

  clear() {
    this.stop();
    this.messages = [];
  }

  stop() {
    this.#abort?.abort();
  }

  // Adds `messages`, asks the model, and calls onChange(answer) as it grows. Resolves to the answer; what went wrong is in
  // answer.error. The answer enters the conversation unless it is empty.
  async ask(messages, settings, onChange) {
    this.messages.push(...messages);
    const conversation = this.messages;  // clear() starts a new one; a late answer must not enter it
    const answer = emptyAnswer();
    const abort = new AbortController();
    this.#abort = abort;
    try {
      await this.#stream(conversation, settings, abort.signal, answer, onChange);
    } catch (error) {
      if (abort.signal.aborted) answer.finishReason = "stopped";
      else answer.error = error.message || String(error);
    } finally {
      if (this.#abort === abort) this.#abort = null;
    }
    answer.times.end = performance.now();
    const message = asMessage(answer);
    if (message) conversation.push(message);
    onChange(answer);
    return answer;
  }

  async #stream(conversation, settings, signal, answer, onChange) {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: requestHeaders(settings),
      body: JSON.stringify(requestBody(conversation, settings)),
      signal,
    });
    if (!response.ok) throw new Error(await errorText(response));
    let done = false;
    for await (const data of readEvents(response)) {
      if (data === "[DONE]") {
        done = true;
        break;
      }
      addChunk(answer, JSON.parse(data));
      onChange(answer);
    }
    if (!done && answer.finishReason === null) throw new Error("The connection ended before the answer did.");
  }
}

export function requestHeaders(settings) {
  const headers = {"Content-Type": "application/json"};
  if (settings.apiKey) headers.Authorization = `Bearer ${settings.apiKey}`;
  return headers;
}

function requestBody(conversation, settings) {
  const system = settings.system ? [{role: "system", content: settings.system}] : [];
  const body = {
    model: settings.model,
    messages: [...system, ...conversation],
    stream: true,
    stream_options: {include_usage: true},
    reasoning_effort: settings.effort,
    temperature: settings.temperature,
  };
  if (settings.maxTokens) body.max_completion_tokens = settings.maxTokens;
  if (settings.tools) body.tools = settings.tools;
  return body;
}

async function errorText(response) {
  const text = await response.text();
  try {
    const {error} = JSON.parse(text);
    return `${response.status}: ${error.message}`;
  } catch {
    return `${response.status} ${response.statusText}`.trim();
  }
}

function addChunk(answer, chunk) {
  if (chunk.error) throw new Error(chunk.error.message ?? "The server reported an error.");
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  if (answer.times.first === undefined && (reasoning || delta.content || delta.tool_calls)) {
    answer.times.first = performance.now();
  }
  answer.reasoning += reasoning;
  answer.content += delta.content ?? "";
  for (const part of delta.tool_calls ?? []) addToolCall(answer.toolCalls, part);
  if (choice.finish_reason) answer.finishReason = choice.finish_reason;
}

function addToolCall(calls, part) {
  const index = part.index ?? calls.length;
  let call = calls.find((existing) => existing.index === index);
  if (!call) calls.push((call = {index, id: "", name: "", arguments: ""}));
  if (part.id) call.id = part.id;
  call.name += part.function?.name ?? "";
  call.arguments += part.function?.arguments ?? "";
}

function asMessage(answer) {
  const calls = answer.toolCalls.filter((call) => isObject(call.arguments));
  if (!answer.content && calls.length === 0 && !answer.reasoning) return null;
  const message = {role: "assistant", content: answer.content};
  if (answer.reasoning) message.reasoning_content = answer.reasoning;
  if (calls.length > 0) {
    message.tool_calls = calls.map((call) => ({
      id: call.id, type: "function", function: {name: call.name, arguments: call.arguments},
    }));
  }
  return message;
}

function isObject(text) {
  try {
    return JSON.parse(text)?.constructor === Object;
  } catch {
    return false;
  }
}

// The tools that the demonstration model was trained with. They run nowhere: the reader types their result.
const tool = (name, description, properties) => ({
  type: "function",
  function: {name, description, parameters: {type: "object", properties, required: Object.keys(properties)}},
});
export const EXAMPLE_TOOLS = [
  tool("get_weather", "Get the current weather of a city.", {city: {type: "string"}}),
  tool("get_time", "Get the local time of a city.", {city: {type: "string"}}),
  tool("set_timer", "Start a timer.", {minutes: {type: "integer"}}),
];
