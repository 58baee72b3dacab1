// The live panel: GET /stats once a second while the page is visible.
import {element, svg} from "./dom.js";

const INTERVAL_MS = 1000;
const HISTORY = 60;  // samples in the sparkline

const TILES = [
  {id: "running", label: "Running", title: "Requests that the engine computes now"},
  {id: "waiting", label: "Waiting", title: "Requests in the queue"},
  {id: "rate", label: "Tokens per second", title: "Generated tokens, over all requests", wide: true},
  {id: "ttft", label: "First token", title: "Time to first token (TTFT), median of the last minute"},
  {id: "tpot", label: "Later tokens", title: "Time per output token (TPOT), median of the last minute"},
  {id: "cache", label: "Cache in use", title: "Pages of the KV cache that running requests hold", meter: true},
  {id: "hits", label: "Cache hits", title: "Prompt tokens that came from the prefix cache", meter: true},
];

const percent = (share) => `${Math.round(share * 100)} %`;
const seconds = (s) => (s >= 1 ? `${s.toFixed(2)} s` : `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms`);
const FORMATS = {
  running: String, waiting: String, rate: (x) => (x < 100 ? x.toFixed(1) : String(Math.round(x))),
  ttft: seconds, tpot: seconds, cache: percent, hits: percent,
};

export class Panel {
  #tiles = {};
  #rates = Array(HISTORY).fill(0);
  #line = svg("polyline");
  #timer = null;

  // headers(): of each request, with the key when there is one.
  constructor(list, state, headers) {
    this.state = state;
    this.headers = headers;
    for (const tile of TILES) list.append(this.#makeTile(tile));
    document.addEventListener("visibilitychange", () => this.#schedule(0));
    this.#schedule(0);
  }

  #makeTile({id, label, title, wide, meter}) {
    const value = element("span.value", {}, "–");
    const figure = element("dd", {}, value);
    if (meter) figure.append(element("meter", {min: "0", max: "1", value: "0", "aria-hidden": "true"}));
    if (wide) {
      const chart = svg("svg", {class: "spark", viewBox: `0 0 ${HISTORY - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true"});
      chart.append(this.#line);
      figure.append(chart);
    }
    this.#tiles[id] = figure;
    return element(wide ? "div.tile.wide" : "div.tile", {title}, element("dt", {}, label), figure);
  }

  #schedule(delay) {
    clearTimeout(this.#timer);
    if (document.visibilityState === "visible") this.#timer = setTimeout(() => this.#poll(), delay);
  }

  async #poll() {
    try {
      const response = await fetch("stats", {headers: this.headers(), cache: "no-store", signal: AbortSignal.timeout(5000)});
      if (response.ok) this.#show(figures(await response.json()));
      else this.#setState(response.status === 401 ? "needs a key" : `error ${response.status}`, "bad");
    } catch {
      this.#setState("offline", "bad");
    }
    this.#schedule(INTERVAL_MS);
  }

  #setState(text, kind) {
    if (this.state.textContent === text) return;
    this.state.textContent = text;
    this.state.dataset.state = kind;
  }

  #show(now) {
    this.#setState("live", "good");
    for (const [id, tile] of Object.entries(this.#tiles)) {
      const known = Number.isFinite(now[id]);
      tile.querySelector(".value").textContent = known ? FORMATS[id](now[id]) : "–";
      const meter = tile.querySelector("meter");
      if (meter) meter.value = known ? now[id] : 0;
    }
    this.#rates = [...this.#rates.slice(1), now.rate || 0];
    const top = Math.max(1, ...this.#rates);
    this.#line.setAttribute("points", this.#rates.map((rate, i) => `${i},${(19 - (rate / top) * 18).toFixed(2)}`).join(" "));
  }
}

// The server's figures by the tiles' names; null where there is none yet.
function figures(stats) {
  return {
    running: stats.running, waiting: stats.waiting, rate: stats.tokens_per_s, ttft: stats.ttft_s, tpot: stats.tpot_s,
    cache: stats.cache_usage, hits: stats.cache_hit_rate,
  };
}
