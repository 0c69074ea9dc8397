// Parts of which one is shown (WAI-ARIA: tabs), chosen by a click or the arrow keys.

import { make } from "./page.js";

// labels: by name; choose(name) hears which part is wanted.
export function tabs(title, labels, choose) {
  const all = Object.entries(labels).map(([name, label]) =>
    make("button", { type: "button", role: "tab", name, tabindex: -1, click: () => choose(name) }, label));
  const node = make("div", { class: "tabs", role: "tablist", "aria-label": title }, ...all);
  const offered = () => all.filter((tab) => !tab.hidden);
  node.addEventListener("keydown", (event) => {
    const tabs = offered(), at = tabs.indexOf(event.target);
    const to = tabs[{ ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key]];
    if (!to) return;
    event.preventDefault();
    to.focus();
    choose(to.name);
  });
  return {
    node,
    offer: (name, is) => (all.find((tab) => tab.name === name).hidden = !is),
    // Mark a part; the first one where it is none. Returns its name.
    select(name) {
      const chosen = offered().find((tab) => tab.name === name) ?? all[0];
      for (const tab of all) {
        tab.setAttribute("aria-selected", tab === chosen);
        tab.tabIndex = tab === chosen ? 0 : -1;
      }
      return chosen.name;
    },
  };
}
