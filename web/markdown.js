// A small part of Markdown, as DOM nodes: paragraphs, headings, lists, quotes, rules, code, emphasis, links. The model's
// text is untrusted: it enters as text nodes, and a link is made only for http and https.
import {element} from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;

// Cuts a text into blocks: {kind, text, ...}. An unclosed code fence runs to the end, as it does while it streams in.
export function blocks(text) {
  const found = [];
  let fence = null;
  for (const line of text.replace(/\r\n?/g, "\n").split("\n")) {
    const last = found.at(-1);
    const opening = FENCE.exec(line);
    if (fence) {
      if (opening && opening[1].startsWith(fence) && opening[2] === "") fence = null;
      else last.lines.push(line);
    } else if (opening) {
      fence = opening[1];
      found.push({kind: "code", language: opening[2], lines: []});
    } else if (line.trim() === "") {
      found.push({kind: "gap", lines: []});
    } else {
      addLine(found, last, line);
    }
  }
  return found.filter((block) => block.kind !== "gap").map(({lines, ...rest}) => ({...rest, text: lines.join("\n")}));
}

function addLine(found, last, line) {
  const heading = HEADING.exec(line);
  const item = ITEM.exec(line);
  const quote = QUOTE.exec(line);
  const append = (kind, text, extra = {}) => {
    if (last?.kind === kind && kind !== "heading") last.lines.push(text);
    else found.push({kind, lines: [text], ...extra});
  };
  if (heading) append("heading", heading[2], {level: heading[1].length});
  else if (RULE.test(line)) found.push({kind: "rule", lines: []});
  else if (item) append(item[1] ? "ol" : "ul", item[2], item[1] ? {start: Number(item[1])} : {});
  else if (quote) append("quote", quote[1]);
  else if (last?.kind === "ul" || last?.kind === "ol") last.lines[last.lines.length - 1] += "\u2028" + line.trim();
  else append("paragraph", line);
}

const INLINE = /(`+)(.+?)\1(?!`)|\*\*(\S(?:.*?\S)?)\*\*|(?<![\w*])\*(\S(?:.*?\S)?)\*(?![\w*])|\[([^\]\n]+)\]\(([^()\s]+)\)|\b(https?:\/\/[^\s<>"'`]+[^\s<>"'`.,;:!?)\]])/s;

// The search for marks takes time by the square of an unclosed text, at every drawing: no paragraph is this long.
const INLINE_CHARS_MAX = 10_000;

// Inline marks of a text, as nodes. Emphasis nests to a depth of 8.
export function inline(text, depth = 0) {
  const nodes = [];
  let rest = text;
  const marked = depth < 8 && text.length <= INLINE_CHARS_MAX;
  for (let match = marked && INLINE.exec(rest); match; match = INLINE.exec(rest)) {
    if (match.index > 0) nodes.push(...plain(rest.slice(0, match.index)));
    if (match[2] !== undefined) nodes.push(element("code", {}, match[2]));
    else if (match[3] !== undefined) nodes.push(element("strong", {}, ...inline(match[3], depth + 1)));
    else if (match[4] !== undefined) nodes.push(element("em", {}, ...inline(match[4], depth + 1)));
    else nodes.push(link(match[5] ?? match[7], match[6] ?? match[7], match[0]));
    rest = rest.slice(match.index + match[0].length);
  }
  if (rest !== "") nodes.push(...plain(rest));
  return nodes;
}

const plain = (text) => text.split(/[\n\u2028]/).flatMap((line, i) => (i > 0 ? [element("br"), line] : [line]));

function link(label, target, source) {
  let url = null;
  try {
    url = new URL(target);
  } catch {
    // not an absolute address
  }
  if (url?.protocol !== "https:" && url?.protocol !== "http:") return source;
  return element("a", {href: url.href, target: "_blank", rel: "noopener noreferrer nofollow"}, label);
}

function blockNode(block) {
  switch (block.kind) {
    case "code": {
      const code = element("pre", {tabindex: "0"}, element("code", {}, block.text));
      if (block.language) code.dataset.language = block.language;
      return code;
    }
    case "heading":
      return element(`h${Math.min(6, block.level + 2)}`, {}, ...inline(block.text));
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...inline(block.text));
    case "ul":
    case "ol": {
      const list = element(block.kind, {}, ...block.text.split("\n").map((item) => element("li", {}, ...inline(item))));
      if (block.kind === "ol" && block.start !== 1) list.setAttribute("start", String(block.start));
      return list;
    }
    default:
      return element("p", {}, ...inline(block.text));
  }
}

// Shows a growing text: only blocks that changed are made again.
export class MarkdownView {
  #shown = [];

  constructor(container) {
    this.container = container;
  }

  update(text) {
    const next = blocks(text).map((block) => ({block, key: JSON.stringify(block)}));
    let same = 0;
    while (same < next.length && this.#shown[same]?.key === next[same].key) ++same;
    for (const {node} of this.#shown.splice(same)) node.remove();
    for (const {block, key} of next.slice(same)) {
      const node = blockNode(block);
      this.container.append(node);
      this.#shown.push({key, node});
    }
  }
}
