// Shelf: the saved chats of this browser. One storage entry a chat; a tab remembers which one it shows.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const PREFIX = "token-tree-chat:";
  const CURRENT = "token-tree-chat-current";
  const MOST = 100;
  const EMPTY = "Chats are saved in this browser. The app remembers the latest ones until it ends.";

  class Shelf {
    constructor(host, trigger) {
      this.list = host.querySelector(".shelf");
      this.trigger = trigger;
      addEventListener("storage", () => this.draw());
      addEventListener("pagehide", keepUnfinished);
      this.draw();
      const record = read(sessionStorage.getItem(CURRENT));
      if (record) trigger("select", record);
    }

    /** Python's word: which chat this tab shows, how it stands now, and the one that it showed before. */
    receive(value) {
      if (!value) return;
      const { current, chat, left } = JSON.parse(value);
      sessionStorage.setItem(CURRENT, current);
      if (left && unfinished(read(left.id))) keepNamed(left);
      if (chat) keepNamed(chat);
      else localStorage.removeItem(PREFIX + current);
      this.draw();
    }

    draw() {
      const current = sessionStorage.getItem(CURRENT);
      const rows = all().map((record) => this.row(record, record.id === current));
      const empty = make("p", { className: "none", textContent: EMPTY });
      this.list.replaceChildren(...(rows.length ? rows : [empty]));
    }

    row(record, shown) {
      const open = make("button", { type: "button", className: "open", textContent: record.title || "Untitled", dir: "auto" });
      open.title = new Date(record.updated).toLocaleString();
      if (shown) open.setAttribute("aria-current", "true");
      open.onclick = () => this.trigger("select", record);
      const menu = make("details", { className: "menu" });
      const summary = make("summary", { textContent: "⋯" });
      summary.setAttribute("aria-label", `more about ${record.title}`);
      menu.append(summary, this.actions(record, menu));
      menu.addEventListener("focusout", (event) => {
        if (!menu.contains(event.relatedTarget)) menu.open = false;
      });
      const row = make("div", { className: "row" });
      row.append(open, menu);
      return row;
    }

    actions(record, menu) {
      const box = make("div", { className: "actions" });
      const actions = {
        Rename: () => this.rename(record, menu.parentElement),
        "Export as Markdown": () => download(`${fileName(record)}.md`, markdown(record), "text/markdown"),
        "Export as JSON": () => download(`${fileName(record)}.json`, json(record), "application/json"),
        Delete: () => this.remove(record),
      };
      for (const [name, act] of Object.entries(actions)) {
        const button = make("button", { type: "button", textContent: name });
        button.onclick = () => {
          menu.open = false;
          act();
        };
        box.append(button);
      }
      return box;
    }

    rename(record, row) {
      const field = make("input", { className: "rename", value: record.title, maxLength: 120 });
      field.setAttribute("aria-label", "new name");
      const done = (save) => {
        field.onblur = null;
        const title = field.value.trim();
        if (save && title) keep({ ...(read(record.id) ?? record), title, ownTitle: title });
        this.draw();
      };
      field.onkeydown = (event) => {
        if (event.key === "Enter") done(true);
        if (event.key === "Escape") done(false);
        event.stopPropagation();
      };
      field.onblur = () => done(true);
      row.replaceChildren(field);
      field.select();
    }

    remove(record) {
      localStorage.removeItem(PREFIX + record.id);
      this.trigger("delete", { id: record.id });
      this.draw();
    }
  }

  function make(tag, properties) {
    return Object.assign(document.createElement(tag), properties);
  }

  function read(id) {
    try {
      return id ? JSON.parse(localStorage.getItem(PREFIX + id)) : null;
    } catch {
      return null;
    }
  }

  /** Every saved chat, the latest first. */
  function all() {
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    const records = keys.map((key) => read(key.slice(PREFIX.length))).filter((record) => record?.messages);
    return records.sort((a, b) => b.updated - a.updated);
  }

  /** Store a chat; where the browser's storage is full the oldest ones make room. */
  function keep(record) {
    const others = all().filter((other) => other.id !== record.id);
    const text = JSON.stringify({ ...record, updated: Date.now() });
    for (const old of others.splice(MOST - 1)) localStorage.removeItem(PREFIX + old.id);
    for (;;) {
      try {
        return localStorage.setItem(PREFIX + record.id, text);
      } catch {
        const oldest = others.pop();
        if (!oldest) return undefined;
        localStorage.removeItem(PREFIX + oldest.id);
      }
    }
  }

  /** Store a chat as Python knows it, under the name that it was given here. */
  function keepNamed(chat) {
    const ownTitle = read(chat.id)?.ownTitle;
    keep({ ...chat, title: ownTitle ?? chat.title, ownTitle });
  }

  /** Whether a chat was stored when its last reply had only begun. */
  function unfinished(record) {
    return record?.messages?.at(-1)?.state === "writing";
  }

  /** The page goes away: of a reply that is still written, the panel knows the text. */
  function keepUnfinished() {
    const record = read(sessionStorage.getItem(CURRENT));
    const live = document.querySelector("#specdec-panel .specdec-host")?.panel?.feed.live;
    if (!live || !unfinished(record)) return;
    record.messages.at(-1).text = live.toTrace().text;
    keep(record);
  }

  function fileName(record) {
    return (
      record.title
        .replace(/[^\p{L}\p{N} _-]+/gu, "")
        .trim()
        .slice(0, 60) || "chat"
    );
  }

  /** Without the id: whoever knows it can open the chat for as long as the server remembers it. */
  function json(record) {
    return JSON.stringify({ ...record, id: undefined }, null, 2);
  }

  function markdown(record) {
    const parts = record.messages.map(({ role, text }) => `**${role === "user" ? "You" : "Assistant"}**\n\n${text}`);
    return `# ${record.title}\n\n${parts.join("\n\n---\n\n")}\n`;
  }

  function download(name, text, type) {
    const url = URL.createObjectURL(new Blob([text], { type }));
    make("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  specdec.Shelf = Shelf;
})();
