// Panel: puts the parts together and draws, once per animation frame at most.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const { words, controls } = specdec;
  const { element } = words;
  const SPOKEN_EVERY = 4;
  const LIVE_EVERY = 0.06;
  /** Seconds that a complaint stays while a reply streams below it. */
  const READABLE = 4;
  const LARGEST_TRACE = 32 * 1024 * 1024;

  const counters = (window.specdecPanel = {
    mounts: 0,
    payloads: 0,
    draws: 0,
    drawnSteps: 0,
    drawMs: 0,
    longestDrawMs: 0,
    charts: 0,
    chartMs: 0,
  });
  const seconds = () => performance.now() / 1000;

  const END_WORDS = {
    eos: "finished",
    stop_string: "finished at a stop string",
    stopping_criteria: "finished by a stopping rule",
    length: "at the token limit",
    context: "at the context limit",
    time: "at the time limit",
    cancelled: "stopped by you",
  };

  class Panel {
    #scheduled = false;
    #drawnAt = -Infinity;
    #drawnRecord = null;
    #spokenAt = -Infinity;
    #lastWords = "";
    #complainedAt = -Infinity;

    /**
     * `assets`: addresses of style, scripts, page template, Plotly and the recorded example; `openTrace(text)`: checks a trace;
     * `askAgain()`: has the whole of the ended reply sent. `slim`: selects the element, if the page has one, that shows the
     * newest step in one line.
     */
    constructor(host, { assets = {}, openTrace = null, askAgain = null, slim = null } = {}) {
      this.host = host;
      this.assets = assets;
      this.openTrace = openTrace;
      this.askAgain = askAgain;
      this.slimPlace = slim;
      this.feed = new specdec.Feed();
      this.history = new specdec.History();
      this.playback = new specdec.Playback(this.history);
      host.replaceChildren();
      host.classList.add("specdec");
      host.translate = false;
      this.#buildTreeCard();
      const summary = host.appendChild(element("div", { class: "charts summary" })); // in sight without scrolling
      this.figures = new controls.Figures(summary.appendChild(element("section", { class: "card figures" })));
      this.#buildStripCard();
      const more = host.appendChild(element("div", { class: "charts" }));
      this.charts = new specdec.Charts({ summary, more }, assets.plotly, counters, () => this.schedule());
      this.spoken = host.appendChild(element("p", { class: "spoken", "aria-live": "polite" }));
      host.addEventListener("keydown", (event) => this.#key(event));
      document.addEventListener("keydown", (event) => {
        const isOurs = event.target === document.body && host.offsetParent !== null;
        if (isOurs && ["ArrowLeft", "ArrowRight"].includes(event.key)) this.#key(event);
      });
      new ResizeObserver(() => this.schedule()).observe(host);
      counters.mounts++;
    }

    #buildTreeCard() {
      this.title = element("h2", {}, "Step");
      this.state = element("span", { class: "state" });
      const head = element(
        "header",
        {},
        this.title,
        this.state,
        controls.legend(),
        controls.menu("Save and open", this.#menuEntries()),
      );
      this.asked = element("p", { class: "note asked" });
      this.equation = element("p", { class: "equation" });
      this.notice = element("p", { class: "notice", role: "status" });
      const treeHost = element("div", {});
      const zoomButtons = element("div", { class: "zoom" });
      const beatRow = element("div", { class: "row beat-row" });
      const transport = element("div", { class: "row transport" });
      this.host.append(
        element(
          "section",
          { class: "card tree-card" },
          head,
          this.asked,
          this.equation,
          this.notice,
          treeHost,
          beatRow,
          transport,
        ),
      );

      this.tree = new specdec.TreeView(treeHost);
      const { zoom } = this.tree;
      zoomButtons.append(
        controls.iconButton("smaller", "Zoom out", () => zoom.by(1 / 1.25)),
        controls.iconButton("larger", "Zoom in", () => zoom.by(1.25)),
        controls.iconButton("fit", "Fit the tree", () => zoom.fit()),
      );
      this.beats = new controls.Beats(beatRow, (beat) => this.#do((now) => this.playback.showBeat(beat, now)));
      treeHost.append(zoomButtons);
      this.#buildTransport(transport);
    }

    #buildTransport(row) {
      const back = controls.iconButton("back", "Previous step", () =>
        this.#do(() => this.playback.goTo(this.playback.position - 1)),
      );
      const next = controls.iconButton("next", "Next step", () => this.#do((now) => this.playback.stepOn(now)));
      this.playButton = controls.iconButton("play", "Play", () => this.#togglePlay());
      this.liveButton = element("button", { type: "button", class: "live-button" }, "live");
      this.liveButton.addEventListener("click", () => this.#goLive());
      this.speed = element(
        "select",
        { "aria-label": "Speed" },
        ...specdec.SPEEDS.map(({ name }) => element("option", {}, name)),
      );
      this.speed.addEventListener("change", () => {
        this.playback.speed = specdec.SPEEDS[this.speed.selectedIndex];
        this.schedule();
      });
      this.counter = element("span", { class: "counter" });
      row.append(element("div", { class: "buttons" }, back, this.playButton, next, this.speed, this.liveButton));
      this.scrubber = new specdec.Scrubber(row, (position) => this.#do(() => this.playback.goTo(position)));
      row.append(this.counter);
    }

    #buildStripCard() {
      const card = element("section", { class: "card strip-card" });
      this.host.append(card);
      this.strip = new specdec.Strip(card, (position) => this.#do(() => this.playback.goTo(position)));
    }

    #menuEntries() {
      const { download, svgText, pngBlob, graphml, nodeLink, pageText } = specdec.exports;
      const record = () => this.history.records[this.playback.position];
      const name = (ending) => `specdec-step-${(record()?.index ?? 0) + 1}.${ending}`;
      const saving = (what, save) => async () => {
        if (!record()) return;
        this.#complain("");
        try {
          await save();
        } catch (error) {
          this.#complain(`The ${what} could not be saved: ${error.message}`);
        }
      };
      const entries = [
        ["Tree as SVG", saving("picture", () => download(svgText(this.tree.svg), "image/svg+xml", name("svg")))],
        ["Tree as PNG", saving("picture", async () => download(await pngBlob(this.tree.svg), "image/png", name("png")))],
        ["Tree as GraphML", saving("graph", () => download(graphml(record()), "application/xml", name("graphml")))],
        ["Tree as node-link JSON", saving("graph", () => download(nodeLink(record()), "application/json", name("json")))],
        [
          "Reply as trace (JSON)",
          saving("trace", () => download(JSON.stringify(this.history.toTrace()), "application/json", "specdec-trace.json")),
        ],
      ];
      if (this.assets.page)
        entries.push([
          "Reply as a web page",
          saving("web page", async () =>
            download(await pageText(this.history.toTrace(), this.assets), "text/html", "specdec-trace.html"),
          ),
        ]);
      if (this.openTrace) entries.push(["Open a trace …", () => this.#pickTrace()]);
      return entries;
    }

    #pickTrace() {
      const input = element("input", { type: "file", accept: ".json,application/json" });
      input.addEventListener("change", async () => {
        const [file] = input.files;
        if (!file) return;
        if (file.size > LARGEST_TRACE) return this.#complain(`${file.name} is larger than ${LARGEST_TRACE / 1048576} MB`);
        try {
          this.receive(await this.openTrace(await file.text()));
        } catch {
          this.#complain(`${file.name} could not be opened.`);
        }
      });
      input.click();
    }

    /** Take in a payload string (see ui/panel.py). */
    receive(text) {
      counters.payloads++;
      const ran = this.#isRunning;
      const { length, notice } = this.history;
      const { idle, error, shown, grown } = this.feed.receive(text);
      if (idle) {
        if (this.feed.live) this.feed.live.state = "left"; // its chat is gone: nothing to go back to
        return this.showExample();
      }
      if (error) return this.#complain(error);
      if (shown) this.show(shown);
      else if (grown.run === this.history.run && grown !== this.history) this.#replaceHistory(grown);
      if (this.history === this.feed.live) this.#goOn(shown ? { length: 0, notice: "" } : { length, notice });
      if (!this.#isRunning) this.playback.live = false;
      if (ran && !this.#isRunning && this.history === this.feed.live) this.#lastWords = this.#endWords();
      this.#heal();
      this.schedule();
    }

    /** Ask, once, for the whole of a reply that ended with a gap. */
    #heal() {
      const { live } = this.feed;
      if (!["ended", "error"].includes(live?.state) || !live.gap || live.asked) return;
      live.asked = true;
      this.askAgain?.();
    }

    /** The shown reply went on from this length and this notice; what it says takes the place of a complaint. */
    #goOn({ length, notice }) {
      const { history } = this;
      const stepped = history.length > length;
      const told = history.notice && history.notice !== notice;
      if (stepped) this.playback.arrived(seconds());
      if (told || (stepped && seconds() - this.#complainedAt > READABLE)) this.complaint = "";
    }

    /** Whether a reply streams, be it the shown one or not. */
    get #isRunning() {
      return ["waiting", "streaming"].includes(this.feed.live?.state);
    }

    get #streams() {
      return this.#isRunning && this.history === this.feed.live;
    }

    /** Show a history from its beginning (a live one: at its end, following it). */
    show(history) {
      this.#replaceHistory(history);
      this.tree.startRun(history.deepest);
      this.#complain("");
      if (history === this.feed.live) this.playback.followLive();
      else this.playback.goTo(0);
      this.schedule();
    }

    #replaceHistory(history) {
      const { live } = this.playback;
      const position = this.history.records[this.playback.position]?.index ?? -1; // without a gap it stands there
      this.history = history;
      this.playback.setHistory(history);
      Object.assign(this.playback, { live, position: Math.min(position, history.length - 1) });
      this.#drawnRecord = null;
      const asked = history.label === "live" ? [] : words.asked(history.header); // of one's own reply the chat tells that
      this.asked.replaceChildren(...asked.map((text) => element("bdi", { title: text }, text)));
    }

    /** The recorded example that is shown before the first message; it plays by itself unless motion is unwelcome. */
    async showExample() {
      if (!this.assets.example) return;
      const { history } = this;
      const { fetched } = specdec.exports;
      const example = await fetched(this.assets.example)
        .then((reply) => reply.json())
        .catch(() => null);
      if (this.history !== history) return; // something else was shown meanwhile
      if (!example) return this.#complain("The recorded example could not be loaded.");
      this.receive(JSON.stringify({ trace: example, label: "recorded example" }));
      this.playback.goTo(this.history.records.findIndex((record) => record.token_ids.length >= 3));
      if (!window.matchMedia("(prefers-reduced-motion: reduce)").matches) this.playback.play(seconds());
      this.schedule();
    }

    #complain(text) {
      this.complaint = text;
      this.#complainedAt = seconds();
      this.schedule();
    }

    #do(action) {
      if (!this.history.length) return;
      action(seconds());
      this.schedule();
    }

    #togglePlay() {
      const { playback } = this;
      if (playback.playing || playback.live) return this.#do(() => this.#pause());
      if (this.#streams && playback.position === this.history.length - 1) return this.#goLive();
      this.#do((now) => playback.play(now));
    }

    #pause() {
      this.playback.pause();
      this.#drawnRecord = null; // drawn anew, and so spoken
    }

    /** To the reply of the chat: its newest step while it streams, else its last. */
    #goLive() {
      if (this.history !== this.feed.live) this.show(this.feed.live);
      this.playback.followLive();
      this.playback.live = this.#isRunning;
      if (!this.#isRunning) this.scrubber.canvas.focus(); // the button goes
      this.schedule();
    }

    #key(event) {
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.target.closest("select, summary")) return;
      const { playback, history } = this;
      const actions = {
        ArrowLeft: () => playback.goTo(playback.position - 1),
        ArrowRight: (now) => playback.stepOn(now),
        Home: () => playback.goTo(0),
        End: () => playback.goTo(history.length - 1),
        PageUp: () => playback.goTo(playback.position - 10),
        PageDown: () => playback.goTo(playback.position + 10),
      };
      if (event.key === " " && !event.target.closest("button")) actions[" "] = () => this.#togglePlay();
      if (!actions[event.key]) return;
      event.preventDefault();
      this.#do(actions[event.key]);
    }

    /** Draw in the next animation frame; a live reply is drawn at most every LIVE_EVERY, to leave the machine to the engine. */
    schedule() {
      if (this.#scheduled) return;
      this.#scheduled = true;
      const wait = this.playback.live ? this.#drawnAt + LIVE_EVERY - seconds() : 0;
      const frame = () => requestAnimationFrame(() => this.#tick());
      if (wait > 0.004) setTimeout(frame, 1000 * wait);
      else frame();
    }

    #tick() {
      this.#scheduled = false;
      if (this.host.offsetParent === null) return;
      const now = seconds();
      this.#drawnAt = now;
      this.playback.tick(now);
      const started = performance.now();
      this.#draw();
      if (this.#lastWords) this.#say(this.#lastWords);
      this.#lastWords = "";
      counters.draws++;
      counters.drawMs = performance.now() - started;
      counters.longestDrawMs = Math.max(counters.longestDrawMs, counters.drawMs);
      this.charts.show(this.history, this.playback.position, this.playback.live);
      this.charts.tick(now);
      if (this.playback.moving) this.schedule();
      else if (this.charts.pending) setTimeout(() => this.schedule(), 120);
    }

    #draw() {
      const { history, playback } = this;
      const { position, beat } = playback;
      const record = history.records[position];
      this.#drawState();
      this.#drawSlim();
      this.beats.show(record ? beat : "settled", record ? words.sharing(record) : "");
      controls.setIcon(
        this.playButton,
        playback.playing || playback.live ? "pause" : "play",
        playback.playing || playback.live ? "Pause" : "Play",
      );
      this.scrubber.show(history, position);
      this.figures.host.classList.toggle("earlier", position < history.length - 1);
      this.strip.show(history, position, beat !== "grow" && beat !== "verify");
      const counter = record ? `${position + 1} / ${history.length}` : "";
      if (this.counter.textContent !== counter) this.counter.textContent = counter;
      if (!record) return this.#drawEmpty();
      if (beat !== "settled") this.tree.host.style.setProperty("--beat", `${playback.beatSeconds}s`);
      this.tree.show(record, beat);
      if (record === this.#drawnRecord) return;
      this.#drawnRecord = record;
      counters.drawnSteps++;
      this.title.textContent = `Step ${record.index + 1}`;
      this.equation.replaceChildren(
        ...words.equation(record).map(([text, kind]) => (kind ? element("b", { class: kind }, text) : text)),
      );
      this.figures.show(record, history.measured);
      this.#speak(record);
    }

    #drawSlim() {
      const place = this.slimPlace && document.querySelector(this.slimPlace);
      if (!place) return;
      if (this.slim?.host !== place) this.slim = new specdec.Slim(place);
      if (this.slim.link.onclick === null) this.slim.link.onclick = () => this.host.scrollIntoView();
      this.slim.show(this.feed.live?.last, this.#isRunning);
    }

    #drawEmpty() {
      this.#drawnRecord = null;
      this.tree.clear();
      this.title.textContent = "Step";
      const { state, note } = this.history;
      const waits = note ? "Waiting …" : "Reading the prompt …";
      const idle = state ? "The reply ended before its first step." : "Send a message to watch the draft tree grow.";
      this.equation.textContent = state === "waiting" ? waits : idle;
      this.figures.show(null);
    }

    #drawState() {
      const { history, playback } = this;
      const { live } = this.feed;
      const running = this.#streams;
      const behind = running && !playback.live ? "still writing" : history.label;
      const label = history.label === "live" && !running ? this.#ending : (behind ?? "");
      if (this.state.textContent !== label) this.state.textContent = label;
      this.state.className = `state ${running ? "running" : ""} ${label ? "" : "empty"}`;
      const way = this.#isRunning ? "live" : live && live !== history && live.state !== "left" ? "back to the reply" : "";
      if (this.liveButton.textContent !== way) this.liveButton.textContent = way;
      this.liveButton.hidden = !way;
      this.liveButton.setAttribute("aria-pressed", String(playback.live && running));
      const notice = this.complaint || history.notice;
      if (this.notice.textContent !== notice) this.notice.textContent = notice;
      this.notice.classList.toggle("error", Boolean(this.complaint || history.error));
    }

    /** How the shown reply ended. */
    get #ending() {
      return this.history.error ? "failed" : (END_WORDS[this.history.finishReason] ?? "stopped");
    }

    #endWords() {
      const figures = this.history.last?.figures;
      if (!figures) return `Reply ${this.#ending}.`;
      const { tokens, passes } = figures;
      return `Reply ${this.#ending}: ${words.counted(tokens, "token")} in ${words.counted(passes, "pass", "passes")}.`;
    }

    #speak(record) {
      if (this.playback.playing || (this.playback.live && seconds() - this.#spokenAt < SPOKEN_EVERY)) return;
      this.#say(`Step ${record.index + 1}. ${words.equationText(record)}`);
    }

    #say(text) {
      this.#spokenAt = seconds();
      this.spoken.textContent = text;
    }
  }

  specdec.Panel = Panel;
})();
