// Race: recorded lanes of a comparison, replayed side by side on one clock.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const { element } = specdec.words;
  const SPEEDS = [
    ["true speed", 1],
    ["1/2 of true speed", 1 / 2],
    ["1/4 of true speed", 1 / 4],
    ["1/8 of true speed", 1 / 8],
  ];
  /** Seconds that a replay should last for the eye to follow it: what is faster is slowed down at first. */
  const FOLLOWED = 6;
  /** Milliseconds between two looks whether the race is in sight again; a frame that lasts longer stands for one as long. */
  const GLANCE = 250;

  const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
  const seconds = (s) => `${s.toFixed(2)} s`;
  /** Plain text whose fenced code stands in a font of its own. */
  const withCode = (text) =>
    text.split(/^( *```[^`\n]*(?:\n[^]*?)?(?:^ *```|(?![^])))/m).map((part, i) => (i % 2 ? element("code", {}, part) : part));
  const rate = (lane) => lane.figures.tokens_per_second;

  /** One lane: its steps with the moment each was done, and what is drawn of it. */
  class Lane {
    constructor({ decoding, steps, figures }) {
      this.decoding = decoding;
      this.steps = steps;
      this.figures = figures;
      let clock = 0;
      this.ends = steps.map((step) => (clock += specdec.decodeSeconds(step)));
      this.deepest = Math.max(1, ...steps.map(specdec.deepestOf));
      this.shown = -1;
      this.medal = element("span", { class: "medal" });
      this.bar = element("div", { class: "done" });
      this.line = element("p", { class: "note counts" });
      const reachable = { tabindex: "0", role: "region", "aria-label": `what ${decoding} said` };
      this.text = element("p", { class: "said", dir: "auto", ...reachable });
      const tree = element("div", { class: "lane-tree" });
      this.host = element(
        "section",
        { class: "card lane", "aria-label": `${decoding} lane` },
        element("header", {}, element("h3", {}, decoding), this.medal),
        element("div", { class: "way" }, this.bar),
        this.line,
        this.text,
        tree,
      );
      this.tree = new specdec.TreeView(tree, { rows: 4 });
    }

    get total() {
      return this.ends.at(-1) ?? 0;
    }

    reset() {
      this.shown = -1;
      this.said = [];
      this.text.textContent = "";
      this.tree.startRun(this.deepest);
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
        this.text.replaceChildren(...withCode(this.said.join("")));
        this.text.scrollTop = this.text.scrollHeight;
        this.tokens = tokens;
        if (this.shown >= 0) this.tree.show(this.steps[this.shown]);
      }
      const passes = this.shown + 1;
      this.line.textContent = `${seconds(Math.min(clock, this.total))} · ${this.tokens} tokens · ${passes} passes`;
    }
  }

  class Race {
    #run = null;

    constructor(host) {
      this.host = host;
      host.translate = false;
      this.result = element("div", { class: "race-result", role: "status" });
      this.count = element("p", { class: "note", "aria-hidden": "true" });
      this.done = element("progress", { "aria-label": "comparison" });
      this.playButton = element("button", { type: "button", class: "race-play" });
      this.playButton.onclick = () => this.play(this.#run ? this.length : 0);
      this.speed = element("select", { "aria-label": "replay speed" }, ...SPEEDS.map((speed) => new Option(...speed)));
      this.speed.onchange = () => {
        if (!this.#run) this.play(0);
      };
      this.clock = element("span", { class: "race-clock" });
      const why = element("span", { class: "note" }, "This is a replay. The runs were made one after the other.");
      this.controls = element("div", { class: "race-controls" }, this.playButton, this.speed, this.clock, why);
      this.track = element("div", { class: "lanes" });
      const head = element("div", { class: "race-head" }, this.result, this.count, this.done);
      host.append(head, this.controls, this.track);
      this.say("Choose a prompt and press Run the comparison.");
    }

    receive(value) {
      if (!value) return;
      const { status, tokens, done, error, lanes, agreement } = JSON.parse(value);
      if (lanes)
        this.start(
          lanes.map((lane) => new Lane(lane)),
          agreement,
        );
      else this.say(error ?? status, error, tokens, done);
    }

    /** One line instead of a race, spoken when it changes; how far a lane has come is for the eye only. */
    say(text, error, tokens, done) {
      this.#run = null;
      this.controls.hidden = true;
      this.track.replaceChildren();
      this.count.textContent = tokens === undefined ? "" : `${tokens} tokens`;
      this.done.hidden = done === undefined;
      this.done.value = done ?? 0;
      if (this.result.textContent === text) return;
      this.result.replaceChildren(element("p", { class: `race-status note ${error ? "error" : ""}` }, text));
    }

    start(lanes, agreement) {
      this.lanes = lanes;
      this.length = Math.max(...lanes.map((lane) => lane.total));
      this.speed.value = SPEEDS.find(([, speed]) => this.length / speed >= FOLLOWED)?.[1] ?? SPEEDS.at(-1)[1];
      this.award(lanes);
      this.verdict = [this.headline(), this.badge(agreement)];
      this.controls.hidden = false;
      this.track.replaceChildren(...lanes.map((lane) => lane.host));
      this.host.scrollIntoView({ behavior: calm.matches ? "auto" : "smooth" }); // the form above fills a window
      this.play(calm.matches ? this.length : 0);
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
          ? `${base.decoding === "plain" ? "Plain decoding" : name} was the fastest: drafting saved no time on this prompt.`
          : `${name} was ${(rate(best) / rate(base)).toFixed(2)} times as fast as ${base.decoding}, measured here.`;
      return element("h3", { class: "race-headline" }, text);
    }

    badge({ same, tokens, lanes, apart }) {
      const named = (names) => names.join(" and ").replace(/^./, (first) => first.toUpperCase());
      const agreeing = (names) => (names.length > 1 ? `${named(names)} give the same text. ` : "");
      const differing = (group) =>
        `${agreeing(group.lanes)}${group.lanes.length > 1 ? "They differ" : `${named(group.lanes)} differs`} from ` +
        `${lanes.join(" and ")} from token ${group.position + 1} on. There the target's first two choices were ` +
        `${group.margin.toFixed(4)} logits apart (${group.why}).`;
      const text = same
        ? `✓ All lanes give the same text: ${tokens} tokens.`
        : `≠ ${agreeing(lanes)}${apart.map(differing).join(" ")}`;
      return element("p", { class: `race-badge ${same ? "same" : "differs"}` }, text);
    }

    /** Replay from `clock` on; the clock stands still while the race is out of sight. */
    play(clock) {
      const run = (this.#run = {});
      let last = performance.now();
      const tick = (now) => {
        if (run !== this.#run) return;
        const inSight = this.host.offsetParent !== null;
        if (inSight) {
          clock = Math.min(clock + (Math.min(now - last, GLANCE) / 1000) * Number(this.speed.value), this.length);
          this.clock.textContent = seconds(clock);
          for (const lane of this.lanes) lane.draw(clock, this.length);
        }
        last = now;
        if (!inSight) setTimeout(() => tick(performance.now()), GLANCE);
        else if (clock < this.length) requestAnimationFrame(tick);
        else this.finish();
      };
      this.result.replaceChildren();
      this.count.textContent = "";
      this.done.hidden = true;
      this.playButton.textContent = "Skip to the finish";
      for (const lane of this.lanes) lane.reset();
      tick(last);
    }

    finish() {
      this.#run = null;
      this.result.replaceChildren(...this.verdict);
      this.playButton.textContent = "Replay";
    }
  }

  specdec.Race = Race;
})();
