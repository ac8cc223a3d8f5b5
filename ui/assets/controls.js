// Controls: the small parts around the tree: buttons, beats, legend, headline figures, the menu.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const { words } = specdec;
  const { element } = words;

  const ICONS = {
    back: "M11 3 5 8l6 5z",
    next: "M5 3l6 5-6 5z",
    play: "M4 2.5l9 5.5-9 5.5z",
    pause: "M4 3h3v10H4zM9 3h3v10H9z",
    larger: "M7 3h2v4h4v2H9v4H7V9H3V7h4z",
    smaller: "M3 7h10v2H3z",
    fit: "M2 2h5v2H4v3H2zm7 0h5v5h-2V4H9zM2 9h2v3h3v2H2zm10 0h2v5H9v-2h3z",
    menu: "M2 7h3v3H2zm4.5 0h3v3h-3zM11 7h3v3h-3z",
  };

  function icon(name) {
    return specdec.svg(
      "svg",
      { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" },
      specdec.svg("path", { d: ICONS[name] }),
    );
  }

  function iconButton(name, label, onClick) {
    const button = element(
      "button",
      { type: "button", class: `icon-button ${name}`, "aria-label": label, title: label },
      icon(name),
    );
    button.addEventListener("click", onClick);
    return button;
  }

  function setIcon(button, name, label) {
    if (button.getAttribute("aria-label") === label) return;
    button.setAttribute("aria-label", label);
    button.title = label;
    button.replaceChildren(icon(name));
  }

  const BEAT_WORDS = {
    grow: "Candidates grow from the last token, best guess first.",
    verify: "One pass of the target (the model you chat with) scores all of them.",
    prune: "Candidates that the target would not have chosen are dropped.",
    commit: "The accepted path becomes text. The target's own token is the next root.",
    settled: "The target is the model you chat with.",
  };

  /** The four beats as buttons, the current one lit, with a line that says what it does. */
  class Beats {
    constructor(host, onPick) {
      this.buttons = specdec.BEATS.map((beat) => {
        const button = element("button", { type: "button", title: BEAT_WORDS[beat], "aria-pressed": "false" }, beat);
        button.addEventListener("click", () => onPick(beat));
        return button;
      });
      this.words = element("span", { class: "beat-words" });
      host.append(
        element("div", { class: "beats", role: "group", "aria-label": "The four beats of a step" }, ...this.buttons),
        this.words,
      );
    }

    /** `told`: what to say of the step while no beat is told. */
    show(beat, told) {
      this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(specdec.BEATS[i] === beat)));
      const text = (beat === "settled" && told) || BEAT_WORDS[beat];
      if (this.words.textContent !== text) this.words.textContent = text;
    }
  }

  /** Close a `<details>` on Escape and on a click elsewhere. */
  function dismissable(details) {
    document.addEventListener("click", (event) => !details.contains(event.target) && (details.open = false));
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !details.open || event.defaultPrevented) return;
      event.preventDefault();
      details.open = false;
      details.querySelector("summary").focus();
    });
    return details;
  }

  /** What the signs of a tree mean: their names in a row, which opens to a line about each. */
  function legend() {
    const mark = (kind) =>
      specdec.svg(
        "svg",
        { viewBox: "-7 -7 14 14", class: `key ${kind}`, "aria-hidden": "true" },
        specdec.svg("path", { d: specdec.MARKS[kind] }),
      );
    const box = (kind) => element("i", { class: `key ${kind}` });
    const entries = [
      [box, "accepted", "Drafted, and the target chose the same token. It is part of the reply."],
      [box, "rejected", "Drafted, but the target chose another token. It costs little, because the pass is needed anyway."],
      [mark, "bonus", "The target's own next token after a fully accepted draft. It costs no extra pass."],
      [mark, "recovered", "The target's own token where the draft was wrong."],
      [mark, "plain", "The target's own token where nothing was drafted."],
      [box, "probability", "The bar under a drafted token: the target's probability for it after the tokens before it."],
    ];
    const signed = ([sign, name]) => element("span", {}, sign(name), name);
    return dismissable(
      element(
        "details",
        { class: "help" },
        element("summary", { class: "legend", title: "What these mean" }, ...entries.map(signed), element("b", {}, "?")),
        element(
          "dl",
          { class: "help-box" },
          ...entries.flatMap((entry) => [element("dt", {}, signed(entry)), element("dd", {}, entry[2])]),
        ),
      ),
    );
  }

  /** [words beside it, the figure, more about it], each from a record's figures. Every figure is computed by the server. */
  const FIGURES = [
    ["tokens per pass", (f) => words.number(f.tokens_per_pass)],
    [
      "plain speed",
      (f) => `${words.number(f.speedup)}×`,
      (f, measured) =>
        `${f.speedup < 0.995 ? "slower, " : ""}${measured}: one pass takes as long as ${words.number(f.pass_cost)} plain passes`,
    ],
    ["tokens per second", (f) => words.number(f.tokens_per_second, f.tokens_per_second < 100 ? 1 : 0)],
    [
      "passes saved",
      (f) => words.number(f.passes_saved, 0),
      (f) => `${words.counted(f.passes, "pass", "passes")} for ${words.counted(f.tokens, "token")}`,
    ],
    [
      "of drafted accepted",
      (f) => words.percent(f.acceptance_rate),
      (f) => `${words.number(f.accepted, 0)} of ${words.number(f.drafted, 0)}`,
    ],
  ];
  const WHY_LOW =
    "Branches are alternatives. At most one child of each node can be accepted, so most drafted tokens of a tree are rejected by " +
    "design, and all that follow a wrong guess are rejected with it. They cost little, because the pass is needed anyway. " +
    "What makes a reply faster is tokens per pass, divided by what such a pass costs, and not the share accepted.";

  class Figures {
    constructor(host) {
      this.host = host;
      this.cells = FIGURES.map(([name]) => {
        const value = element("strong", {}, "–");
        const note = element("span", { class: "note" });
        const told = element("span", { class: "told" }, element("span", { class: "name" }, name), note);
        return { value, note, told, cell: element("div", { class: "figure" }, value, told) };
      });
      const why = element("details", {}, element("summary", {}, "why so few?"), element("p", { class: "help-box" }, WHY_LOW));
      this.cells.at(-1).told.append(dismissable(why));
      const head = element("header", {}, element("h3", {}, "This reply"), element("span", { class: "note upto" }, "up to this step"));
      host.append(head, ...this.cells.map(({ cell }) => cell));
    }

    /** `measured`: where the record's times were taken. */
    show(record, measured) {
      this.cells.forEach(({ value, note }, i) => {
        const [, main, small] = FIGURES[i];
        value.textContent = record ? main(record.figures) : "–";
        if (small) note.textContent = record ? small(record.figures, measured) : "";
      });
    }
  }

  /** A menu button; `entries` are [words, action] pairs. */
  function menu(label, entries) {
    const list = element("div", { class: "menu-list" });
    const details = element(
      "details",
      { class: "menu" },
      element("summary", { "aria-label": label, title: label }, icon("menu")),
      list,
    );
    for (const [text, action] of entries) {
      const button = element("button", { type: "button" }, text);
      button.addEventListener("click", () => {
        details.open = false;
        details.querySelector("summary").focus();
        action();
      });
      list.append(button);
    }
    return dismissable(details);
  }

  specdec.controls = { iconButton, setIcon, Beats, legend, Figures, menu };
})();
