// Slim: the newest step in one line, for a page too narrow to show the panel beside the chat: a small tree, and the speedup.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const { words } = specdec;
  const [ROWS, COLUMNS, PITCH, ROW, DOT] = [3, 9, 13, 11, 3];

  /** A step's tree in dots: the accepted path along the top, rejected branches below. */
  function smallTree(record) {
    const { nodes, target } = specdec.layoutTree(record, ROWS, COLUMNS);
    const at = ({ column, row }) => ({ x: DOT + 1 + column * PITCH, y: DOT + 1 + row * ROW });
    const places = new Map(nodes.map((spot) => [spot.node, at(spot)]));
    const shown = ({ row }) => row < ROWS;
    const spots = [
      ...nodes.filter(shown).map((spot) => ({ ...spot, state: words.stateOf(record, spot.node) })),
      ...[target].filter(shown).map((spot) => ({ ...spot, node: "target", state: words.stateOf(record, "target") })),
    ];
    const edges = spots.flatMap((spot) => {
      const [from, to] = [places.get(spot.parent), at(spot)];
      return from ? [specdec.svg("line", { class: spot.state, x1: from.x, y1: from.y, x2: to.x, y2: to.y })] : [];
    });
    const dots = spots.map((spot) => specdec.svg("circle", { class: spot.state, cx: at(spot).x, cy: at(spot).y, r: DOT }));
    const likeliestLast = (a, b) => b.classList.contains("rejected") - a.classList.contains("rejected");
    return [...edges.sort(likeliestLast), ...dots];
  }

  class Slim {
    #record = null;

    constructor(host) {
      this.host = host;
      const size = { width: COLUMNS * PITCH, height: (ROWS - 1) * ROW + 2 * DOT + 2 };
      this.tree = specdec.svg("svg", { ...size, "aria-hidden": "true" });
      this.gave = words.element("span");
      this.speedup = words.element("strong");
      const plain = words.element("span", { class: "note" }, "plain speed");
      this.link = words.element("button", { type: "button", title: "Show the tree" }, this.tree, this.gave, this.speedup, plain);
      host.translate = false;
      host.replaceChildren(this.link);
    }

    /** Show the newest step while a reply `streams`; nothing else. */
    show(record, streams) {
      this.host.hidden = !streams || !record;
      if (this.host.hidden || record === this.#record || this.host.offsetParent === null) return;
      this.#record = record;
      this.tree.replaceChildren(...smallTree(record));
      this.gave.textContent = words.counted(record.token_ids.length, "token");
      this.speedup.textContent = `${words.number(record.figures.speedup)}×`;
    }
  }

  specdec.Slim = Slim;
})();
