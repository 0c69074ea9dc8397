// Markdown of a model → elements. A model is a stranger: marked makes HTML of its text, in which
// tags that it wrote are text, and DOMPurify lets through what is listed here and nothing else.

const { marked, DOMPurify } = globalThis;

const TAGS =
  "p br hr strong em del code pre blockquote ul ol li a h1 h2 h3 h4 h5 h6 table thead tbody tr th td";
const RULES = {
  ALLOWED_TAGS: TAGS.split(" "),
  ALLOWED_ATTR: ["href", "title", "class", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_TRUSTED_TYPE: true, // the page's policy takes nothing else for HTML
};

const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

marked.use({
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    // Nothing is fetched: a picture is a link to it.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

// Browsers look up, or connect to, where a link leads once a pointer is over it, and a stranger
// chose that name: a link leads nowhere until it is pressed, by a pointer or a key.
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  const url = node.tagName === "A" && node.getAttribute("href");
  if (!url) return;
  node.removeAttribute("href");
  node.setAttribute("title", url);
  node.setAttribute("role", "link");
  node.setAttribute("tabindex", "0");
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

for (const press of ["pointerdown", "keydown"]) {
  document.addEventListener(press, ({ target }) => {
    const link = target.closest?.(".answer a[role=link]");
    if (link) link.href = link.title;
  }, true);
}

// Show a text in an element; code blocks get their language and a button that copies them.
export function showMarkdown(place, text) {
  place.innerHTML = DOMPurify.sanitize(marked.parse(text), RULES);
  for (const code of place.querySelectorAll("pre > code")) frame(code);
  for (const table of place.querySelectorAll("table")) {
    const around = document.createElement("div");
    around.className = "wide";
    table.replaceWith(around);
    around.append(table);
  }
}

function frame(code) {
  const block = document.createElement("div"), head = document.createElement("div");
  block.className = "block";
  head.className = "head";
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  head.append(language, copyButton(() => code.textContent));
  code.parentElement.replaceWith(block);
  block.append(head, code.parentElement);
}

// A button that copies what text() gives.
export function copyButton(text) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

// Browsers give the clipboard to pages of this machine and of TLS; others have the older way.
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
