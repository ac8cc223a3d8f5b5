// Charts: Plotly on elements that stay. One chart a frame, each at most twice a second (once, live), none while it is out of sight;
// but each once before that, while no reply streams: a first drawing is a chart's slowest.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const { words } = specdec;
  const EVERY = 0.5;
  const LIVE_EVERY = 1;
  const SHARE = 25; // a chart waits this many times as long as it took to draw
  const MOST_POINTS = 400;
  const FEWEST_POINTS = 3;
  const CONFIG = { responsive: true, displaylogo: false, showSendToCloud: false, displayModeBar: false };

  /** At most MOST_POINTS records, evenly spread and ending with the last: what a line needs, however long the reply. */
  function sampled({ records }) {
    const stride = Math.ceil(records.length / MOST_POINTS);
    return records.filter((_, i) => (records.length - 1 - i) % stride === 0);
  }

  const steps = (history) => sampled(history).map((record) => record.index + 1);
  const figure = (history, name) => sampled(history).map((record) => record.figures[name]);
  const rate = ({ accepted, drafted }) => accepted / drafted;
  const rateText = (entry) => `${words.percent(rate(entry))}`;
  const rateHover = (entry) => `${words.number(entry.accepted, 0)} of ${words.number(entry.drafted, 0)} drafted`;

  function line(x, y, colour, name, style = {}) {
    return {
      type: "scatter",
      mode: "lines",
      x,
      y,
      name,
      line: { color: colour, width: 2, ...style },
      hovertemplate: `%{y:.2f}<extra>${name}</extra>`,
    };
  }

  /** One value a step, filled to the ground: a bar chart as a single path, so that 2,000 steps stay cheap. */
  function skyline(history, valueOf, colour) {
    return {
      type: "scatter",
      mode: "lines",
      x: steps(history),
      y: sampled(history).map(valueOf),
      fill: "tozeroy",
      fillcolor: specdec.faint(colour, 0.22),
      line: { color: colour, width: 0.8, shape: "hvh" },
      hovertemplate: "%{y} tokens<extra>step %{x}</extra>",
    };
  }

  function speedup(history, colour) {
    const x = steps(history);
    const data = [line(x, figure(history, "speedup"), colour.speed, "speedup")];
    const expected = figure(history, "expected_speedup");
    if (expected.at(-1) != null) data.push(line(x, expected, colour.speed, "expected", { dash: "dot", width: 1.3 }));
    const top = 1.12 * Math.max(1.6, ...data.flatMap(({ y }) => y).filter((value) => value != null));
    data.push({
      ...line([0.5, history.length + 0.5], [1, 1], colour.muted, "plain", { dash: "dash", width: 1.2 }),
      hoverinfo: "skip",
    });
    data.push({
      type: "scatter",
      mode: "text",
      x: [history.length + 0.5],
      y: [1 - 0.07 * top],
      text: ["plain = 1.0×"],
      textposition: "middle left",
      textfont: { size: 11, color: colour.muted },
      hoverinfo: "skip",
    });
    return {
      data,
      layout: { yaxis: { range: [0, top], ticksuffix: "×", nticks: 5 } },
    };
  }

  function tokensPerPass(history, colour) {
    const x = steps(history);
    const data = [
      skyline(history, (record) => record.token_ids.length, colour.accepted),
      line(x, figure(history, "tokens_per_pass"), colour.accepted, "mean so far"),
    ];
    const expected = figure(history, "expected_tokens_per_pass");
    if (expected.at(-1) != null)
      data.push(line(x, expected, colour.muted, "forecast", { dash: "dot", width: 1.4 }));
    return {
      data,
      layout: { yaxis: { rangemode: "tozero", nticks: 5 } },
    };
  }

  function acceptedLengths(history, colour) {
    const counts = Array.from(history.acceptedLengths, (count) => count ?? 0);
    const text = counts.map((count) => (count ? words.number(count, 0) : ""));
    return {
      data: [
        {
          type: "bar",
          x: counts.map((_, length) => length),
          y: counts,
          text,
          textposition: "outside",
          cliponaxis: false,
          marker: { color: counts.map((_, length) => (length ? colour.accepted : colour.rejected)) },
          hovertemplate: "%{y} passes accepted %{x}<extra></extra>",
        },
      ],
      layout: {
        bargap: 0.18,
        xaxis: { dtick: counts.length > 12 ? 2 : 1 },
        yaxis: { visible: false },
        margin: { l: 6, t: 22 },
      },
    };
  }

  function bySource(history, colour) {
    const entries = [...history.bySource].sort(([, a], [, b]) => rate(a) - rate(b));
    return {
      data: [
        {
          type: "bar",
          orientation: "h",
          y: entries.map(([source]) => words.plotlyText(words.sourceWords(source))),
          x: entries.map(([, entry]) => rate(entry)),
          text: entries.map(([, entry]) => rateText(entry)),
          customdata: entries.map(([, entry]) => rateHover(entry)),
          textposition: "outside",
          cliponaxis: false,
          marker: { color: colour.accepted },
          hovertemplate: "%{customdata}<extra></extra>",
        },
      ],
      layout: {
        bargap: 0.35,
        margin: { l: 116, r: 44 },
        xaxis: { visible: false, rangemode: "tozero" },
        yaxis: { showgrid: false },
      },
    };
  }

  function byDepth(history, colour) {
    const entries = [...history.byDepth].sort(([a], [b]) => a - b);
    return {
      data: [
        {
          type: "bar",
          x: entries.map(([depth]) => depth),
          y: entries.map(([, entry]) => rate(entry)),
          customdata: entries.map(([, entry]) => rateHover(entry)),
          marker: { color: colour.accepted },
          hovertemplate: "depth %{x}: %{y:.0%}, %{customdata}<extra></extra>",
        },
      ],
      layout: {
        bargap: 0.18,
        xaxis: { dtick: entries.length > 12 ? 2 : 1 },
        yaxis: { tickformat: ".0%", rangemode: "tozero", nticks: 4 },
      },
    };
  }

  function budget(history, colour) {
    return {
      data: [skyline(history, (record) => record.tree.token_ids.length - 1, colour.muted)],
      layout: { yaxis: { rangemode: "tozero", nticks: 4 } },
    };
  }

  const CHARTS = [
    {
      title: "Running speedup",
      note: "against plain decoding, {measured}; dotted: forecast",
      axis: "step",
      build: speedup,
      headline: ({ speedup }) => `${words.number(speedup)}×`,
      leads: true,
      marked: true,
    },
    {
      title: "Accepted lengths",
      note: "how many drafted tokens each pass accepted",
      axis: "accepted tokens per pass",
      build: acceptedLengths,
    },
    {
      title: "Tokens per pass",
      note: "each pass, and the mean so far; dotted: forecast",
      axis: "step",
      build: tokensPerPass,
      headline: ({ tokens_per_pass }) => words.number(tokens_per_pass),
      wide: true,
      marked: true,
    },
    {
      title: "Acceptance by depth",
      note: "the share of tokens accepted at each depth",
      axis: "depth in the tree",
      build: byDepth,
    },
    { title: "Tokens drafted", note: "the size of each pass's tree", axis: "step", build: budget, wide: true, marked: true },
    { title: "Acceptance by source", note: "the share of tokens accepted from each source", axis: "", build: bySource },
  ];

  function layoutOf(built, colour, run) {
    const axis = { gridcolor: colour.line, zeroline: false, linecolor: colour.line, tickfont: { size: 11 } };
    const { xaxis = {}, yaxis, margin, ...rest } = built;
    return {
      autosize: true,
      showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: colour.font, size: 12, color: colour.muted },
      uirevision: run,
      hoverlabel: { font: { size: 12 } },
      margin: { l: 36, r: 8, t: 10, b: 20, ...margin },
      xaxis: { ...axis, showgrid: false, ...xaxis },
      yaxis: { ...axis, ...yaxis },
      ...rest,
    };
  }

  class Charts {
    /**
     * `hosts`: `summary` takes the leading chart, `more` the others. `plotlyUrl`: where to load Plotly from when the page has
     * not got it yet; `onWork` is called when a chart waits.
     */
    constructor(hosts, plotlyUrl, counters, onWork) {
      this.counters = counters;
      this.history = null;
      this.position = -1;
      this.charts = CHARTS.map((chart) => this.#card(chart.leads ? hosts.summary : hosts.more, chart));
      this.sight = new IntersectionObserver(
        (entries) => {
          for (const { target, isIntersecting } of entries)
            this.charts.find(({ plot }) => plot === target).inSight = isIntersecting;
          onWork();
        },
        { rootMargin: "120px" },
      );
      this.charts.forEach(({ plot }) => this.sight.observe(plot));
      this.ready = Boolean(window.Plotly);
      if (!this.ready && plotlyUrl) this.#load(plotlyUrl, onWork);
      specdec.onTheme(() => {
        for (const chart of this.charts) chart.drawn = null;
        onWork();
      });
    }

    #card(host, chart) {
      const plot = words.element("div", { class: "plot" });
      const noteLine = words.element("span", { class: "note" });
      const value = words.element("strong");
      const head = words.element(
        "header",
        {},
        words.element("h3", {}, chart.title),
        noteLine,
        value,
      );
      const axis = words.element("p", { class: "note axis" }, chart.axis);
      host.append(words.element("section", { class: `card chart ${chart.wide ? "wide" : ""}` }, head, plot, axis));
      return { ...chart, plot, noteLine, value, drawn: null, due: 0, inSight: false };
    }

    #load(url, onWork) {
      const script = words.element("script", { src: url });
      script.addEventListener("load", () => {
        this.ready = true;
        onWork();
      });
      document.head.append(script);
    }

    show(history, position, live) {
      if (history !== this.history)
        for (const chart of this.charts) {
          chart.noteLine.textContent = chart.note.replace("{measured}", history.measured);
          chart.due = 0;
        }
      this.history = history;
      this.position = position;
      this.live = live;
      for (const chart of this.charts) this.#hideOthers(chart);
      const record = history.records[position];
      if (record) for (const chart of this.charts) this.#head(chart, record);
    }

    /** What a chart showed before is not of this reply. */
    #hideOthers({ plot, value, drawn }) {
      plot.classList.toggle("blank", !this.history.length || !drawn?.startsWith(`${this.history.run} `));
      value.classList.toggle("blank", !this.history.length);
    }

    /** The figure above a chart: of the step looked at. */
    #head({ headline, value }, { index, figures }) {
      const text = headline ? headline(figures) : "";
      const shown = text && this.#looksBack ? `${text} at step ${index + 1}` : text;
      if (value.textContent !== shown) value.textContent = shown;
    }

    get #looksBack() {
      return this.position < this.history.length - 1;
    }

    /** Whether a chart waits to be drawn. */
    get pending() {
      return this.ready && Boolean(this.#next());
    }

    #next(now = Infinity) {
      if (!this.history?.length) return undefined;
      if (this.live && this.history.length < FEWEST_POINTS) return undefined; // no line yet
      const wanted = (chart) => chart.inSight || (chart.drawn === null && !this.live);
      return this.charts.find((chart) => wanted(chart) && now >= chart.due && chart.drawn !== this.#state(chart));
    }

    /** The shown step is marked while one looks back; at the newest step there is nothing to tell. */
    #isMarked(chart) {
      return chart.marked && this.#looksBack;
    }

    #state(chart) {
      return `${this.history.run} ${this.history.length}${this.#isMarked(chart) ? ` ${this.position}` : ""}`;
    }

    /** Draw at most one chart that is due at `now` (seconds). */
    tick(now) {
      const chart = this.ready ? this.#next(now) : undefined;
      if (!chart) return;
      const started = performance.now();
      const colour = specdec.palette(chart.plot);
      const { data, layout } = chart.build(this.history, colour);
      if (chart.marked) layout.xaxis = { range: [0.5, this.history.length + 0.5], nticks: 7, ...(this.history.length < 7 && { dtick: 1 }) };
      if (this.#isMarked(chart)) layout.shapes = [this.#marker(colour)];
      Plotly.react(chart.plot, data, layoutOf(layout, colour, this.history.run), CONFIG);
      chart.drawn = this.#state(chart);
      this.#hideOthers(chart);
      this.counters.charts++;
      this.counters.chartMs = performance.now() - started;
      chart.due = now + Math.max(this.live ? LIVE_EVERY : EVERY, (SHARE * this.counters.chartMs) / 1000);
    }

    #marker(colour) {
      const x = (this.history.records[this.position]?.index ?? 0) + 1;
      return { type: "line", yref: "paper", y0: 0, y1: 1, x0: x, x1: x, line: { color: colour.text, width: 1 }, opacity: 0.45 };
    }
  }

  specdec.Charts = Charts;
})();
