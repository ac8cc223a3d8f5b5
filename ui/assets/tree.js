// TreeView: draws the token tree of one step as SVG into a host element. Several can live side by side.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const { words, Zoom, layoutTree } = specdec;
  const SVG = "http://www.w3.org/2000/svg";
  const ROW = 33;
  const MARGIN = 14;
  const FIRST_ROW = 22;
  const GAP = 20;
  const TURN = 9; // the bend of an edge that goes on below
  const WIDEST = 132; // columns
  const NARROWEST = 96;
  const SMALLEST = 0.8; // the scale at which a reply's deepest tree goes on below
  const DEPTHS = 4; // by which the room for a reply's trees grows, so that its columns seldom move
  const LONGEST_LABEL = 110;
  const SMALLEST_ROWS = 0.85; // the scale down to which rows that do not fit the room are drawn smaller
  const LABEL_FONT = "12.5px ui-monospace, 'SF Mono', SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

  const heightOf = (rows) => FIRST_ROW + rows * ROW - 8;

  function svg(tag, attributes = {}, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  const pen = document.createElement("canvas").getContext("2d");
  pen.font = LABEL_FONT;

  const widths = new Map();

  function widthOf(shown) {
    if (widths.size > 5000) widths.clear();
    if (!widths.has(shown)) widths.set(shown, pen.measureText(shown).width);
    return widths.get(shown);
  }

  /** A token shown in at most `room` pixels, with an ellipsis where it was cut; a special one by its `meaning`, or the first word of that. */
  function label(text, meaning, room) {
    const show = (limit) => (meaning ? words.visible(words.sign(meaning), limit, " ") : words.visible(text, limit));
    let shown = show(24);
    if (meaning && widthOf(shown) > room) {
      meaning = meaning.split(" ", 1)[0];
      shown = show(24);
    }
    while (shown.length > 2 && widthOf(shown) > room) shown = show(Array.from(shown).length - 1);
    return { shown, special: meaning ? "special" : "", width: Math.max(16, widthOf(shown)) };
  }

  /** The marks of the target's own tokens, as paths: a star for a bonus, a turn for a recovered token, a dot without a draft. */
  const MARKS = {
    bonus: "M0-5.2 1.4-1.4 5.2 0 1.4 1.4 0 5.2-1.4 1.4-5.2 0-1.4-1.4Z",
    recovered: "M-4.6-3.6V-.4a2.6 2.6 0 0 0 2.6 2.6H1.2V4.8L5.2 1.2 1.2-2.4V.2H-1.6A.9.9 0 0 1-2.5-.7V-3.6Z",
    plain: "M-2.4 0a2.4 2.4 0 1 0 4.8 0a2.4 2.4 0 1 0-4.8 0Z",
  };

  class TreeView {
    #layout = null;
    #record = null;
    #expanded = false;
    #deepest = 1;
    #tall = 0; // pixels
    #room = 0;
    #most;

    /**
     * `rows`: how many rows are drawn before "+n more", unless the style gives the host a `min-height`: then as many as fit in
     * there. `describe`: whether nodes show details on hover and focus.
     */
    constructor(host, { rows = 9, describe = true } = {}) {
      this.#most = rows;
      this.host = host;
      host.classList.add("specdec-tree");
      this.branches = svg("g", { class: "branches" });
      this.path = svg("g", { class: "path" });
      this.group = svg("g", {}, this.branches, this.path);
      this.svg = svg("svg", { class: "tree", role: "group", "aria-label": "Token tree of this step" }, this.group);
      this.zoom = new Zoom(this.svg, this.group);
      host.append(this.svg);
      this.details = describe ? new specdec.NodeDetails(this) : null;
      this.svg.addEventListener("click", (event) => event.target.closest(".more") && this.toggleMore());
      this.#measure();
      this.#setHeight(this.#room);
      new ResizeObserver(() => this.#resized()).observe(host);
      window.addEventListener("resize", () => this.#resized()); // the room may depend on the window's height alone
    }

    /** How much room there is: `rows` rows in `#room` pixels. */
    #measure() {
      this.width = this.host.clientWidth;
      const room = parseFloat(getComputedStyle(this.host).minHeight);
      const fit = (scale) => Math.floor((room / scale - heightOf(0)) / ROW);
      this.rows = room ? Math.max(fit(1), Math.min(this.#most, fit(SMALLEST_ROWS))) : this.#most;
      this.#room = room || heightOf(this.rows);
    }

    #setHeight(pixels) {
      if (pixels === this.#tall) return;
      this.#tall = pixels;
      this.svg.setAttribute("height", pixels);
    }

    get record() {
      return this.#record;
    }

    /** A new reply: the view fits again. `deepest`: its deepest tree, as far as that is known. */
    startRun(deepest = 1) {
      this.#deepest = deepest;
      this.#expanded = false;
      this.zoom.reset();
    }

    /**
     * Draw a record in one of the beats: grow, verify, prune, commit, or settled (all of it at once, without motion).
     * A beat of the record that is already drawn only moves it on; nothing is rebuilt.
     */
    show(record, beat = "settled") {
      if (record !== this.#record) {
        this.#record = record;
        this.#draw();
      }
      this.svg.classList.toggle("still", beat === "settled");
      this.svg.dataset.beat = beat;
    }

    #resized() {
      const { width } = this;
      const room = this.#room;
      this.#measure();
      if (width === this.width && room === this.#room) return;
      if (this.#record) this.#draw();
      else this.#setHeight(this.#room);
    }

    clear() {
      this.#record = null;
      this.branches.replaceChildren();
      this.path.replaceChildren();
    }

    toggleMore() {
      this.#expanded = !this.#expanded;
      this.#draw();
      if (!this.#expanded) this.svg.querySelector(".more")?.scrollIntoView({ block: "nearest" });
    }

    #draw() {
      const record = this.#record;
      const focused = this.svg.contains(document.activeElement) ? document.activeElement : null;
      const detailed = this.details?.box.hidden === false;
      this.#deepest = Math.max(this.#deepest, specdec.deepestOf(record));
      const { columns, pitch } = this.#grid();
      const layout = (this.#layout = layoutTree(record, this.#expanded ? Infinity : this.rows, columns));
      const rows = layout.rowCount + (this.#expanded ? 1 : 0); // the last for "show fewer"
      // As high as the tallest tree since it was expanded: what stands below does not jump from step to step.
      this.#setHeight(this.#expanded ? Math.max(this.#tall, heightOf(rows)) : this.#leastHeight(columns));
      const end = MARGIN + columns * pitch;
      const roomAt = (column, endsRow) => (endsRow && column < columns - 1 ? LONGEST_LABEL : pitch - GAP - 14);
      const meaningOf = (id) => words.meaningOf(record, id);
      const labels = layout.nodes.map(({ node, column, endsRow }) =>
        label(record.texts[node], meaningOf(record.tree.token_ids[node]), roomAt(column, endsRow)),
      );
      const at = (spot) => ({ x: MARGIN + spot.column * pitch, y: FIRST_ROW + spot.row * ROW });
      const placed = new Map(layout.nodes.map((spot, i) => [spot.node, { ...spot, ...at(spot), ...labels[i] }]));
      const rejected = { nodes: [], edges: [] };
      const kept = { nodes: [], edges: [] };
      for (const spot of placed.values()) {
        const into = spot.onPath ? kept : rejected;
        if (spot.node > 0) into.edges.push(this.#edge(placed.get(spot.parent), spot, words.stateOf(record, spot.node), end));
        into.nodes.push(this.#node(spot));
      }
      const next = label(record.next_text, meaningOf(record.verdict.next_token), roomAt(layout.target.column, true));
      const target = { ...layout.target, ...at(layout.target), ...next };
      const own = words.stateOf(record, "target");
      kept.edges.push(this.#edge(placed.get(layout.target.parent), target, own, end));
      kept.nodes.push(this.#targetNode(target));
      if (layout.more > 0 || this.#expanded) rejected.nodes.push(this.#moreNode(at({ column: 1, row: rows - 1 })));

      this.branches.replaceChildren(...rejected.edges, ...rejected.nodes);
      this.path.replaceChildren(...kept.edges, ...kept.nodes);
      const height = heightOf(rows);
      const whole = Math.max(height, heightOf(this.rows)); // every step of a reply in one scale
      this.zoom.setContent({ room: this.width, width: end + MARGIN, height, whole, tall: this.#tall });
      const said = own === "target";
      this.svg.style.setProperty("--slide-x", `${said ? MARGIN - target.x : 0}px`);
      this.svg.style.setProperty("--slide-y", `${said ? FIRST_ROW - target.y : 0}px`);
      if (focused) this.focusNode(focused.dataset.node);
      this.details?.redrawn(detailed);
    }

    /** How many columns there are and how wide: as the reply's deepest tree wants it, the same in every step. */
    #grid() {
      const wanted = DEPTHS * Math.ceil((this.#deepest + 1) / DEPTHS);
      const most = Math.max(2, Math.floor((this.width / SMALLEST - 2 * MARGIN) / NARROWEST));
      const columns = Math.min(wanted, most);
      return { columns, pitch: Math.max(NARROWEST, Math.min(WIDEST, (this.width - 2 * MARGIN) / columns)) };
    }

    /** The height that is in sight: the room, or more where the reply's deepest tree, all accepted, would not fit in there. */
    #leastHeight(columns) {
      const deepest = Math.floor(this.#deepest / columns) + 2; // with "+n more"
      return Math.max(this.#room, heightOf(Math.ceil(Zoom.smallest * deepest)));
    }

    /** From node to node; where a line goes on below, on to the `end` of this row and from the start of that. */
    #edge(from, to, state, end) {
      const x = from.x + from.width + 14;
      const bend = Math.min(44, (to.x - x) * 0.6);
      const curve = () => `C${x + bend} ${from.y} ${to.x - bend} ${to.y} ${to.x} ${to.y}`;
      const turn = () => `H${end - TURN}q${TURN} 0 ${TURN} ${TURN}M2 ${to.y - TURN}q0 ${TURN} ${TURN} ${TURN}H${to.x}`;
      const way = to.column === 0 ? turn() : from.y === to.y ? `H${to.x}` : curve();
      return svg("path", { class: `edge ${state}`, d: `M${x} ${from.y}${way}` });
    }

    #node(spot) {
      const { node, x, y, shown, special, width } = spot;
      const state = words.stateOf(this.#record, node);
      const box = width + 14;
      const inner = svg("g", { class: "inner", style: `--order:${node}` });
      inner.append(svg("rect", { class: "box", x: 0, y: -11.5, width: box, height: 23, rx: 6 }));
      inner.append(this.#text(shown, 7));
      const prob = this.#record.target?.probs[node];
      if (node > 0 && prob !== undefined) {
        inner.append(svg("rect", { class: "track", x: 2, y: 13.5, width: box - 4, height: 3, rx: 1.5 }));
        inner.append(svg("rect", { class: "bar", x: 2, y: 13.5, width: Math.max(1, prob * (box - 4)), height: 3, rx: 1.5 }));
      }
      return svg(
        "g",
        {
          class: `node ${state} ${special}`,
          "data-node": node,
          transform: `translate(${x.toFixed(1)} ${y})`,
          role: "img",
          tabindex: node === 0 ? 0 : -1,
          "aria-label": `${shown}, ${state}`,
        },
        inner,
      );
    }

    #text(shown, x) {
      const text = svg("text", { x, y: 4.2 });
      text.textContent = shown;
      return text;
    }

    #targetNode({ x, y, shown, special, width }) {
      const kind = words.ownKind(this.#record);
      const said = words.stateOf(this.#record, "target") === "target"; // else it won nothing, and carries no sign
      const inner = svg("g", { class: "inner" });
      inner.append(svg("rect", { class: "box", x: 0, y: -11.5, width: width + (said ? 30 : 14), height: 23, rx: 6 }));
      if (said) inner.append(svg("path", { class: "mark", d: MARKS[kind], transform: "translate(12 0)" }));
      inner.append(this.#text(shown, said ? 22 : 7));
      return svg(
        "g",
        {
          class: `node ${words.stateOf(this.#record, "target")} ${kind} ${special}`,
          "data-node": "target",
          transform: `translate(${x.toFixed(1)} ${y})`,
          role: "img",
          tabindex: -1,
          "aria-label": `${shown}, ${kind}`,
        },
        inner,
      );
    }

    #moreNode({ x, y }) {
      const shown = this.#expanded ? "show fewer" : `+${this.#layout.more} more`;
      const inner = svg("g", { class: "inner" });
      inner.append(svg("rect", { class: "box", x: 0, y: -11.5, width: 6.4 * shown.length + 20, height: 23, rx: 11.5 }));
      inner.append(this.#text(shown, 9));
      const node = svg(
        "g",
        { class: "more", role: "button", tabindex: 0, "aria-label": shown, transform: `translate(${x} ${y})` },
        inner,
      );
      node.addEventListener(
        "keydown",
        (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), this.toggleMore()),
      );
      return node;
    }

    /** Focus a node, or without one the "+n more"; what is not there any more gives way to the root. */
    focusNode(node) {
      const wanted = this.svg.querySelector(node === undefined ? ".more" : `[data-node="${node}"]`);
      (wanted ?? this.svg.querySelector('[data-node="0"]'))?.focus({ preventScroll: true });
    }

    /** The node that an arrow key leads to from `node`: along the path and branches, or up and down in drawing order. */
    neighbour(node, key) {
      const { nodes, target } = this.#layout;
      if (node === "target") return key === "ArrowLeft" ? target.parent : null;
      const spot = nodes.find((other) => other.node === Number(node));
      if (!spot) return null;
      if (key === "ArrowLeft") return spot.node === 0 ? null : spot.parent;
      if (key === "ArrowRight")
        return spot.node === target.parent ? "target" : (nodes.find((other) => other.parent === spot.node)?.node ?? null);
      const rows = nodes.filter((other) => (key === "ArrowDown" ? other.row > spot.row : other.row < spot.row));
      rows.sort(
        (a, b) =>
          Math.abs(a.row - spot.row) - Math.abs(b.row - spot.row) ||
          Math.abs(a.column - spot.column) - Math.abs(b.column - spot.column),
      );
      return rows[0]?.node ?? null;
    }
  }

  specdec.svg = svg;
  specdec.MARKS = MARKS;
  specdec.TreeView = TreeView;
})();
