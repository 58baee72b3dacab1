// Wires the page: composer, conversation, settings, live panel.
import {Chat, EXAMPLE_TOOLS, requestHeaders} from "./chat.js";
import {byId} from "./dom.js";
import {AnswerView, userMessage} from "./messages.js";
import {Panel} from "./panel.js";

const chat = new Chat();
const log = byId("log");
const prompt = byId("prompt");
let model = "";

function settings() {
  const maxTokens = Number.parseInt(byId("max-tokens").value, 10);
  return {
    model,
    apiKey: byId("api-key").value.trim(),
    system: byId("system").value.trim(),
    effort: byId("effort").value,
    temperature: Number(byId("temperature").value),
    maxTokens: maxTokens > 0 ? maxTokens : null,
    tools: byId("tools").checked ? EXAMPLE_TOOLS : null,
  };
}

const nearEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 80;
const scrollToEnd = () => { log.scrollTop = log.scrollHeight; };
const say = (text) => { byId("status").textContent = text; };

function setBusy(busy) {
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
}

// Sends messages and shows the answer as it comes. False when an answer is still coming.
function send(messages) {
  if (chat.busy) return false;
  byId("empty").hidden = true;
  for (const {role, content} of messages) if (role === "user") log.append(userMessage(content));
  const view = new AnswerView(send);
  log.append(view.node);
  scrollToEnd();
  setBusy(true);
  say("Answering…");
  chat.ask(messages, settings(), (answer) => {
    const follow = nearEnd();  // the reader may have scrolled up to read
    view.update(answer, () => follow && scrollToEnd());
  }).then((answer) => {
    const follow = nearEnd();
    view.finish(answer);
    if (follow) scrollToEnd();
    if (!chat.busy) setBusy(false);
    if (view.node.isConnected) say(answer.error ? "The answer failed." : "The answer is complete.");
  });
  return true;
}

function submitPrompt() {
  const text = prompt.value.trim();
  if (text === "" || !send([{role: "user", content: text}])) return;
  prompt.value = "";
  fitPrompt();
}

// The field grows with its text; the style sheet bounds it.
function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function newChat() {
  chat.clear();
  for (const message of log.querySelectorAll(".message")) message.remove();
  byId("empty").hidden = false;
  setBusy(false);
  say("New chat.");
  prompt.focus();
}

function setUpComposer() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submitPrompt();
  });
  prompt.addEventListener("input", fitPrompt);
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submitPrompt();
  });
  byId("stop").addEventListener("click", () => {
    chat.stop();
    prompt.focus();
  });
  byId("new-chat").addEventListener("click", newChat);
  for (const sample of document.querySelectorAll(".sample")) {
    sample.addEventListener("click", () => send([{role: "user", content: sample.textContent}]));
  }
}

function setUpSide() {
  const toggle = byId("side-toggle");
  const show = (open) => {
    document.body.classList.toggle("side-open", open);
    toggle.setAttribute("aria-expanded", String(open));
  };
  toggle.addEventListener("click", () => show(toggle.getAttribute("aria-expanded") !== "true"));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (document.body.classList.contains("side-open")) {
      show(false);
      toggle.focus();
    } else {
      chat.stop();
    }
  });
  byId("settings").addEventListener("submit", (event) => event.preventDefault());
  const temperature = byId("temperature");
  temperature.addEventListener("input", () => { byId("temperature-value").value = temperature.value; });
}

// The key lives in this tab's session storage and goes nowhere but into the Authorization header.
function setUpKey() {
  const field = byId("api-key");
  field.value = sessionStorage.getItem("tessera.key") ?? "";
  field.addEventListener("change", () => {
    sessionStorage.setItem("tessera.key", field.value.trim());
    loadModel();
  });
}

async function loadModel() {
  try {
    const response = await fetch("v1/models", {headers: requestHeaders(settings())});
    if (response.status === 401) {
      byId("model").textContent = "needs an API key";
      return;
    }
    model = (await response.json()).data[0].id;
    byId("model").textContent = model.split("/").pop();
    byId("model").title = model;
    byId("demo-hint").hidden = !model.includes("demo");
  } catch {
    byId("model").textContent = "no server";
  }
}

setUpComposer();
setUpSide();
setUpKey();
loadModel();
new Panel(byId("live"), byId("live-state"), () => requestHeaders(settings()));
prompt.focus({preventScroll: true});
