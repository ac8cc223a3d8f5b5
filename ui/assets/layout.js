// Layout of a token tree on a grid: column = depth, row 0 = the accepted path, straight along the top. A line with more depths
// than there are columns goes on in the row below, as a long line of text does.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});

  /**
   * Walk the nodes best first and keep what fits into `rows` rows: always the accepted path, then every node whose parent is
   * kept. The row of the last accepted node goes on with the target's own token, so its children start rows of their own.
   */
  function keepNodes({ parents, path, depths }, rows, columns) {
    const kept = new Set(path);
    const continued = new Set(path);
    let used = 1 + Math.floor(path.length / columns);
    for (let node = 1; node < parents.length; node++) {
      if (kept.has(node) || !kept.has(parents[node])) continue;
      const opensRow = continued.has(parents[node]) || depths[node] % columns === 0;
      if (opensRow && used >= rows) continue;
      used += opensRow ? 1 : 0;
      continued.add(parents[node]);
      kept.add(node);
    }
    return { kept, used };
  }

  /** The way from a line and a depth on it to the cell: a line takes as many rows as it needs, one below the other. */
  function cellsOf(spots, columns) {
    const bandOf = (depth) => Math.floor(depth / columns);
    const sorted = spots.map(([line, depth]) => [line, bandOf(depth)]).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const rows = new Map();
    for (const key of sorted.map(String)) if (!rows.has(key)) rows.set(key, rows.size);
    return (line, depth) => ({ column: depth % columns, row: rows.get(String([line, bandOf(depth)])) });
  }

  /** The tree of a record on a grid of so many columns; more than `rows` rows are cut and counted in `more`. */
  function layoutTree(record, rows, columns) {
    const { parents } = record.tree;
    const { path } = record.verdict;
    const depths = specdec.depthsOf(record.tree);
    const tree = { parents, path, depths };
    let { kept, used } = keepNodes(tree, rows, columns);
    if (kept.size < parents.length) ({ kept, used } = keepNodes(tree, rows - 1, columns));

    const children = new Map([...kept].map((node) => [node, []]));
    const onPath = new Set(path);
    const likelyFirst = [...kept].sort((a, b) => onPath.has(b) - onPath.has(a) || a - b);
    for (const node of likelyFirst) if (node > 0) children.get(parents[node]).push(node);

    const lastAccepted = path.at(-1);
    const line = new Map([[0, 0]]); // which row a node would have if there were columns enough
    let nextLine = 1;
    const place = (node) => {
      children.get(node).forEach((child, i) => {
        line.set(child, i === 0 && node !== lastAccepted ? line.get(node) : nextLine++);
        place(child);
      });
    };
    place(0);
    const cell = cellsOf([[0, path.length], ...[...kept].map((node) => [line.get(node), depths[node]])], columns);

    const endsRow = (node) => node !== lastAccepted && children.get(node).length === 0;
    const nodes = [...kept]
      .sort((a, b) => a - b)
      .map((node) => ({
        node,
        parent: parents[node],
        ...cell(line.get(node), depths[node]),
        onPath: onPath.has(node),
        endsRow: endsRow(node),
      }));
    const target = { parent: lastAccepted, ...cell(0, path.length) };
    return { nodes, target, more: parents.length - kept.size, rowCount: used + (kept.size < parents.length ? 1 : 0) };
  }

  specdec.layoutTree = layoutTree;
})();
