// A text as the file alone reads it, and with what a run has trained.

import { digits, make, table } from "./page.js";
import { positionIn, quoted, reading, signed } from "./tokens.js";

export function compared({ tokens, base, adapted }, asked, change) {
  const text = reading(tokens, (at) => change({ at })), told = make("div");
  const gains = tokens.map((_, i) => (i ? base.losses[i] - adapted.losses[i] : 0)), most = Math.max(...gains.map(Math.abs), 1e-9);
  text.spans.forEach((span, i) => {
    span.style.backgroundColor = signed(gains[i], most);
    if (i) span.title = `loss ${digits(base.losses[i])} → ${digits(adapted.losses[i])}`;
  });
  function show(fields) {
    const at = positionIn(fields, tokens.length);
    text.mark(at);
    const said = ([token, p]) => `${quoted(token)} ${digits(100 * p, 3)} %`;
    const lines = base.best[at].map((each, i) => [said(each), said(adapted.best[at][i])]);
    const loss = at ? `${quoted(tokens[at])}: loss ${digits(base.losses[at])} alone, ${digits(adapted.losses[at])} with ${asked.model}. ` : "";
    told.replaceChildren(make("p", { role: "status" }, `${loss}After it they would say:`), table(["the file alone", `with ${asked.model}`], lines));
  }
  const heading = make("h2", {}, `Loss ${digits(base.loss)} alone, ${digits(adapted.loss)} with ${asked.model}`);
  const hint = make("p", { class: "quiet" }, `Green: the run lowered this token's loss; orange: it raised it, by ${digits(most, 3)} at most. Choose a token to see what both would say after it.`);
  return { nodes: [heading, hint, text.node, told], show };
}
