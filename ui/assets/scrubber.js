// Scrubber: a slider that is a chart. One bar a step, its height the tokens that the pass gave: accepted drafts below, the
// target's own token on top. Drawn on a canvas, so that 2,000 steps cost no more than 20.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const { words } = specdec;
  const HEIGHT = 52;
  const WIDEST = 20;

  class Scrubber {
    #drawn = "";

    /** `onSeek(position)` is called when the user picks a step. */
    constructor(host, onSeek) {
      this.canvas = words.element("canvas", {
        class: "scrubber",
        role: "slider",
        tabindex: 0,
        "aria-label": "Step of the reply",
        "aria-valuemin": 1,
        "aria-valuemax": 1,
        "aria-valuenow": 1,
        height: HEIGHT,
      });
      host.append(this.canvas);
      this.onSeek = onSeek;
      this.history = null;
      this.position = -1;
      this.canvas.addEventListener("pointerdown", (event) => this.#seek(event));
      this.canvas.addEventListener("pointermove", (event) => this.canvas.hasPointerCapture(event.pointerId) && this.#seek(event));
      new ResizeObserver(() => this.#draw()).observe(this.canvas);
      specdec.onTheme(() => this.#draw());
    }

    show(history, position) {
      const state = `${history.length} ${position} ${history.mostTokens}`;
      if (history === this.history && state === this.#drawn) return;
      this.history = history;
      this.position = position;
      this.#drawn = state;
      this.#draw();
      const record = history.records[position];
      const gave = record && words.counted(record.token_ids.length, "token");
      this.canvas.setAttribute("aria-valuemax", Math.max(1, history.length));
      this.canvas.setAttribute("aria-valuenow", Math.max(1, position + 1));
      this.canvas.setAttribute("aria-valuetext", record ? `step ${position + 1} of ${history.length}: ${gave}` : "no step yet");
    }

    get #pitch() {
      return Math.min(WIDEST, this.canvas.clientWidth / Math.max(1, this.history?.length ?? 1));
    }

    #seek(event) {
      if (!this.history?.length) return;
      this.canvas.setPointerCapture(event.pointerId);
      const x = event.clientX - this.canvas.getBoundingClientRect().left;
      this.onSeek(Math.max(0, Math.min(this.history.length - 1, Math.floor(x / this.#pitch))));
    }

    #draw() {
      const width = this.canvas.clientWidth;
      if (!width || !this.history) return;
      const ratio = window.devicePixelRatio || 1;
      if (this.canvas.width !== Math.round(width * ratio)) this.canvas.width = Math.round(width * ratio);
      if (this.canvas.height !== Math.round(HEIGHT * ratio)) this.canvas.height = Math.round(HEIGHT * ratio);
      const context = this.canvas.getContext("2d");
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, HEIGHT);
      const colour = specdec.palette(this.canvas);
      const pitch = this.#pitch;
      const unit = Math.min(9, (HEIGHT - 8) / this.history.mostTokens);
      const gap = pitch > 5 ? 1.5 : pitch > 2.5 ? 0.75 : 0;
      this.history.records.forEach((record, step) => {
        const own = words.stateOf(record, "target") === "target" ? 1 : 0;
        const accepted = record.token_ids.length - own;
        const x = step * pitch;
        const wide = Math.max(0.5, pitch - gap);
        const shown = step === this.position;
        context.fillStyle = shown ? colour.text : colour.accepted;
        context.fillRect(x, HEIGHT - accepted * unit, wide, accepted * unit);
        context.fillStyle = shown ? colour.text : words.isDrafted(record) ? colour["target-line"] : colour.quiet;
        context.fillRect(x, HEIGHT - (accepted + own) * unit, wide, own * unit - (accepted && unit > 4 ? 1 : 0));
      });
      this.#drawCursor(context, colour, pitch, gap);
    }

    #drawCursor(context, colour, pitch, gap) {
      if (this.position < 0) return;
      const middle = this.position * pitch + (pitch - gap) / 2;
      context.fillStyle = colour.text;
      if (pitch < 4) context.fillRect(middle - 0.75, 0, 1.5, HEIGHT);
      context.beginPath();
      context.moveTo(middle - 4, 0);
      context.lineTo(middle + 4, 0);
      context.lineTo(middle, 5);
      context.fill();
    }
  }

  specdec.Scrubber = Scrubber;
})();
