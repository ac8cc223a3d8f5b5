"""Tree-speculative decoding for any Hugging Face causal language model.

`specdec.engine.SpeculativeEngine` is the door; the `specdec.step.Step` it yields is what everything else consumes.
"""
