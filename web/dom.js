// Building DOM nodes. Text only ever enters as text nodes: nothing here parses markup.

// element("p.note", {title: "x"}, "text", node): a tag with optional classes, attributes, children.
export function element(spec, attributes = {}, ...children) {
  const [tag, ...classes] = spec.split(".");
  const node = document.createElement(tag);
  if (classes.length > 0) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);
