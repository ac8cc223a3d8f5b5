// Strip: the reply as a row of tokens, each marked with where it came from. Grows at its end only; nothing is rebuilt.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const { words } = specdec;
  const LONGEST_LINE = 160;

  class Strip {
    #history = null;
    #spans = [];
    #line = null;
    #now = [];
    #edge = null;

    /** `onSeek(position)` is called with the step of a token that was clicked. */
    constructor(host, onSeek) {
      this.box = words.element("div", { class: "strip", tabindex: 0, role: "group", "aria-label": "Tokens of the reply" });
      host.append(this.box);
      this.box.addEventListener("pointerover", ({ target: token }) => {
        if (token.matches(".token"))
          token.title = `step ${Number(token.dataset.step) + 1}, ${words.KIND_WORDS[token.classList[1]]}`;
      });
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
      this.#setEdge(this.#spans[(committed ? end : first) - 1] ?? null);
    }

    #clear(history) {
      this.#history = history;
      this.#spans = [];
      this.#now = [];
      this.#edge = null;
      this.#line = null;
      this.box.replaceChildren();
    }

    #append({ text, kind, step }) {
      if (!this.#line || this.#line.childElementCount >= LONGEST_LINE) {
        this.#line = words.element("div", { class: "line" });
        this.box.append(this.#line);
      }
      const span = words.element("span", { class: `token ${kind}`, "data-step": step });
      span.textContent = words.prose(text);
      this.#spans.push(span);
      this.#line.append(span);
      if (text.endsWith("\n")) this.#line = null;
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
      if (span) this.#keepInSight(span);
    }

    #keepInSight(span) {
      const top = span.offsetTop;
      const { scrollTop, clientHeight } = this.box;
      if (top < scrollTop + 4 || top + span.offsetHeight > scrollTop + clientHeight - 4) {
        this.box.scrollTop = Math.max(0, top - clientHeight * 0.6);
      }
    }
  }

  specdec.Strip = Strip;
})();
