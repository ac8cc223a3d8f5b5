"""Ready-made prompts: some where a draft tree helps much, some where it cannot."""

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
        "much is copied: trees shine",
        f"Rewrite this paragraph, but change the ferry to a bus and keep everything else:\n\n{_PARAGRAPH}",
    ),
    Example(
        "Edit some code",
        "much is copied: trees shine",
        f"Rename the parameter `values` to `numbers` in this code and change nothing else:\n\n```python\n{_CODE}\n```",
    ),
    Example(
        "Make a list",
        "a pattern repeats: trees help",
        "List the months of the year, one a line, each with the number of its days.",
    ),
    Example(
        "Translate",
        "few words return: trees help less",
        "Translate into French: Good morning, where is the train station, please? The train leaves in ten minutes.",
    ),
    Example(
        "Tell a story",
        "nothing to copy: trees help least",
        "Tell a short story about a lighthouse keeper who finds a letter.",
    ),
)
