"""Record a trace: ``python -m ui.record``. Without arguments it re-records the example that the page shows at first."""

from __future__ import annotations

import argparse
from pathlib import Path

from specdec.devices import dtype_name
from specdec.engine import SpeculativeEngine
from ui import panel
from ui.trace import Recorder, save_trace

PROMPT = """Turn this recipe into a numbered list of steps:

Heat the water until it boils. Grind the coffee beans. Pour the hot water slowly over the ground coffee. \
Let the coffee drip into the cup. Add milk and sugar to the cup. Stir the coffee and serve it hot."""


def main() -> None:
    """Stream one greedy reply with details and write it down."""
    parser = argparse.ArgumentParser(prog="python -m ui.record", description=main.__doc__)
    parser.add_argument("--model", help="hub id, local folder or .gguf file (default: the embedded model)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--budget", type=int, default=24)
    parser.add_argument("--out", type=Path, default=panel.EXAMPLE)
    options = parser.parse_args()

    engine = SpeculativeEngine(options.model)
    prompt = [{"role": "user", "content": options.prompt}]
    settings = {"decoding": "tree", "budget": options.budget, "max_new_tokens": options.max_new_tokens}
    model = {
        "name": Path(engine.name).name,
        "dtype": dtype_name(engine.model.dtype),
        "device": str(engine.target.device),
    }
    recorder = Recorder(model, settings, prompt, engine.token_texts)
    for step in engine.stream(prompt, details=True, do_sample=False, **settings):
        recorder.add(step)
    save_trace(recorder.trace(), options.out)
    figures = recorder.stats.to_json()
    print(f"{options.out}: {figures['passes']} steps, {figures['tokens']} tokens, {options.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
