// A picture that fits its frame, and is looked at more closely: by buttons, keys, Ctrl with the
// wheel, two fingers; what is closer is dragged.

import { make } from "./page.js";

const MOST = 2.5, READABLE = 0.55, SEEN = 0.3; // pixels for each of the picture's

export function framed(svg, name) {
  let { x: left, y: top, width, height } = svg.viewBox.baseVal;
  const sign = (text, words, act) => make("button", { type: "button", title: words, "aria-label": words, click: act }, text);
  const tools = make("div", { class: "tools" },
    sign("−", "Smaller", () => zoom(1 / 1.4)), sign("+", "Larger", () => zoom(1.4)), sign("Fit", "Show all of it", () => fit()));
  const about = `${name}: + and − zoom, 0 shows all, arrows move`;
  const frame = make("div", { class: "frame", tabindex: 0, role: "group", "aria-label": about }, svg);
  const node = make("div", { class: "framed" }, tools, frame);
  svg.removeAttribute("width");
  svg.removeAttribute("height");
  let k = 1, x = 0, y = 0, fitted = true; // pixels for each of the picture's; the corner that is shown
  const least = () => Math.min(1, frame.clientWidth / width, frame.clientHeight / height);

  function draw() {
    const w = frame.clientWidth / k, h = frame.clientHeight / k;
    const within = (at, room, from, all) => from + (room >= all ? (all - room) / 2 : Math.max(0, Math.min(at - from, all - room)));
    x = within(x, w, left, width);
    y = within(y, h, top, height);
    svg.setAttribute("viewBox", `${x} ${y} ${w} ${h}`);
    frame.classList.toggle("closer", !fitted);
  }
  function fit() {
    fitted = true;
    k = least();
    draw();
  }
  // The point (px, py) of the frame stays where it is.
  function zoom(factor, px = frame.clientWidth / 2, py = frame.clientHeight / 2) {
    const to = Math.max(least(), Math.min(MOST, k * factor));
    [x, y] = [x + px / k - px / to, y + py / k - py / to];
    k = to;
    fitted = k <= least() * 1.001;
    draw();
  }
  function pan(dx, dy) {
    x -= dx / k;
    y -= dy / k;
    draw();
  }
  // The parts may take less room than the picture has. One that would be too small to be seen
  // as a whole begins with its first node.
  function measure() {
    const box = svg.getBBox();
    [left, top, width, height] = [box.x - 8, box.y - 8, box.width + 16, box.height + 16];
    isMeasured = true;
    place();
    if (wanted || least() < SEEN) show(wanted ?? svg.querySelector("[data-node]"));
  }
  function place() {
    const high = height * Math.min(1, frame.clientWidth / width);
    frame.style.height = `${Math.max(high, Math.min(height, 420))}px`; // the style sheet bounds it
    fitted ? fit() : draw();
  }
  let isMeasured = false, wanted = null; // what is to be seen once there is a frame
  new ResizeObserver(() => frame.clientWidth && (isMeasured ? place() : measure())).observe(frame);

  frame.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const box = frame.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY / 200), event.clientX - box.left, event.clientY - box.top);
  }, { passive: false });
  frame.addEventListener("keydown", (event) => {
    const far = 60, moves = { ArrowLeft: [far, 0], ArrowRight: [-far, 0], ArrowUp: [0, far], ArrowDown: [0, -far] };
    const act = { "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4), 0: fit }[event.key]
      ?? (!fitted && moves[event.key] && (() => pan(...moves[event.key])));
    if (!act || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    act();
  });
  dragged(frame, pan, zoom);
  // Bring a node of the picture into sight, large enough to be read.
  function show(part) {
    wanted = part;
    if (!part || !isMeasured) return;
    const box = part.getBBox(), w = () => frame.clientWidth / k, h = () => frame.clientHeight / k;
    const seen = box.x >= x && box.y >= y && box.x + box.width <= x + w() && box.y + box.height <= y + h();
    if (k < READABLE) [k, fitted] = [0.85, false];
    else if (seen) return;
    [x, y] = [box.x + (box.width - w()) / 2, box.y + (box.height - h()) / 2];
    draw();
  }
  return { node, show };
}

// One finger or the mouse moves, two fingers zoom; a click stays one unless it has moved.
function dragged(frame, pan, zoom) {
  const fingers = new Map();
  let moved = false;
  frame.addEventListener("pointerdown", (event) => {
    if (!fingers.size) moved = false;
    fingers.set(event.pointerId, event);
  });
  frame.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (!before) return;
    const [dx, dy] = [event.clientX - before.clientX, event.clientY - before.clientY];
    if (!moved && Math.hypot(dx, dy) < 4) return;
    moved = true;
    frame.setPointerCapture(event.pointerId); // not before, else a click has lost its node
    const other = [...fingers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) {
      const apart = (one) => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);
      const box = frame.getBoundingClientRect();
      zoom(apart(event) / apart(before), (event.clientX + other.clientX) / 2 - box.left, (event.clientY + other.clientY) / 2 - box.top);
    } else pan(dx, dy);
    fingers.set(event.pointerId, event);
  });
  for (const end of ["pointerup", "pointercancel"])
    frame.addEventListener(end, (event) => fingers.delete(event.pointerId));
  frame.addEventListener("pointerleave", (event) => frame.hasPointerCapture(event.pointerId) || fingers.delete(event.pointerId));
  frame.addEventListener("click", (event) => moved && event.stopPropagation(), true);
}
