// Exports: the drawn tree as SVG and PNG, a step as GraphML, the reply as a trace file or as a page that needs no network.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const { words } = specdec;
  const PRESENTATION = [
    "fill",
    "stroke",
    "stroke-width",
    "stroke-dasharray",
    "stroke-linecap",
    "opacity",
    "font-family",
    "font-size",
    "font-weight",
    "direction",
    "unicode-bidi",
  ];

  /** A copy of an SVG element that looks the same without the page's stylesheet, on the card's own ground. */
  function standalone(source) {
    const copy = source.cloneNode(true);
    const from = [source, ...source.querySelectorAll("*")];
    const to = [copy, ...copy.querySelectorAll("*")];
    from.forEach((node, i) => {
      const style = getComputedStyle(node);
      to[i].setAttribute("style", PRESENTATION.map((name) => `${name}:${style.getPropertyValue(name)}`).join(";"));
    });
    const { x, y, width, height } = source.querySelector("g").getBBox();
    const group = copy.querySelector("g");
    group.removeAttribute("transform");
    const pad = 16;
    copy.setAttribute("viewBox", [x - pad, y - pad, width + 2 * pad, height + 2 * pad].map(Math.round).join(" "));
    copy.setAttribute("width", Math.round(width + 2 * pad));
    copy.setAttribute("height", Math.round(height + 2 * pad));
    copy.prepend(
      specdec.svg("rect", {
        x: x - pad,
        y: y - pad,
        width: width + 2 * pad,
        height: height + 2 * pad,
        fill: specdec.palette(source).card,
      }),
    );
    return copy;
  }

  const svgText = (source) => new XMLSerializer().serializeToString(standalone(source));

  async function pngBlob(source, scale = 2) {
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(source))}`;
    await image.decode();
    const canvas = words.element("canvas", { width: image.width * scale, height: image.height * scale });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
    if (!blob) throw new Error("the tree is too large for a picture.");
    return blob;
  }

  /** What is known of each node, by the names that `specdec.draw.to_networkx` gives. */
  function nodesOf(record) {
    const { tree, target } = record;
    const depths = specdec.depthsOf(tree);
    return tree.token_ids.map((token_id, node) => ({
      token: record.texts[node],
      token_id,
      depth: depths[node],
      score: tree.scores?.[node],
      prob: target?.probs[node],
      rank: target?.ranks[node],
      source: tree.sources?.[node],
      verdict: words.stateOf(record, node),
    }));
  }

  /** [parent, child] of each edge of a tree. */
  const edgesOf = ({ tree }) => tree.parents.map((parent, node) => [parent, node]).slice(1);

  /** The step's token tree as node-link JSON, as networkx and d3 read it. */
  function nodeLink(record) {
    const { index, verdict } = record;
    return JSON.stringify({
      directed: true,
      multigraph: false,
      graph: { index, next_token: verdict.next_token, kind: verdict.kind },
      nodes: nodesOf(record).map((facts, id) => ({ ...facts, id })),
      edges: edgesOf(record).map(([source, target]) => ({ source, target })),
    });
  }

  /** The step's token tree as GraphML. */
  function graphml(record) {
    const space = "http://graphml.graphdrawing.org/xmlns";
    const doc = document.implementation.createDocument(space, "graphml");
    const add = (parent, tag, attributes, text = null) => {
      const node = doc.createElementNS(space, tag);
      for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
      if (text !== null) node.textContent = text;
      return parent.appendChild(node);
    };
    const root = doc.documentElement;
    const types = {
      token: "string",
      token_id: "long",
      depth: "long",
      score: "double",
      prob: "double",
      rank: "long",
      source: "string",
      verdict: "string",
    };
    for (const [name, type] of Object.entries(types))
      add(root, "key", { id: name, for: "node", "attr.name": name, "attr.type": type });
    const graph = add(root, "graph", { edgedefault: "directed" });
    nodesOf(record).forEach((facts, node) => {
      const holder = add(graph, "node", { id: node });
      const data = { ...facts, token: words.visible(facts.token, 10000) };
      for (const [key, value] of Object.entries(data)) if (value != null) add(holder, "data", { key }, String(value));
    });
    for (const [source, target] of edgesOf(record)) add(graph, "edge", { source, target });
    return '<?xml version="1.0" encoding="utf-8"?>\n' + new XMLSerializer().serializeToString(doc);
  }

  /** What the server has at `url`; it may refuse. */
  async function fetched(url) {
    const reply = await fetch(url);
    if (!reply.ok) throw new Error(`the server answered ${reply.status}.`);
    return reply;
  }

  /** A page of the trace that opens from disk: the page template with style, scripts and trace filled in. */
  async function pageText(trace, assets) {
    const texts = await Promise.all(
      [assets.page, assets.style, ...assets.scripts].map((url) => fetched(url).then((reply) => reply.text())),
    );
    const [page, style, ...scripts] = texts;
    const data = JSON.stringify(trace).replaceAll("<", "\\u003c");
    const parts = { style, scripts: scripts.map((text) => text.replaceAll("</script", "<\\/script")).join("\n"), trace: data };
    return page.replace(/<\!--(style|scripts|trace)-->/g, (_, name) => parts[name]);
  }

  function download(content, type, name) {
    const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
    const link = words.element("a", { href: url, download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  specdec.exports = { svgText, pngBlob, graphml, nodeLink, pageText, fetched, download };
})();
