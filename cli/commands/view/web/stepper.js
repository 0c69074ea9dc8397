// Steps that are played, paused, and gone through by clicks and keys: of a graph's passes, of a
// backward pass, of a plan.

import { make } from "./page.js";

// choose(i) hears which step is wanted; whoever has drawn it says so by update(n, i, words).
export function stepper(name, choose, seconds = 1.2) {
  const slider = make("input", { type: "range", min: 0, value: 0, "aria-label": name });
  const told = make("output", {}), play = make("button", { type: "button", class: "main" });
  const button = (sign, words, to) => make("button", { type: "button", title: words, "aria-label": words, click: () => go(to()) }, sign);
  const back = button("◀", "One step back", () => at - 1), on = button("▶|", "One step on", () => at + 1);
  const first = button("|◀", "To the first step", () => 0);
  const buttons = make("div", { class: "buttons" }, first, back, play, on);
  const node = make("div", { class: "stepper", role: "group", "aria-label": name }, buttons, slider, told);
  let n = 0, at = 0, asked = 0, timer = null;

  function go(i) {
    if (i < 0 || i >= n) return;
    asked = i;
    choose(i);
  }
  function tick() {
    if (!node.isConnected || at >= n - 1) return pause();
    if (asked === at) go(at + 1); // else the last one is still under way
  }
  function pause() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }
  function toggle() {
    if (timer) return pause();
    if (at >= n - 1) go(0);
    timer = setInterval(tick, 1000 * seconds);
    play.textContent = "Pause";
  }
  function press(event) {
    if (!node.isConnected) return document.removeEventListener("keydown", press);
    if (!node.offsetParent) return; // in a part that is not shown
    const elsewhere = "input, textarea, select, summary, a"; // lists and trees keep their own keys
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.target.closest(elsewhere)) return;
    if (event.key === " " && event.target.closest("button")) return; // which it presses
    const act = { ArrowLeft: () => go(at - 1), ArrowRight: () => go(at + 1), Home: () => go(0), End: () => go(n - 1), " ": toggle }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
  play.addEventListener("click", toggle);
  slider.addEventListener("input", () => go(Number(slider.value)));
  document.addEventListener("keydown", press);
  pause();
  return {
    node,
    pause,
    update(count, i, words) {
      [n, at] = [count, i];
      asked = i;
      slider.max = n - 1;
      slider.value = i;
      slider.setAttribute("aria-valuetext", words);
      told.value = words;
      first.disabled = back.disabled = i <= 0;
      on.disabled = i >= n - 1;
    },
  };
}
