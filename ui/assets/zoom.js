// Zoom and pan of an SVG group. Fits by itself until the user takes over; then the user's view survives every redraw.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const PAN = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

  class Zoom {
    static smallest = 0.6; // scale that it fits to by itself
    #drag = null;

    constructor(svg, group) {
      this.svg = svg;
      this.group = group;
      this.content = { room: 1, width: 1, height: 1, whole: 1, tall: 1 };
      this.reset();
      svg.addEventListener("pointerdown", (event) => this.#grab(event));
      svg.addEventListener("pointermove", (event) => this.#move(event));
      for (const end of ["pointerup", "pointercancel"]) svg.addEventListener(end, () => this.#release());
      svg.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
      svg.addEventListener("dblclick", () => this.fit());
      svg.addEventListener("keydown", (event) => this.#key(event));
    }

    reset() {
      this.user = false;
      this.view = { scale: 1, x: 0, y: 0 };
    }

    /** What is drawn: how wide and high it is, how high the `whole` that is to fit, and how much `room` there is and how `tall`. */
    setContent(content) {
      this.content = content;
      if (!this.user) this.#fitView();
      this.#apply();
    }

    fit() {
      this.user = false;
      this.#fitView();
      this.#apply();
    }

    #fitView() {
      const { room, width, whole, tall } = this.content;
      this.view = { scale: clamp(Math.min(room / width, tall / whole), Zoom.smallest, 1), x: 0, y: 0 };
    }

    by(factor, x = this.svg.clientWidth / 2, y = this.svg.clientHeight / 2) {
      const scale = clamp(this.view.scale * factor, 0.25, 3);
      const ratio = scale / this.view.scale;
      this.view = { scale, x: x - (x - this.view.x) * ratio, y: this.#inSight(y - (y - this.view.y) * ratio, scale) };
      this.user = true;
      this.#apply();
    }

    /** The `y` nearest to this one at which nothing is cut off; any where the room is too low for that. */
    #inSight(y, scale) {
      const slack = this.#slack(scale);
      return slack < 0 ? y : clamp(y, 0, slack);
    }

    /** To the pixel: what just fits overhangs by no rounding error. */
    #slack(scale) {
      return Math.round(this.content.tall - this.content.height * scale);
    }

    #apply() {
      const { scale, x, y } = this.view;
      const { room, width } = this.content;
      this.svg.classList.toggle("overhangs", y < 0 || y > this.#slack(scale));
      this.svg.classList.toggle("cut-left", x < -10);
      this.svg.classList.toggle("cut-right", x + width * scale > room + 10);
      this.group.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${scale.toFixed(3)})`);
    }

    #grab(event) {
      if (event.button !== 0) return;
      this.#drag = { startX: event.clientX, startY: event.clientY, x: this.view.x, y: this.view.y, moved: false };
    }

    #move(event) {
      if (!event.buttons) this.#release();
      if (!this.#drag) return;
      const dx = event.clientX - this.#drag.startX;
      const dy = event.clientY - this.#drag.startY;
      if (!this.#drag.moved && Math.hypot(dx, dy) < 4) return;
      if (!this.#drag.moved) this.svg.setPointerCapture(event.pointerId);
      this.#drag.moved = true;
      this.svg.classList.add("dragging");
      this.#panTo(this.#drag.x + dx, this.#drag.y + dy);
    }

    #panTo(x, y) {
      this.user = true;
      this.view = { ...this.view, x, y: this.#inSight(y, this.view.scale) };
      this.#apply();
    }

    #release() {
      this.#drag = null;
      this.svg.classList.remove("dragging");
    }

    /** Shift and an arrow: look further that way. */
    #key(event) {
      const way = event.shiftKey && PAN[event.key];
      if (!way) return;
      event.preventDefault();
      this.#panTo(this.view.x + way[0], this.view.y + way[1]);
    }

    #wheel(event) {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = this.svg.getBoundingClientRect();
      this.by(Math.exp(-event.deltaY / 300), event.clientX - box.left, event.clientY - box.top);
    }
  }

  specdec.Zoom = Zoom;
})();
