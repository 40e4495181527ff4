"""Task files of lm-eval: one yaml per task, `data.py` reads the items, `scorers.py` grades code."""
