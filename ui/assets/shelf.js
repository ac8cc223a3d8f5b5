// Shelf: the saved chats of this browser. One storage entry a chat; a tab remembers which one it shows.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const PREFIX = "token-tree-chat:";
  const CURRENT = "token-tree-chat-current";
  const MOST = 100;

  class Shelf {
    constructor(host, trigger) {
      this.list = host.querySelector(".shelf");
      this.trigger = trigger;
      addEventListener("storage", () => this.draw());
      this.draw();
      const record = read(sessionStorage.getItem(CURRENT));
      if (record) trigger("select", record);
    }

    /** Python's word: which chat this tab shows, and how it stands now. */
    receive(value) {
      if (!value) return;
      const { current, chat } = JSON.parse(value);
      if (current) sessionStorage.setItem(CURRENT, current);
      else sessionStorage.removeItem(CURRENT);
      if (chat) keep({ ...chat, title: read(chat.id)?.ownTitle ?? chat.title, ownTitle: read(chat.id)?.ownTitle });
      else if (current) localStorage.removeItem(PREFIX + current);
      this.draw();
    }

    draw() {
      const current = sessionStorage.getItem(CURRENT);
      const rows = all().map((record) => this.row(record, record.id === current));
      const empty = make("p", { className: "none", textContent: "Chats are kept here, in this browser only." });
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
      menu.append(summary, this.actions(record, menu, shown));
      menu.addEventListener("focusout", (event) => {
        if (!menu.contains(event.relatedTarget)) menu.open = false;
      });
      const row = make("div", { className: "row" });
      row.append(open, menu);
      return row;
    }

    actions(record, menu, shown) {
      const box = make("div", { className: "actions" });
      const actions = {
        Rename: () => this.rename(record, menu.parentElement),
        "Export as Markdown": () => download(`${fileName(record)}.md`, markdown(record), "text/markdown"),
        "Export as JSON": () => download(`${fileName(record)}.json`, JSON.stringify(record, null, 2), "application/json"),
        Delete: () => this.remove(record, shown),
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

    remove(record, shown) {
      localStorage.removeItem(PREFIX + record.id);
      if (shown) this.trigger("clear");
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

  function fileName(record) {
    return (
      record.title
        .replace(/[^\p{L}\p{N} _-]+/gu, "")
        .trim()
        .slice(0, 60) || "chat"
    );
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
