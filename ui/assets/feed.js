// Feed: payloads from the server -> histories. Survives dropped and repeated payloads; ui/panel.py documents the format.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const { History } = specdec;

  class Feed {
    #seq = -1;
    #left = new Set();

    constructor() {
      this.live = null;
    }

    /**
     * Take in one payload. Returns what it asks to show: {idle: true}, {shown: history} for a new run or a trace, or
     * {grown: history} where the live run went on. What comes late of an earlier run is left out.
     */
    receive(text) {
      if (!text) return { idle: true };
      const payload = JSON.parse(text);
      if (payload.trace) return { shown: this.#replay(payload.trace, payload.label) };
      if (payload.error) return { error: payload.error };
      if (this.#left.has(payload.run)) return { grown: this.live };
      const started = !this.live || this.live.run !== payload.run;
      if (started) this.#start(payload.run);
      for (const message of payload.messages) {
        if (message.seq <= this.#seq) continue;
        this.#seq = message.seq;
        this.#apply(message);
      }
      return started ? { shown: this.live } : { grown: this.live };
    }

    #start(run) {
      if (this.live) this.#left.add(this.live.run);
      this.live = Object.assign(new History(), { run, label: "live", state: "waiting" });
      this.#seq = -1;
    }

    #replay(trace, label) {
      return Object.assign(History.fromTrace(trace), { run: `${label} ${performance.now()}`, label, state: "ended" });
    }

    #apply(message) {
      const { live } = this;
      if (message.kind === "start") live.header = { model: message.model, settings: message.settings, prompt: message.prompt };
      for (const record of message.steps ?? []) {
        live.add(record);
        Object.assign(live, { state: "streaming", note: "" });
      }
      if (message.kind === "note") live.note = message.text;
      if (message.kind === "error" || message.kind === "end") this.#end(message);
    }

    /** The end brings the whole reply along where it is small enough; it fills what was dropped on the way. */
    #end({ kind, text, finish_reason: reason, steps }) {
      if (this.live.missing > 0 && steps) {
        const { run, label, header, note } = this.live;
        const whole = Object.assign(new History(header), { run, label, note });
        steps.forEach((record) => whole.add(record));
        if (whole.length > this.live.length) this.live = whole;
      }
      if (kind === "error") Object.assign(this.live, { state: "error", error: text });
      else Object.assign(this.live, { state: "ended", finishReason: reason ?? this.live.finishReason });
    }
  }

  specdec.Feed = Feed;
})();
