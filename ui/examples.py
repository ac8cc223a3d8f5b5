"""Ready-made prompts: for some a draft tree helps a lot, for others little."""

from __future__ import annotations

from dataclasses import dataclass

_PARAGRAPH = (
    "The ferry leaves the harbour at half past six in the morning and reaches the island at nine. On board there is a small "
    "cafe that sells coffee, tea and sandwiches. Passengers who bring a bicycle pay two euros more. In winter the ferry does "
    "not run on Sundays, and when the wind is strong the captain may cancel the trip at short notice."
)
_CODE = """def average(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)

def largest(values):
    best = values[0]
    for value in values:
        if value > best:
            best = value
    return best"""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, and what to expect of a draft tree on it."""

    title: str
    expectation: str
    prompt: str


EXAMPLES = (
    Example(
        "Rewrite a paragraph",
        "Much is copied: trees help most",
        f"Rewrite this paragraph, but change the ferry to a bus and keep everything else:\n\n{_PARAGRAPH}",
    ),
    Example(
        "Edit some code",
        "Much is copied: trees help most",
        f"Rename the parameter `values` to `numbers` in this code and change nothing else:\n\n```python\n{_CODE}\n```",
    ),
    Example(
        "Make a list",
        "A pattern repeats: trees help",
        "List the months of the year, one a line, each with the number of its days.",
    ),
    Example(
        "Translate",
        "Little repetition: trees help less",
        "Translate into French: Good morning, where is the train station, please? The train leaves in ten minutes.",
    ),
    Example(
        "Tell a story",
        "Nothing to copy: trees help least",
        "Tell a short story about a lighthouse keeper who finds a letter.",
    ),
)
