"""Training of parts that users add to a model: filters, drafters, step profiles, temperatures.

Here are the kinds of drafters, and the benchmarks that training draws prompts from unless others
are named. Importing them is cheap, so that help and mistakes are printed before torch is imported.
"""

from __future__ import annotations

KIND_OF_HEAD = {  # of DSpark and DFlash 2; "" for none
    "": "dflash",
    "vanilla": "dspark-markov",
    "gated": "dspark-gated",
    "rnn": "dspark-rnn",
    "selector": "dflash2",
}
CHAIN = "eagle3"
DRAFTER_KINDS = (*KIND_OF_HEAD.values(), CHAIN)
DRAFTER_BENCHMARKS = ("minigsm_free", "minicode_free")
FILTER_BENCHMARKS = ("minigsm", "minicode", "minimath")
