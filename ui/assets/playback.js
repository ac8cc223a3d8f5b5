// Playback: which step is shown, in which beat, and what moves it on: the live reply, the clock, or the user.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});

  /** The beats of a step and their share of its time; a step at rest is "settled". */
  const BEATS = [
    ["grow", 0.26],
    ["verify", 0.26],
    ["prune", 0.32],
    ["commit", 0.16],
  ];
  const SPEEDS = [
    { name: "beat by beat", step: 3.2, beats: true },
    { name: "slow", step: 1.5, beats: true },
    { name: "quick", step: 0.25, beats: false },
    { name: "true speed", step: null, beats: false },
  ];
  /** Live steps further apart than this are told in beats, which are over before the next one is due. */
  const UNHURRIED = 1.1;

  const calm = window.matchMedia("(prefers-reduced-motion: reduce)");

  /**
   * States: `live` (follows the newest step), `playing` (the clock moves on), or at rest. The owner calls `tick(now)` on every
   * animation frame while `moving`, and draws `history.records[position]` in `beat`.
   */
  class Playback {
    #since = 0;
    #arrived = Infinity;
    #room = 0;
    #stepping = false;
    #held = false;

    constructor(history) {
      this.speed = SPEEDS[0];
      this.setHistory(history);
    }

    setHistory(history) {
      this.history = history;
      this.position = -1;
      this.beat = "settled";
      this.live = false;
      this.playing = false;
      this.#arrived = Infinity;
    }

    get moving() {
      return this.playing || (this.beat !== "settled" && !this.#held);
    }

    /** New steps have arrived at `now` (seconds). */
    arrived(now) {
      this.#room = now - this.#arrived;
      this.#arrived = now;
      if (!this.live) return;
      this.position = this.history.length - 1;
      if (this.#room > UNHURRIED && !calm.matches) this.#begin(now, "grow");
      else this.beat = "settled";
    }

    followLive() {
      this.live = true;
      this.playing = false;
      this.position = this.history.length - 1;
      this.beat = "settled";
    }

    /** Show one step at rest; a clock that runs goes on from there. */
    goTo(position) {
      this.live = false;
      this.#stepping = false;
      this.position = Math.max(0, Math.min(this.history.length - 1, position));
      if (!this.playing) this.beat = "settled";
    }

    /** One step on, told in beats: commit this one, then grow the next. In the middle of a motion: straight there. */
    stepOn(now) {
      const last = this.position >= this.history.length - 1;
      if (this.moving || last || calm.matches) return this.goTo(this.position + 1);
      this.live = false;
      this.#stepping = true;
      this.#begin(now, "commit");
    }

    /** One beat of this step, until the user does something else. */
    showBeat(beat, now) {
      this.live = false;
      this.playing = false;
      this.#begin(now, beat);
      this.#held = true;
    }

    play(now) {
      if (this.position >= this.history.length - 1) this.position = 0;
      this.position = Math.max(0, this.position);
      this.live = false;
      this.playing = true;
      this.#begin(now, this.#tellsBeats ? "grow" : "settled");
    }

    pause() {
      this.playing = false;
      this.live = false;
      this.beat = "settled";
    }

    get #tellsBeats() {
      return this.speed.beats && !calm.matches;
    }

    get #stepSeconds() {
      return this.speed.step ?? specdec.decodeSeconds(this.history.records[this.position]);
    }

    /** Seconds that the current beat (or settled step) stays. */
    get beatSeconds() {
      const share = BEATS.find(([name]) => name === this.beat)?.[1];
      if (share === undefined) return this.#stepSeconds;
      return share * Math.min(this.speed.beats ? this.speed.step : SPEEDS[1].step, this.live ? this.#room : Infinity);
    }

    #begin(now, beat) {
      this.beat = beat;
      this.#held = false;
      this.#since = now;
    }

    tick(now) {
      while (this.moving && now - this.#since >= this.beatSeconds) {
        const due = this.#since + this.beatSeconds;
        this.#since = Math.max(due, now - 0.5);
        this.#advance();
      }
    }

    #advance() {
      const at = BEATS.findIndex(([name]) => name === this.beat);
      const resting = !this.playing && this.beat === "prune";
      if (at >= 0 && at < BEATS.length - 1 && !resting) this.beat = BEATS[at + 1][0];
      else if (this.playing || this.#stepping) this.#nextStep();
      else this.beat = "settled";
    }

    #nextStep() {
      const ended = this.position >= this.history.length - 1;
      if (!ended) this.position++;
      this.beat = !ended && (this.#tellsBeats || this.#stepping) ? "grow" : "settled";
      this.playing = this.playing && !ended;
      this.#stepping = false;
    }
  }

  specdec.BEATS = BEATS.map(([name]) => name);
  specdec.SPEEDS = SPEEDS;
  specdec.Playback = Playback;
})();
