// NodeDetails: what is known about one node, shown on hover and on keyboard focus.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const { words } = specdec;
  const VERDICTS = { root: "root: the last committed token", unsaid: "not said: the reply ends before it" };

  function named(record, text, id) {
    const meaning = words.meaningOf(record, id);
    const pairs = [
      ["token", words.visible(text, 120)],
      ["token id", String(id)],
    ];
    return meaning ? [...pairs, ["special token", words.prose(meaning, 120)]] : pairs;
  }

  /** What the target thought of a token; nothing where that was not recorded. */
  const thought = (prob, rank) =>
    prob == null
      ? []
      : [
          ["target probability", words.percent(prob)],
          ["target rank", rank === 0 ? "1 (its first choice)" : String(rank + 1)],
        ];

  /** [name, value] pairs about a node, or about the target's own token (node "target"). */
  function describeNode(record, node) {
    const { tree, verdict, target } = record;
    const state = words.stateOf(record, node);
    if (node === "target") {
      const kind = VERDICTS[state] ?? words.KIND_WORDS[words.ownKind(record)];
      const own = thought(target?.next_prob, target?.next_rank);
      return [...named(record, record.next_text, verdict.next_token), ...own, ["verdict", kind]];
    }
    const pairs = named(record, record.texts[node], tree.token_ids[node]);
    if (node > 0 && tree.scores) pairs.push(["estimated to be accepted", words.percent(tree.scores[node])]);
    if (node > 0) pairs.push(...thought(target?.probs[node], target?.ranks[node]));
    if (node > 0 && tree.sources) pairs.push(["drafted from", words.sourceWords(tree.sources[node])]);
    return [...pairs, ["verdict", VERDICTS[state] ?? state]];
  }

  const nodeSummary = (record, node) =>
    describeNode(record, node)
      .map((pair) => pair.join(" "))
      .join(", ");

  class NodeDetails {
    #pointer = null;

    constructor(view) {
      this.view = view;
      this.box = words.element("div", { class: "node-details", role: "tooltip", hidden: "" });
      view.host.append(this.box);
      const { svg } = view;
      svg.addEventListener("pointermove", (event) => this.#hover(event));
      svg.addEventListener("pointerleave", () => this.#leave());
      svg.addEventListener("focusin", (event) => this.#showFor(event.target.closest("[data-node]")));
      svg.addEventListener("focusout", () => this.hide());
      svg.addEventListener("keydown", (event) => this.#key(event));
    }

    /** The tree was drawn anew: other nodes lie under a resting pointer; those of the focus come back if they were `open`. */
    redrawn(open) {
      if (!this.#pointer) return open || this.hide();
      const under = document.elementFromPoint(this.#pointer.x, this.#pointer.y);
      this.#showFor(under?.closest?.("[data-node]"));
    }

    hide() {
      this.box.hidden = true;
    }

    #hover(event) {
      this.#pointer = { x: event.clientX, y: event.clientY };
      this.#showFor(event.target.closest("[data-node]"));
    }

    #leave() {
      this.#pointer = null;
      this.hide();
    }

    #showFor(group) {
      if (!group) return this.hide();
      const node = group.dataset.node === "target" ? "target" : Number(group.dataset.node);
      group.setAttribute("aria-label", nodeSummary(this.view.record, node));
      const list = words.element("dl");
      for (const [name, value] of describeNode(this.view.record, node)) {
        list.append(
          words.element("dt", {}, name),
          words.element("dd", { class: name === "token" ? "token" : null }, words.element("bdi", {}, value)),
        );
      }
      this.box.replaceChildren(list);
      this.box.hidden = false;
      this.#place(group);
    }

    #place(group) {
      const host = this.view.host.getBoundingClientRect();
      const box = group.getBoundingClientRect();
      const left = Math.max(0, Math.min(box.left - host.left, host.width - this.box.offsetWidth));
      const below = box.bottom - host.top + 8;
      const fits = below + this.box.offsetHeight <= host.height + 60;
      const top = fits ? below : Math.max(0, box.top - host.top - this.box.offsetHeight - 8);
      this.box.style.transform = `translate(${left}px, ${top}px)`;
    }

    #key(event) {
      const group = event.target.closest("[data-node]");
      if (event.key === "Escape" && !this.box.hidden) {
        event.preventDefault();
        this.#leave();
      }
      if (!group || event.defaultPrevented || !event.key.startsWith("Arrow")) return;
      const next = this.view.neighbour(group.dataset.node, event.key);
      if (next === null) return; // at an end of the tree: to the step before or after
      event.preventDefault();
      this.#pointer = null;
      this.view.focusNode(next);
    }
  }

  specdec.describeNode = describeNode;
  specdec.NodeDetails = NodeDetails;
})();
