// Elements from plain text: nothing from a model or a user is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const EDGE = 24; // pixels at the ends of a line that scrolls, where it fades

/**
 * Make an element. Properties: class, style (an object), on (listeners), data (data-*); all others are attributes.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Properties} [properties]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/**
 * Make an SVG element.
 * @template {keyof SVGElementTagNameMap} K
 * @param {K} tag
 * @param {Properties} [properties]
 * @param {...Child} children
 * @returns {SVGElementTagNameMap[K]}
 */
export function s(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

/**
 * @template {HTMLElement | SVGElement} E
 * @param {E} node
 * @param {Properties} properties
 * @param {Child[]} children
 * @returns {E}
 */
function fill(node, { class: classes, style = {}, on = {}, data = {}, ...attributes }, children) {
  if (classes !== undefined) node.setAttribute("class", classes);
  for (const [name, value] of Object.entries(style)) node.style.setProperty(name, String(value));
  for (const [name, act] of Object.entries(on)) node.addEventListener(name, /** @type {EventListener} */ (act));
  for (const [name, value] of Object.entries(data)) node.dataset[name] = String(value);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "value") Object.assign(node, { value });
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...present(children));
  return node;
}

/**
 * Replace the children of an element.
 * @template {Element} E
 * @param {E} node
 * @param {...Child} children
 * @returns {E}
 */
export function put(node, ...children) {
  node.replaceChildren(...present(children));
  return node;
}

/**
 * The children that are there, in one list.
 * @param {Child[]} children
 * @returns {(Node | string)[]}
 */
function present(children) {
  return children.flatMap((child) =>
    Array.isArray(child) ? present(child) : child === null || child === undefined || child === false ? [] : [child],
  );
}

/**
 * Scroll a box, and not the page, to where one of its elements is in view.
 * @param {Element} node
 * @param {Element} box
 */
export function reveal(node, box) {
  const [inner, outer] = [node.getBoundingClientRect(), box.getBoundingClientRect()];
  if (inner.left < outer.left + EDGE || inner.right > outer.right - EDGE)
    box.scrollLeft += (inner.left + inner.right - outer.left - outer.right) / 2;
  if (inner.top < outer.top || inner.bottom > outer.bottom)
    box.scrollTop += (inner.top + inner.bottom - outer.top - outer.bottom) / 2;
}
