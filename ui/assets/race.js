// Race: recorded lanes of a comparison, replayed side by side on one clock.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const SPEEDS = [
    ["true speed", 1],
    ["half speed", 0.5],
    ["a quarter", 0.25],
    ["a tenth", 0.1],
  ];

  function make(tag, properties = {}, ...children) {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  }

  const seconds = (s) => `${s.toFixed(2)} s`;
  const rate = (lane) => lane.figures.tokens_per_second;

  /** One lane: its steps with the moment each was done, and what is drawn of it. */
  class Lane {
    constructor({ decoding, steps, figures }) {
      this.decoding = decoding;
      this.steps = steps;
      this.figures = figures;
      let clock = 0;
      this.ends = steps.map(({ timings }) => (clock += timings.draft + timings.verify + timings.accept + timings.commit));
      this.shown = -1;
      this.medal = make("span", { className: "medal" });
      this.bar = make("div", { className: "done" });
      this.line = make("p", { className: "note counts" });
      this.text = make("p", { className: "said", dir: "auto" });
      const tree = make("div", { className: "lane-tree" });
      this.host = make(
        "section",
        { className: "card lane" },
        make("header", {}, make("h3", { textContent: decoding }), this.medal),
        make("div", { className: "way" }, this.bar),
        this.line,
        this.text,
        tree,
      );
      this.host.setAttribute("aria-label", `${decoding} lane`);
      this.tree = new specdec.TreeView(tree, { rows: 4 });
    }

    get total() {
      return this.ends.at(-1) ?? 0;
    }

    reset() {
      this.shown = -1;
      this.said = [];
      this.text.textContent = "";
      this.tree.startRun();
      this.tree.clear();
    }

    /** Draw the lane as it was `clock` seconds after its start; its bar is full when `length` seconds have passed. */
    draw(clock, length) {
      if (this.shown >= 0 && this.ends[this.shown] > clock) this.reset();
      const before = this.shown;
      while (this.shown + 1 < this.steps.length && this.ends[this.shown + 1] <= clock)
        this.said.push(this.steps[++this.shown].text);
      this.bar.style.width = `${((100 * Math.min(clock, this.total)) / length).toFixed(1)}%`;
      this.host.classList.toggle("home", clock >= this.total);
      if (this.shown !== before || clock === 0) {
        const tokens = this.steps.slice(0, this.shown + 1).reduce((sum, step) => sum + step.token_ids.length, 0);
        this.text.textContent = this.said.join("");
        this.text.scrollTop = this.text.scrollHeight;
        this.tokens = tokens;
        if (this.shown >= 0) this.tree.show(this.steps[this.shown]);
      }
      const passes = this.shown + 1;
      this.line.textContent = `${seconds(Math.min(clock, this.total))} · ${this.tokens} tokens · ${passes} passes`;
    }
  }

  class Race {
    constructor(host) {
      this.host = host;
      this.status = make("p", {
        className: "race-status note",
        textContent: "Nothing compared yet. Pick a prompt and run it.",
      });
      this.status.setAttribute("role", "status");
      this.result = make("div", { className: "race-result" });
      this.track = make("div", { className: "lanes" });
      host.append(this.status, this.result, this.track);
    }

    receive(value) {
      if (!value) return;
      const { status, error, lanes, agreement } = JSON.parse(value);
      this.status.hidden = Boolean(lanes);
      this.status.classList.toggle("error", Boolean(error));
      this.status.textContent = error ?? status ?? "";
      if (status || error) {
        cancelAnimationFrame(this.frame);
        this.result.replaceChildren();
        this.track.replaceChildren();
      }
      if (lanes)
        this.start(
          lanes.map((lane) => new Lane(lane)),
          agreement,
        );
    }

    start(lanes, agreement) {
      this.lanes = lanes;
      this.length = Math.max(...lanes.map((lane) => lane.total));
      this.speed = 1;
      this.track.replaceChildren(...lanes.map((lane) => lane.host));
      this.award(lanes);
      const play = make("button", { type: "button", className: "race-play", textContent: "Replay" });
      play.onclick = () => this.play();
      const speed = make("select", {}, ...SPEEDS.map(([name, value]) => new Option(name, value)));
      speed.setAttribute("aria-label", "replay speed");
      speed.onchange = () => (this.speed = Number(speed.value));
      this.clock = make("output", { className: "race-clock" });
      const why = make("span", { className: "note", textContent: "a replay of runs made one after the other" });
      this.result.replaceChildren(
        this.headline(),
        this.badge(agreement),
        make("div", { className: "race-controls" }, play, speed, this.clock, why),
      );
      for (const lane of lanes) lane.reset();
      this.play();
    }

    /** The finish: tokens per second of each lane against the plain one (else against the slowest). */
    award(lanes) {
      this.best = lanes.reduce((a, b) => (rate(a) > rate(b) ? a : b));
      this.base = lanes.find((lane) => lane.decoding === "plain") ?? lanes.reduce((a, b) => (rate(a) < rate(b) ? a : b));
      for (const lane of lanes) {
        const { tokens_per_pass, passes_saved } = lane.figures;
        const times = lane === this.base ? "1.00× · the reference" : `${(rate(lane) / rate(this.base)).toFixed(2)}×`;
        lane.host.classList.toggle("best", lane === this.best);
        lane.medal.textContent = `${times} · ${tokens_per_pass.toFixed(2)} tokens/pass · ${passes_saved} passes saved`;
      }
    }

    headline() {
      const { best, base } = this;
      const name = best.decoding[0].toUpperCase() + best.decoding.slice(1);
      const text =
        best === base
          ? `On this prompt, ${base.decoding} was the fastest: drafting did not pay here.`
          : `${name} was ${(rate(best) / rate(base)).toFixed(2)} times as fast as ${base.decoding}, measured here.`;
      return make("h3", { className: "race-headline", textContent: text });
    }

    badge(agreement) {
      const { same, tokens, lanes, position, margin, dtype } = agreement;
      const apart = `there the target's first two choices were ${margin?.toFixed(4)} logits apart`;
      const text = same
        ? `✓ identical: all ${tokens} tokens`
        : `≠ ${lanes?.join(" and ")} part at token ${position + 1}: ${apart}. In ${dtype}, rounding decides such near ties; float32 has none.`;
      return make("p", { className: `race-badge ${same ? "same" : "differs"}`, textContent: text });
    }

    play() {
      cancelAnimationFrame(this.frame);
      let clock = 0;
      let last = performance.now();
      const tick = (now) => {
        clock = Math.min(clock + ((now - last) / 1000) * this.speed, this.length);
        last = now;
        if (this.host.offsetParent !== null) {
          this.clock.textContent = seconds(clock);
          for (const lane of this.lanes) lane.draw(clock, this.length);
        }
        if (clock < this.length) this.frame = requestAnimationFrame(tick);
      };
      for (const lane of this.lanes) lane.reset();
      tick(last);
    }
  }

  specdec.Race = Race;
})();
