// How messages look: the reader's, and an answer as it grows.
import {element} from "./dom.js";
import {MarkdownView} from "./markdown.js";

export function userMessage(text) {
  return element("article.message.user", {"aria-label": "You"}, element("div.bubble", {}, text));
}

export class AnswerView {
  #reasoning = element("details.reasoning", {hidden: ""});
  #reasoningText = element("div.reasoning-text");
  #reasoningTitle = element("summary", {}, "Reasoning");
  #content = element("div.content");
  #tools = element("div.tools");
  #note = element("p.note");
  #markdown = new MarkdownView(this.#content);
  #pending = null;

  // onResults(messages): the reader has typed the result of every tool call.
  constructor(onResults) {
    this.onResults = onResults;
    this.#reasoning.append(this.#reasoningTitle, this.#reasoningText);
    this.node = element("article.message.answer", {"aria-label": "Answer", "aria-busy": "true"},
      this.#reasoning, this.#content, this.#tools, this.#note);
  }

  // Draws at most once a frame, however fast tokens arrive.
  update(answer, drawn = () => {}) {
    if (this.#pending === null) {
      requestAnimationFrame(() => {
        const latest = this.#pending;
        this.#pending = null;
        if (this.node.getAttribute("aria-busy") === "true") this.#draw(latest);
        drawn();
      });
    }
    this.#pending = answer;
  }

  #draw(answer) {
    this.#reasoning.hidden = answer.reasoning === "";
    if (this.#reasoningText.textContent !== answer.reasoning) this.#reasoningText.textContent = answer.reasoning;
    const thinking = answer.content === "" && answer.toolCalls.length === 0 && answer.finishReason === null;
    this.#reasoningTitle.textContent = thinking ? "Reasoning…" : "Reasoning";
    this.#markdown.update(answer.content);
    this.#drawTools(answer);
  }

  #drawTools(answer) {
    answer.toolCalls.forEach((call, i) => {
      const card = this.#tools.children[i] ?? this.#tools.appendChild(toolCard());
      card.querySelector(".tool-name").textContent = call.name;
      card.querySelector("code").textContent = pretty(call.arguments);
    });
  }

  // The stream is over: the last drawing, the figures, and fields for tool results.
  finish(answer) {
    this.#draw(answer);
    this.node.setAttribute("aria-busy", "false");
    if (answer.error) this.#note.before(element("p.error", {role: "alert"}, answer.error));
    this.#note.textContent = summary(answer);
    if (answer.finishReason === "tool_calls") this.#askForResults(answer.toolCalls);
  }

  #askForResults(calls) {
    const form = element("form.results");
    const fields = calls.map((call, i) => {
      const input = element("input", {type: "text", id: `result-${call.id || i}`, autocomplete: "off", required: ""});
      form.append(element("label", {for: input.id}, `Result of ${call.name}`), input);
      return input;
    });
    form.append(element("button.primary", {type: "submit"}, calls.length > 1 ? "Send results" : "Send result"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const results = calls.map((call, i) => ({role: "tool", tool_call_id: call.id, content: fields[i].value}));
      if (this.onResults(results)) form.replaceWith(...results.map(({content}) => element("p.result", {}, content)));
    });
    this.#tools.append(form);
    fields[0]?.focus();
  }
}

function toolCard() {
  return element("section.tool", {"aria-label": "Tool call"},
    element("header", {}, element("span.tool-kind", {}, "Tool"), element("span.tool-name")),
    element("pre", {tabindex: "0"}, element("code")));
}

// Arguments as they stream are rarely complete JSON: then they are shown as they are.
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const REASONS = {length: "cut at the token limit", stopped: "stopped", tool_calls: "waiting for a tool", error: "failed"};

function summary(answer) {
  const parts = [];
  if (REASONS[answer.finishReason]) parts.push(REASONS[answer.finishReason]);
  const {start, first, end} = answer.times;
  const tokens = answer.usage?.completion_tokens;
  if (tokens !== undefined) parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  if (first !== undefined) parts.push(`first after ${Math.round(first - start)} ms`);
  if (tokens > 1 && end - first > 100) parts.push(`${Math.round((tokens - 1) / ((end - first) / 1000))} tokens/s`);
  const cached = answer.usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${answer.usage.prompt_tokens} prompt tokens from the cache`);
  return parts.join(" · ");
}
