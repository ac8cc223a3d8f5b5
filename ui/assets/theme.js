// Theme: the palette as CSS variables say it, and a call when light turns dark.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const NAMES = ["text", "muted", "quiet", "line", "card", "accepted", "target", "target-line", "rejected", "speed"];

  /** The colours in force at an element, by name, and its font. */
  function palette(element) {
    const style = getComputedStyle(element);
    const colours = NAMES.map((name) => [name, style.getPropertyValue(`--sd-${name}`).trim()]);
    return { ...Object.fromEntries(colours), font: style.fontFamily };
  }

  /** A #rrggbb colour at an opacity, in a form that Plotly understands. */
  function faint(colour, opacity) {
    const [red, green, blue] = colour
      .slice(1)
      .match(/../g)
      .map((part) => parseInt(part, 16));
    return `rgba(${red},${green},${blue},${opacity})`;
  }

  function onTheme(callback) {
    new MutationObserver(callback).observe(document.body, { attributeFilter: ["class"] });
  }

  specdec.palette = palette;
  specdec.faint = faint;
  specdec.onTheme = onTheme;
})();
