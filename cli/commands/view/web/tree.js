// Trees and lists that are walked with the arrow keys (WAI-ARIA: tree view, listbox).

import { make, reveal } from "./page.js";

// items: {label, note, value} for leaves, {label, note, children} for branches.
export function tree(name, items, choose) {
  const root = make("ul", { class: "tree", role: "tree", "aria-label": name });
  root.append(...items.map(item));
  const all = () => [...root.querySelectorAll('[role="treeitem"]')];
  const seen = () => all().filter((node) => !node.parentElement.closest('[aria-expanded="false"]'));
  if (root.firstElementChild) root.firstElementChild.tabIndex = 0;

  function focus(node) {
    if (!node) return;
    all().forEach((each) => (each.tabIndex = -1));
    node.tabIndex = 0;
    node.focus();
  }

  function act(node) {
    if (node.ariaExpanded) node.ariaExpanded = node.ariaExpanded === "true" ? "false" : "true";
    else choose(node.dataset.value);
  }

  root.addEventListener("click", (event) => {
    const node = event.target.closest('[role="treeitem"]');
    focus(node);
    if (node) act(node);
  });
  root.addEventListener("keydown", (event) => {
    const node = event.target, shown = seen(), at = shown.indexOf(node);
    const keys = {
      ArrowDown: () => focus(shown[at + 1]),
      ArrowUp: () => focus(shown[at - 1]),
      Home: () => focus(shown[0]),
      End: () => focus(shown.at(-1)),
      ArrowRight: () => (node.ariaExpanded === "false" ? act(node) : node.ariaExpanded && focus(shown[at + 1])),
      ArrowLeft: () =>
        node.ariaExpanded === "true" ? act(node) : focus(node.parentElement.closest('[role="treeitem"]')),
      Enter: () => act(node),
      " ": () => act(node),
    };
    if (!keys[event.key] || at < 0) return;
    event.preventDefault();
    keys[event.key]();
  });
  root.select = (value) => {
    for (const node of all()) {
      const is = node.dataset.value === value;
      node.setAttribute("aria-selected", is);
      if (!is || !value) continue;
      for (let up = node.parentElement.closest("[aria-expanded]"); up; up = up.parentElement.closest("[aria-expanded]"))
        up.ariaExpanded = "true";
      all().forEach((each) => (each.tabIndex = -1));
      node.tabIndex = 0;
    }
  };
  return root;
}

function item({ label, note, value, children }) {
  const row = make("div", { class: "row" }, make("span", {}, label), make("span", { class: "quiet" }, note ?? ""));
  const node = make("li", { role: "treeitem", tabindex: -1, "aria-selected": "false" }, row);
  if (children) {
    node.setAttribute("aria-expanded", "false");
    node.append(make("ul", { role: "group" }, ...children.map(item)));
  } else {
    node.dataset.value = value;
  }
  return node;
}

// A list of one choice: labels by number. choose(i) also as the arrow keys move.
export function list(name, labels, choose) {
  const options = labels.map((label) => make("li", { role: "option", tabindex: -1, "aria-selected": "false" }, label));
  const root = make("ul", { class: "list", role: "listbox", "aria-label": name }, ...options);
  if (options.length) options[0].tabIndex = 0;

  root.select = (i) => {
    options.forEach((option, j) => {
      option.setAttribute("aria-selected", i === j);
      option.tabIndex = (options[i] ? i === j : j === 0) ? 0 : -1;
    });
    reveal(options[i]);
  };
  function pick(i) {
    if (!options[i]) return;
    root.select(i);
    options[i].focus({ preventScroll: true });
    choose(i);
  }
  root.addEventListener("click", (event) => pick(options.indexOf(event.target.closest('[role="option"]'))));
  root.addEventListener("keydown", (event) => {
    const at = options.indexOf(event.target);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: options.length - 1, Enter: at, " ": at };
    if (at < 0 || !(event.key in to)) return;
    event.preventDefault();
    pick(to[event.key]);
  });
  return root;
}
