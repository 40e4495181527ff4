"""Task files of lm-eval: one yaml per task, `sources.py` reads the items, `code_scorers.py` grades code."""
