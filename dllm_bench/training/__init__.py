"""Training of parts that users add to a model: filters, drafters, step profiles, temperatures.

Here are the kinds of drafters, and the benchmarks that training draws prompts from unless others
are named. Importing them is cheap, so that help and mistakes are printed before torch is imported.
"""

from __future__ import annotations

DRAFTER_KINDS = ("dflash", "dspark-markov", "dspark-gated", "dspark-rnn", "dflash2", "eagle3")
DRAFTER_BENCHMARKS = ("minigsm_free", "minicode_free")
FILTER_BENCHMARKS = ("minigsm", "minicode", "minimath")
