// Words: how tokens, numbers and steps read. Token text is hostile: it only ever becomes textContent, after visible().
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});

  const SHOWN = { "\n": "⏎", "\t": "⇥", "\r": "␍" };
  const INVISIBLE = /[\s\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;

  /** Token text with its spaces, line breaks and invisible characters made visible, at most `limit` characters long. */
  function visible(text, limit = 80, space = "·") {
    const head = text.slice(0, 4 * limit).toWellFormed();
    const show = (c) => (c === " " ? space : (SHOWN[c] ?? `‹${c.codePointAt(0).toString(16)}›`));
    const shown = Array.from(head.replace(INVISIBLE, show));
    const cut = shown.length > limit || text.length > 4 * limit;
    return cut ? shown.slice(0, limit - 1).join("") + "…" : shown.join("") || "∅";
  }

  /** Token text for running prose: plain spaces stay spaces, a line break is shown where it stands. */
  function prose(text, limit = 400) {
    return text === "" ? "" : visible(text, limit, " ");
  }

  /** What stands for a special token, which is no text. */
  const sign = (meaning) => `‹${meaning}›`;
  /** What a token of a record stands for, such as "end of reply"; nothing for text. */
  const meaningOf = (record, id) => record.special?.[id];

  const isDrafted = (record) => record.tree.token_ids.length > 1;
  /** Drafted tokens that were emitted: all that the target agreed with, but for those after a stop. */
  const acceptedCount = (record) => Math.min(record.token_ids.length, record.verdict.path.length - 1);

  /** What became of a node ("target": the own token): root, accepted, rejected, target, or unsaid: the reply ended before it. */
  function stateOf(record, node) {
    const accepted = acceptedCount(record);
    if (node === "target") return record.token_ids.length > accepted ? "target" : "unsaid";
    if (node === 0) return "root";
    const at = record.verdict.path.indexOf(node);
    return at < 0 ? "rejected" : at > accepted ? "unsaid" : "accepted";
  }

  /** bonus | recovered | plain: what the target's own token of a step is. */
  const ownKind = (record) => (isDrafted(record) ? record.verdict.kind : "plain");

  /** accepted | bonus | recovered | plain: where the `i`-th emitted token of a step came from. */
  function kindOf(record, i) {
    return i < acceptedCount(record) ? "accepted" : ownKind(record);
  }

  const KIND_WORDS = {
    accepted: "accepted draft",
    bonus: "bonus: the target's own token after a fully accepted path",
    recovered: "recovered: the target's own token where it disagreed",
    plain: "plain: the target's own token, nothing was drafted",
  };

  const SOURCE_WORDS = {
    context: "this conversation",
    recycled: "an earlier pass",
    memory: "earlier replies",
    vocabulary: "common words",
  };
  const sourceWords = (source) => SOURCE_WORDS[source] ?? source;

  function branchCount(tree) {
    const parents = new Set(tree.parents);
    return tree.parents.reduce((count, parent, node) => count + (node > 0 && !parents.has(node) ? 1 : 0), 0);
  }

  const counted = (n, noun, plural = noun + "s") => `${number(n, 0)} ${n === 1 ? noun : plural}`;

  /** The step in one sentence, as [text, kind | null] pieces; `kind` colours a number like the tokens it counts. */
  function equation(record) {
    const emitted = record.token_ids.length;
    const end = record.finish_reason === "eos" ? `, ${emitted === 1 ? "" : "the last of them "}the end of the reply` : "";
    const gave = [
      ["one pass gave ", null],
      [String(emitted), "gave"],
      [`${emitted === 1 ? " token" : " tokens"}${end}.`, null],
    ];
    if (!isDrafted(record)) {
      const why = record.note ? `${prose(record.note.replace("draft inactive: ", ""), 200)}; ` : "";
      return [[`Nothing was drafted: ${why}`, null], ...gave];
    }
    const drafted = record.tree.token_ids.length - 1;
    const accepted = acceptedCount(record);
    const start = `Drafted ${counted(drafted, "token")} in ${counted(branchCount(record.tree), "branch", "branches")}; the target `;
    if (accepted === 0) {
      return [[start + "agreed with none and added ", null], [String(emitted), "target"], [": ", null], ...gave];
    }
    if (emitted === accepted) {
      const ends = end ? ": " : " and the reply ends here: ";
      return [[start + "agreed with ", null], [String(accepted), "accepted"], [ends, null], ...gave];
    }
    return [
      [start + "agreed with ", null],
      [String(accepted), "accepted"],
      [" and added ", null],
      ["1", "target"],
      [": ", null],
      ...gave,
    ];
  }

  const equationText = (record) =>
    equation(record)
      .map(([text]) => text)
      .join("");

  /** How many replies were verified in the same pass; nothing where the reply was alone. */
  const sharing = ({ sequences = 1 }) => (sequences > 1 ? `${counted(sequences, "reply", "replies")} share this pass.` : "");

  /** A number for people: 1.87, 58.3, 1,204; a dash where there is none. */
  function number(value, digits = 2) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }

  function percent(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (value > 0 && value < 0.0005) return "< 0.1 %";
    return `${number(100 * value, value > 0 && value < 0.0995 ? 1 : 0)} %`;
  }

  /** What was asked of which model with which settings: the flat facts of a header as pieces of a line, none without a header. */
  function asked({ model = {}, settings = {}, prompt = [] }) {
    const question = prompt.findLast(({ role }) => role === "user");
    const { decoding, ...others } = settings;
    const isFlat = (value) => ["string", "number", "boolean"].includes(typeof value);
    const named = Object.entries(others).filter(([, value]) => isFlat(value));
    const facts = [
      ...[...Object.values(model), decoding].filter(isFlat),
      ...named.map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`),
    ];
    return [
      ...(question ? [`Asked: “${prose(question.content, 120)}”`] : []),
      ...(facts.length ? [prose(facts.join(" · "), 200)] : []),
    ];
  }

  /** Plotly parses pseudo-HTML in every label: nothing of it may survive. */
  const plotlyText = (text) => String(text).replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);

  /** A new HTML element: element("p", {class: "x"}, "text", child, ...). */
  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  specdec.words = {
    visible,
    prose,
    sign,
    meaningOf,
    isDrafted,
    acceptedCount,
    stateOf,
    ownKind,
    kindOf,
    KIND_WORDS,
    sourceWords,
    branchCount,
    counted,
    equation,
    equationText,
    sharing,
    asked,
    number,
    percent,
    plotlyText,
    element,
  };
})();
