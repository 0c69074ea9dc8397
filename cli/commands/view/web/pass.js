// The pass whose graph or plan is shown: a form, whose fields stand in the address.

import { make } from "./page.js";

const NAMES = ["kind", "ctx", "batch", "rank", "modules", "keep"];

export const passOf = (fields) => Object.fromEntries(NAMES.map((name) => [name, fields.get(name)]));

export function passForm(changed) {
  const kind = choice("kind", { training: "LoRA training", logits: "logits alone", net: "a small net" });
  const ctx = number("ctx", 256, 2), batch = number("batch", 1, 1), rank = number("rank", 8, 1);
  const modules = make("input", { name: "modules", placeholder: "all linear", autocomplete: "off", title: "names such as attn_q, ffn_down, with commas; empty: those that pyggml finetune takes" });
  const keep = choice("keep", { costly: "costly activations", layers: "layers (checkpointing)" });
  const training = [field("windows", batch), field("rank", rank), field("target modules", modules), field("kept for backward", keep)];
  const length = field("tokens in a window", ctx);
  const button = make("button", { type: "submit", class: "main" }, "Show");
  const form = make("form", { class: "fields" }, field("pass", kind), length, ...training, button);
  const arrange = () => {
    length.hidden = kind.value === "net";
    training.forEach((each) => (each.hidden = kind.value !== "training"));
  };
  kind.addEventListener("change", arrange);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    changed(Object.fromEntries(new FormData(form)));
  });
  let isTouched = false;
  form.addEventListener("input", () => (isTouched = true));
  // What the server made of it; what was entered while it answered stays.
  form.answered = (pass) => isTouched || form.take(pass);
  form.take = (pass) => {
    isTouched = false;
    for (const name of NAMES) if (pass[name] != null) form.elements[name].value = pass[name];
    arrange();
  };
  arrange();
  return form;
}

const field = (label, input) => make("label", {}, label, input);
const number = (name, value, min) => make("input", { type: "number", name, value, min, required: true });
const choice = (name, labels) =>
  make("select", { name }, ...Object.entries(labels).map(([value, label]) => make("option", { value }, label)));
