"""Options to score by likelihood: from texts to tokens, and from likelihoods to a stored text.

A context and its continuation are encoded as LLaDA and lm-eval do: together, so that the
continuation's tokens are those after the context's, with the context's last spaces counted as the
continuation's. A decoder's likelihoods are stored as the sample's text, a line of JSON, so that
grading needs no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from dllm_bench.core.benchmark import Encode, Turns
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Likelihood, Option, Request


def option_of(context: str | Turns, continuation: str, encode: Encode) -> Option:
    """Return the tokens of a continuation and of its context, encoded together.

    DllmBenchError if a chat template renders the begun answer differently from a new one.
    """
    if isinstance(context, str):
        bare = context.rstrip()
        whole, before = encode(context + continuation), encode(bare)
        return Option(tuple(before), tuple(whole[len(before) :]))
    begun = context[-1]["content"] if context[-1]["role"] == "assistant" else ""
    turns = list(context[:-1] if begun else context)
    answer = {"role": "assistant", "content": begun + continuation}
    whole, before = encode([*turns, answer]), encode(context)
    if whole[: len(before)] != before:
        raise DllmBenchError(
            f"The chat template writes a begun answer ({continuation[:40]!r}) in another way than "
            "the start of one, so its likelihood cannot be told; use plain prompts."
        )
    return Option(tuple(before), tuple(whole[len(before) :]))


def request_of(name: str, options: Sequence[Option], prompt: str = "") -> Request:
    """Return the request that asks for the likelihoods of options, as long as its longest
    option."""
    longest = max(options, key=lambda option: len(option.prompt_ids) + len(option.ids))
    most = max(len(option.ids) for option in options)
    ids = longest.prompt_ids or longest.ids
    return Request(name, ids, max(most, 1), (), prompt, options=tuple(options))


def text_of(likelihoods: Sequence[Likelihood]) -> str:
    """Return the stored text of likelihoods."""
    return json.dumps({"likelihoods": [list(likelihood) for likelihood in likelihoods]})


def likelihoods_of(text: str) -> list[Likelihood]:
    """Invert `text_of`; ValueError for another text."""
    try:
        rows = json.loads(text)["likelihoods"]
        found = [Likelihood(float(nats), float(error), bool(g)) for nats, error, g in rows]
    except (TypeError, KeyError) as error:
        raise ValueError(f"no likelihoods of options: {error}") from error
    if not found:
        raise ValueError("likelihoods of no options")
    return found
