// Elements from plain text: nothing from a model or a user is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. Properties: class, style (an object), on (listeners), data (data-*); all others are attributes. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Make an SVG element. */
export function s(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.setAttribute("class", value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (name === "data") for (const [key, one] of Object.entries(value)) node.dataset[key] = one;
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Replace the children of an element. */
export function put(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}
