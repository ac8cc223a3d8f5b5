"""The benchmark: plain, linear and tree decoding beside transformers' own generate. Run ``python -m specdec.benchmark``."""
