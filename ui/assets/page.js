// The page's own keys, its light and dark, and clean copies. Works by delegation, so it needs no component to be there yet.
(() => {
  "use strict";
  const THEME = "token-tree-chat-theme";

  // Gradio's page-wide status tracker never leaves its first state: it asks for a frame 60 times a second, to count seconds that
  // nobody sees. Four times a second will do; the processor time saved is the engine's.
  const nextFrame = window.requestAnimationFrame.bind(window);
  const countsSeconds = (callback) => /performance\.now\(\)-.*\/1e3/.test(String(callback));
  window.requestAnimationFrame = (callback) =>
    countsSeconds(callback) ? setTimeout(() => callback(performance.now()), 250) : nextFrame(callback);

  // Keys that belong to an input method (Enter and Escape choose among its suggestions) reach no handler of this page.
  const leaveToInputMethod = (event) => (event.isComposing || event.keyCode === 229) && event.stopImmediatePropagation();
  for (const type of ["keydown", "keypress", "keyup"]) addEventListener(type, leaveToInputMethod, true);

  // What is copied is the text itself: without the word joiners that keep it inert, and without our lines below it.
  // A message that was typed has character references in it (see ui/markdown.py).
  const disarmed = (text) => text.replace(/(^|<|!|(?:```|~~~)[ \t]*)\u2060/g, "$1").replace(/\s*\u2063[^\u2063]*\u2063/g, "");
  const itself = (text) => disarmed(text).replace(/&#0(\d{4});/g, (reference, code) => String.fromCharCode(code));

  // What is selected is copied as it is seen, without what is invisible in it; in a field it is the text itself.
  const seen = (text) => text.replace(/[\u2060\u2063]/g, "");

  function typing(target) {
    return target.closest?.("input, textarea, select, [contenteditable]");
  }

  /** Whether Escape closes something else: a menu, details, a list of choices. */
  function isTaken(event) {
    return event.defaultPrevented || event.target.closest?.("select, [role=combobox]");
  }

  /** The one of these that is in sight: of the chat, or of Compare. */
  function inSight(selector) {
    return [...document.querySelectorAll(selector)].find((found) => found.offsetParent);
  }

  /** Press Stop. Right after a message is sent there is none yet: wait for it until then. */
  function stop(until) {
    const button = inSight("#box .stop-button, #compare-stop");
    if (button) button.click();
    else if (performance.now() < until) requestAnimationFrame(() => stop(until));
  }

  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !isTaken(event)) stop(performance.now() + 400);
    if (event.key === "/" && !typing(event.target) && !event.ctrlKey && !event.metaKey && !event.altKey) {
      inSight("#box textarea, #compare-prompt textarea")?.focus();
      event.preventDefault();
    }
  });

  // Gradio gives every radio button a name of its own, so that a browser's arrow keys find no group to move in.
  const ARROWS = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 };
  addEventListener("keydown", (event) => {
    const step = ARROWS[event.key];
    if (!step || event.target.type !== "radio") return;
    const radios = [...event.target.closest(".block").querySelectorAll("[type=radio]")];
    const next = radios[(radios.indexOf(event.target) + step + radios.length) % radios.length];
    event.preventDefault();
    next.focus();
    next.click();
  });

  /** Light or dark as chosen here, whatever Gradio or the system say. */
  function applyTheme() {
    const chosen = localStorage.getItem(THEME);
    if (chosen) document.body.classList.toggle("dark", chosen === "dark");
  }

  addEventListener("click", (event) => {
    if (!event.target.closest?.("[data-action=theme]")) return;
    localStorage.setItem(THEME, document.body.classList.contains("dark") ? "light" : "dark");
    applyTheme();
  });

  function begin() {
    new MutationObserver(applyTheme).observe(document.body, { attributeFilter: ["class"] });
    applyTheme();
    const outsidePanel = ({ target }) => !target.closest?.(".specdec");
    new MutationObserver((changes) => changes.some(outsidePanel) && attend()).observe(document.body, {
      childList: true,
      subtree: true,
    });
    attend();
  }

  /** What Gradio draws, brought into the form that this page wants. */
  function attend() {
    // Text runs in its own direction. The first letter decides, so that a line stays where it began.
    for (const text of document.querySelectorAll("#chatbot [dir=ltr], textarea[dir=ltr], input[dir=ltr]")) text.dir = "auto";
    for (const code of document.querySelectorAll("#chatbot :is(pre, code):not([translate])")) code.translate = false;
    for (const field of document.querySelectorAll("#chatbot textarea")) editAsTyped(field);
    nameRetry();
    follow();
  }

  /** The field in which a message is edited holds the text itself. */
  function editAsTyped(field) {
    if (field.value === itself(field.value)) return;
    field.value = itself(field.value);
    field.dispatchEvent(new Event("input", { bubbles: true }));
  }

  /** The Retry button says why its text must come out the same. Closed settings are not in the page: what is set is kept here. */
  const chosen = { temperature: "0", seed: "" }; // as in ui/settings.py
  function nameRetry() {
    const greedy = !(Number(chosen.temperature) > 0);
    const why = greedy ? "the temperature is 0" : chosen.seed !== "" ? "the seed is set" : "";
    const name = why ? `Retry (gives the same text: ${why})` : "Retry";
    for (const button of document.querySelectorAll("#chatbot button[title^=Retry]")) {
      if (button.title === name) continue;
      button.title = name;
      button.setAttribute("aria-label", name);
    }
  }
  addEventListener("input", ({ target }) => {
    const field = target.closest?.("#temperature, #seed");
    if (!field) return;
    chosen[field.id] = target.value;
    nameRetry();
  });

  // While a reply is written the chat is busy, and a browser's translation leaves the reply alone. Once it is done, it is announced.
  const said = Object.assign(document.createElement("p"), { id: "said", ariaLive: "polite", translate: false });
  const messagesOf = (row) => [...(row?.querySelectorAll("[data-testid=bot]") ?? [])].map((part) => part.innerText).join("\n");
  let asked = null;
  function follow() {
    const log = document.querySelector("#chatbot [role=log]");
    if (!log) return;
    if (!said.isConnected) document.body.append(said);
    const last = (selector) => [...log.querySelectorAll(selector)].at(-1);
    const question = last(".user-row")?.innerText;
    const writing = Boolean(document.querySelector("#box .stop-button"));
    const was = log.ariaBusy === "true";
    log.ariaLive = "off";
    if (log.ariaBusy !== String(writing)) log.ariaBusy = String(writing);
    for (const row of log.querySelectorAll(".bot-row")) {
      const translate = !writing || row !== last(".bot-row");
      if (row.translate !== translate) row.translate = translate;
    }
    if (writing) [asked, said.textContent] = [question, ""];
    else if (was && question === asked) said.textContent = seen(messagesOf(last(".bot-row")));
  }

  if (document.body) begin();
  else addEventListener("DOMContentLoaded", begin);

  // A link in the chat leads to the web and nowhere else, whatever the model wrote as its address.
  addEventListener(
    "click",
    (event) => {
      const link = event.target.closest?.("#chatbot a");
      if (link && !/^https?:$/.test(link.protocol)) event.preventDefault();
    },
    true,
  );

  const clipboard = navigator.clipboard;
  if (clipboard) {
    const write = clipboard.writeText.bind(clipboard);
    clipboard.writeText = (text) => write(itself(text));
  }

  addEventListener("copy", (event) => {
    const { target, clipboardData } = event;
    const selection = getSelection();
    const field = "selectionStart" in target;
    const text = field ? target.value.slice(target.selectionStart, target.selectionEnd) : String(selection);
    if (!/[\u2060\u2063]/.test(text)) return;
    clipboardData.setData("text/plain", field ? itself(text) : seen(text));
    if (!field) {
      const copy = document.createElement("div");
      copy.append(selection.getRangeAt(0).cloneContents());
      clipboardData.setData("text/html", seen(copy.innerHTML));
    }
    event.preventDefault();
  });
})();
