// Layout of a token tree on a grid: column = depth, row 0 = the accepted path, straight along the top.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});

  /**
   * Walk the nodes best first and keep what fits into `rows` rows: always the accepted path, then every node whose parent is
   * kept. The row of the last accepted node goes on with the target's own token, so its children start rows of their own.
   */
  function keepNodes(parents, path, rows) {
    const kept = new Set(path);
    const continued = new Set(path);
    let used = 1;
    for (let node = 1; node < parents.length; node++) {
      if (kept.has(node) || !kept.has(parents[node])) continue;
      const opensRow = continued.has(parents[node]);
      if (opensRow && used >= rows) continue;
      used += opensRow ? 1 : 0;
      continued.add(parents[node]);
      kept.add(node);
    }
    return { kept, used };
  }

  /** The tree of a record on the grid; more than `rows` rows are cut and counted in `more`. */
  function layoutTree(record, rows) {
    const { parents } = record.tree;
    const { path } = record.verdict;
    const depths = specdec.depthsOf(record.tree);
    let { kept, used } = keepNodes(parents, path, rows);
    if (kept.size < parents.length) ({ kept, used } = keepNodes(parents, path, rows - 1));

    const children = new Map([...kept].map((node) => [node, []]));
    const onPath = new Set(path);
    const likelyFirst = [...kept].sort((a, b) => onPath.has(b) - onPath.has(a) || a - b);
    for (const node of likelyFirst) if (node > 0) children.get(parents[node]).push(node);

    const lastAccepted = path.at(-1);
    const row = new Map([[0, 0]]);
    let nextRow = 1;
    const place = (node) => {
      children.get(node).forEach((child, i) => {
        row.set(child, i === 0 && node !== lastAccepted ? row.get(node) : nextRow++);
        place(child);
      });
    };
    place(0);

    const endsRow = (node) => node !== lastAccepted && children.get(node).length === 0;
    const nodes = [...kept]
      .sort((a, b) => a - b)
      .map((node) => ({
        node,
        parent: parents[node],
        depth: depths[node],
        row: row.get(node),
        onPath: onPath.has(node),
        endsRow: endsRow(node),
      }));
    const target = { parent: lastAccepted, depth: depths[lastAccepted] + 1, row: 0 };
    return { nodes, target, more: parents.length - kept.size, rowCount: used + (kept.size < parents.length ? 1 : 0) };
  }

  specdec.layoutTree = layoutTree;
})();
