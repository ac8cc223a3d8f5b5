"""The list of saved chats in the side bar.

The browser keeps the chats. The server also remembers the latest ones until it ends (`ui.state.Tabs`).

Each chat is an entry of its own in the browser's storage, so two tabs never overwrite each other's, and everything but
opening one (list, rename, delete, export) happens in the page (``assets/sidebar.js``). The component's value is what Python
tells it, ``{"current": id, "chat": record, "left": record}``; its ``select`` event hands in a record to open, ``delete`` tells
the id of one that was deleted.
"""

from __future__ import annotations

from html import escape

import gradio as gr

from ui import panel

SCRIPT = panel.ASSETS / "sidebar.js"
_ON_LOAD = """
const chats = new specdec.SavedChats(element, trigger);
watch('value', () => chats.receive(props.value));
"""


def saved_chats() -> gr.HTML:
    """The list of saved chats as a component."""
    gr.set_static_paths([SCRIPT])
    return gr.HTML(
        value="",
        html_template='<div class="saved-chats"></div>',
        js_on_load=_ON_LOAD,
        head=f'<script src="{escape(panel.address(SCRIPT))}"></script>',
        apply_default_css=False,
        elem_id="saved-chats",
    )
