// Strip: the reply as a row of tokens, each marked with where it came from. Grows at its end only; nothing is rebuilt.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const { words } = specdec;
  const LONGEST_LINE = 160;
  const FADE = 10; // as high as in the stylesheet

  class Strip {
    #history = null;
    #spans = [];
    #line = null;
    #now = [];
    #edge = null;
    #stop = null;
    #follows = true; // until the user scrolls

    /** `onSeek(position)` is called with the step of a token that was clicked. */
    constructor(host, onSeek) {
      this.box = words.element("div", { class: "strip", role: "group", "aria-label": "Tokens of the reply" });
      const marks = Object.entries(words.KIND_WORDS).map(([kind, meaning]) =>
        words.element("span", { class: `token ${kind}`, title: meaning }, meaning.split(":")[0]),
      );
      const legend = words.element("p", { class: "legend" }, ...marks);
      host.append(words.element("header", {}, words.element("h3", {}, "Where each token came from"), legend), this.box);
      this.box.addEventListener("pointerover", ({ target: token }) => {
        if (token.matches(".token")) token.title = this.#describe(token);
      });
      this.box.addEventListener("keydown", (event) => this.#key(event));
      // a line gets its height when it comes in sight, and moves those below it
      this.box.addEventListener("contentvisibilityautostatechange", () => this.#follows && this.#keepInSight());
      for (const act of ["wheel", "pointerdown", "touchstart"])
        this.box.addEventListener(act, () => (this.#follows = false), { passive: true });
      this.box.addEventListener("click", (event) => {
        const token = event.target.closest(".token");
        if (token) onSeek(Number(token.dataset.step));
      });
    }

    /** Mark the tokens of the step at `position`; before it is `committed` they are still to come. */
    show(history, position, committed) {
      if (history !== this.#history) this.#clear(history);
      for (let i = this.#spans.length; i < history.tokens.length; i++) this.#append(history.tokens[i]);
      const first = history.firstToken[position] ?? 0;
      const end = history.firstToken[position + 1] ?? history.tokens.length;
      this.#now.forEach((span) => span.classList.remove("now"));
      this.#now = committed ? this.#spans.slice(first, end) : [];
      this.#now.forEach((span) => span.classList.add("now"));
      if (!this.box.contains(document.activeElement)) this.#rove(this.#spans[first]);
      this.#setEdge(this.#spans[(committed ? end : first) - 1] ?? null);
    }

    #clear(history) {
      this.#history = history;
      this.#spans = [];
      this.#now = [];
      this.#edge = null;
      this.#stop = null;
      this.#line = null;
      this.box.replaceChildren();
    }

    #append({ text, meaning, kind, step }) {
      if (!this.#line || this.#line.childElementCount >= LONGEST_LINE) {
        this.#line = words.element("div", { class: "line", dir: "auto" });
        this.box.append(this.#line);
      }
      const span = words.element("span", { class: `token ${kind} ${meaning ? "special" : ""}`, "data-step": step });
      span.textContent = words.prose(meaning ? words.sign(meaning) : text).replaceAll("⏎", "⏎\n");
      this.#spans.push(span);
      this.#line.append(span);
      if (text.endsWith("\n")) this.#line = null;
    }

    #describe(span) {
      return `${span.textContent}, ${words.KIND_WORDS[span.classList[1]]}, step ${Number(span.dataset.step) + 1}`;
    }

    /** The one token that Tab leads to; from there arrows lead to the others. */
    #rove(span) {
      if (!span || span === this.#stop) return;
      for (const [name, value] of Object.entries({ tabindex: 0, role: "button", "aria-label": this.#describe(span) })) {
        this.#stop?.removeAttribute(name);
        span.setAttribute(name, value);
      }
      this.#stop = span;
    }

    #key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const at = this.#spans.indexOf(event.target);
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: this.#spans.length - 1 }[event.key];
      if (to === undefined && event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      if (to === undefined) return event.target.click();
      this.#rove(this.#spans[to]);
      this.#stop.focus();
    }

    /** Everything after the edge is still to come, and drawn faint (in CSS: its later siblings). */
    #setEdge(span) {
      this.box.classList.toggle("ahead", span === null);
      if (span === this.#edge) return;
      for (const [mark, was] of [
        ["edge", this.#edge],
        ["edge-line", this.#edge?.parentElement],
      ])
        was?.classList.remove(mark);
      span?.classList.add("edge");
      span?.parentElement.classList.add("edge-line");
      this.#edge = span;
      this.#follows = true;
      this.#keepInSight();
    }

    #keepInSight() {
      const [edge] = this.#edge?.getClientRects() ?? []; // its first line: it may end with a line break
      if (!edge) return;
      const { top, bottom } = edge;
      const box = this.box.getBoundingClientRect();
      if (top < box.top || bottom > box.bottom - FADE) this.box.scrollTop += top - box.top - (box.height - FADE - (bottom - top)) * 0.7;
    }
  }

  specdec.Strip = Strip;
})();
