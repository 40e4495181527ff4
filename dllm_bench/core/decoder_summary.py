"""Facts of a decoder that can be known without decoding; imports no torch, unlike the decoders."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderSummary:
    """Facts of a decoder for those who estimate, check or show a run without decoding anything."""

    branches: int = 1  # most candidate states in one forward
    block: int | None = None  # positions of a block; None: the whole generation, or no blocks
    one_token_per_forward: bool = False  # by construction, whatever the text is
    caches: bool = True  # whether a forward can read keys and values of earlier ones
    explores: bool = False  # whether a branch other than the base can continue
    stops_on_end_token: bool = False  # whether a committed end token closes or finishes branches
    attention: str | None = None  # "full" or "block_causal"; None: not the masked loop
    uses_seed: bool = False  # whether the request's seed can change a token
    warning: str | None = None  # what the pieces do together that is known to cost score
    drafts: bool = False  # whether a drafter proposes tokens and the model verifies them
