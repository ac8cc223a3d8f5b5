// History: one reply as the page knows it, in step order. Everything drawn is read from here.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const { words } = specdec;

  /** Distance of each node from the root. */
  function depthsOf(tree) {
    const depths = [0];
    for (let node = 1; node < tree.parents.length; node++) depths.push(depths[tree.parents[node]] + 1);
    return depths;
  }

  /** How far a step's tree reaches, the target's own token included. */
  const deepestOf = (record) => Math.max(record.verdict.path.length, ...depthsOf(record.tree));

  /** What a step took, but for the prefill. */
  const decodeSeconds = ({ timings: { draft, verify, accept, commit } }) => draft + verify + accept + commit;

  function tally(map, key, drafted, accepted) {
    const entry = map.get(key) ?? { drafted: 0, accepted: 0 };
    entry.drafted += drafted;
    entry.accepted += accepted;
    map.set(key, entry);
  }

  /**
   * A reply: `header` (model, settings, prompt), `records` (one per step) and, kept up to date with each record, what the
   * views need: `tokens` with the step that emitted them, `firstToken` per step, the deepest tree, and counts for the charts.
   */
  class History {
    constructor(header = {}) {
      this.header = header;
      this.records = [];
      this.tokens = [];
      this.firstToken = [];
      this.deepest = 1;
      this.mostTokens = 1;
      this.acceptedLengths = [];
      this.bySource = new Map();
      this.byDepth = new Map();
      this.missing = 0;
      this.finishReason = null;
      this.note = "";
      this.error = null;
    }

    static fromTrace(trace) {
      const history = new History({ model: trace.model, settings: trace.settings, prompt: trace.prompt });
      trace.steps.forEach((record) => history.add(record));
      history.finishReason = trace.steps.at(-1)?.finish_reason ?? null;
      return history;
    }

    get length() {
      return this.records.length;
    }

    get last() {
      return this.records.at(-1);
    }

    /** Where its times were taken. */
    get measured() {
      return this.label === "live" ? "measured here" : "as recorded";
    }

    /** What is not here, in a sentence. */
    get gap() {
      return this.missing ? `${words.counted(this.missing, "step")} did not reach this page.` : "";
    }

    /** The line above the tree. */
    get notice() {
      return this.error || this.note || this.gap;
    }

    /** Append a record; one that is already here is ignored, a gap before it is counted. Returns whether it was new. */
    add(record) {
      const expected = this.last ? this.last.index + 1 : 0;
      if (record.index < expected) return false;
      this.missing += record.index - expected;
      const step = this.records.length;
      this.records.push(record);
      this.firstToken.push(this.tokens.length);
      record.token_texts.forEach((text, i) => {
        const meaning = words.meaningOf(record, record.token_ids[i]);
        this.tokens.push({ text, meaning, kind: words.kindOf(record, i), step });
      });
      this.mostTokens = Math.max(this.mostTokens, record.token_ids.length);
      this.finishReason = record.finish_reason ?? this.finishReason;
      this.#count(record);
      return true;
    }

    #count(record) {
      const accepted = words.acceptedCount(record);
      this.acceptedLengths[accepted] = (this.acceptedLengths[accepted] ?? 0) + 1;
      const depths = depthsOf(record.tree);
      depths.forEach((depth, node) => {
        if (node === 0) return;
        const won = words.stateOf(record, node) === "accepted" ? 1 : 0;
        tally(this.byDepth, depth, 1, won);
        tally(this.bySource, record.tree.sources?.[node] ?? "unknown", 1, won);
      });
      this.deepest = Math.max(this.deepest, record.verdict.path.length, ...depths);
    }

    /** The reply as a trace file holds it, which is whole. */
    toTrace() {
      if (this.gap) throw new Error(this.gap);
      const { model = {}, settings = {}, prompt = [] } = this.header;
      const text = this.records.map((record) => record.text).join("");
      return { format: "specdec-trace", version: 1, model, settings, prompt, text, steps: this.records };
    }
  }

  specdec.depthsOf = depthsOf;
  specdec.deepestOf = deepestOf;
  specdec.decodeSeconds = decodeSeconds;
  specdec.History = History;
})();
