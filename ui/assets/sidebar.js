// SavedChats: the saved chats of this browser. One storage entry a chat; a tab remembers which one it shows.
(() => {
  "use strict";
  const specdec = (window.specdec ??= {});
  const PREFIX = "token-tree-chat:";
  const CURRENT = "token-tree-chat-current";
  const MOST = 100;
  const EMPTY = "Your chats are saved in this browser. The app also keeps the latest ones until you close it.";

  class SavedChats {
    constructor(host, trigger) {
      this.list = host.querySelector(".saved-chats");
      this.trigger = trigger;
      addEventListener("storage", () => this.draw());
      addEventListener("pagehide", keepUnfinished);
      this.list.translate = false;
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

    /** Draw the list, unless a name is being typed or a menu is open: then once that is over. */
    draw() {
      this.late = Boolean(this.list.querySelector(".rename, .menu[open]"));
      if (this.late) return;
      const current = sessionStorage.getItem(CURRENT);
      const rows = all().map((record) => this.row(record, record.id === current));
      const lines = [...room(), rows.length ? "" : EMPTY].filter(Boolean);
      const refocus = this.rememberFocus();
      this.list.replaceChildren(...rows, ...lines.map((textContent) => make("p", { className: "none", textContent })));
      refocus(rows);
    }

    /** How to give the focus back to its row once that is drawn anew; where it is gone, to its neighbour. */
    rememberFocus() {
      const { activeElement } = document;
      const row = this.list.contains(activeElement) ? activeElement.closest(".row") : null;
      if (!row) return () => {};
      const part = activeElement.matches(".open") ? ".open" : "summary";
      const place = [...this.list.children].indexOf(row);
      return (rows) => {
        const next = rows.find((other) => other.dataset.id === row.dataset.id) ?? rows[Math.min(place, rows.length - 1)];
        (next?.querySelector(part) ?? document.querySelector("#new-chat"))?.focus();
      };
    }

    row(record, shown) {
      const open = make("button", { type: "button", className: "open", textContent: record.title || "Untitled", dir: "auto" });
      open.title = new Date(record.updated).toLocaleString();
      if (shown) open.setAttribute("aria-current", "true");
      open.onclick = () => this.trigger("select", record);
      const menu = make("details", { className: "menu" });
      const summary = make("summary", { textContent: "⋯" });
      summary.setAttribute("aria-label", `more about ${record.title}`);
      summary.onclick = () => menu.open || menu.lastChild.replaceWith(this.actions(record, menu)); // before it opens
      menu.append(summary, this.actions(record, menu));
      menu.addEventListener("focusout", (event) => {
        if (!menu.contains(event.relatedTarget)) menu.open = false;
      });
      menu.addEventListener("keydown", (event) => {
        if (event.key !== "Escape" || !menu.open) return;
        event.preventDefault(); // it does not stop the reply, too
        leave(menu);
      });
      menu.addEventListener("toggle", () => {
        if (!menu.open && this.late) this.draw();
      });
      const row = make("div", { className: "row" });
      row.dataset.id = record.id;
      row.append(open, menu);
      return row;
    }

    actions(record, menu) {
      const box = make("div", { className: "actions" });
      const actions = {
        Rename: () => this.rename(record, menu.parentElement),
        "Export as Markdown": () => download(`${fileName(record)}.md`, markdown(record), "text/markdown"),
        "Export as JSON": () => download(`${fileName(record)}.json`, json(record), "application/json"),
      };
      const choose = (act) => () => {
        leave(menu);
        act();
      };
      for (const [name, act] of Object.entries(actions)) box.append(button(name, choose(act)));
      const remove = [button("Keep it", choose(() => {})), button("Delete it", choose(() => this.remove(record)))];
      box.append(button("Delete", () => ask(box, "Delete this chat?", remove)));
      return box;
    }

    rename(record, row) {
      const field = make("input", { className: "rename", value: record.title, maxLength: 120, dir: "auto" });
      field.setAttribute("aria-label", "new name");
      const done = (save) => {
        field.onblur = null;
        const title = field.value.trim();
        if (save && title) keep({ ...(read(record.id) ?? record), title, ownTitle: title });
        field.classList.remove("rename");
        this.draw();
      };
      field.onkeydown = (event) => {
        event.stopPropagation();
        if (event.key !== "Enter" && event.key !== "Escape") return;
        event.preventDefault(); // it does not open the menu, which gets the focus
        done(event.key === "Enter");
      };
      field.onblur = () => setTimeout(() => done(true)); // when the focus is where it goes
      row.replaceChildren(field);
      field.focus();
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

  function button(textContent, onclick) {
    return make("button", { type: "button", textContent, onclick });
  }

  /** Close a menu that has the focus. */
  function leave(menu) {
    menu.querySelector("summary").focus();
    menu.open = false;
  }

  /** Put a question in the place of what a menu offers. */
  function ask(box, question, answers) {
    const offered = [...box.children];
    box.append(make("p", { className: "none", textContent: question }), ...answers);
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", question);
    answers[0].focus(); // before what had the focus goes, or the menu would close
    offered.forEach((entry) => entry.remove());
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

  /** Chats that made room since this page was loaded, and whether there was none for the latest one. */
  let dropped = 0;
  let full = false;

  /** What there is to say about room, in lines. */
  function room() {
    const old = dropped === 1 ? "The oldest chat was" : `The ${dropped} oldest chats were`;
    const most = `at most ${MOST} are kept, fewer where the browser's storage is full.`;
    return [
      dropped ? `${old} deleted to make room: ${most}` : "",
      full ? "This chat is not saved: the browser's storage is full." : "",
    ];
  }

  /** Store a chat; beyond the most that are kept, or where the browser's storage is full, the oldest ones make room. */
  function keep(record) {
    const others = all().filter((other) => other.id !== record.id);
    const text = JSON.stringify({ ...record, updated: Date.now() });
    const drop = (old) => {
      localStorage.removeItem(PREFIX + old.id);
      dropped++;
    };
    others.splice(MOST - 1).forEach(drop);
    for (;;) {
      try {
        localStorage.setItem(PREFIX + record.id, text);
        full = false;
        return;
      } catch {
        full = !others.length;
        if (full) return;
        drop(others.pop());
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

  specdec.SavedChats = SavedChats;
})();
