"""`DrafterConfig`: the content of a drafter's config.json, read from each published format.

z-lab and SpecForge (`DFlashDraftModel`, `DFlash2DraftModel`) nest their keys in `dflash_config`;
their drafters predict only at the masked slots and use the target's embedding and head. DeepSpec
(`Qwen3DSparkModel`, for DFlash and DSpark) has flat keys; its drafters predict at every slot, for
the position after it, and carry a copy of embedding and head. Drafters of this project have the
keys of either format and no copy (`target_tables` is true). They may draft a part of the vocabulary
only, as in the original EAGLE-3, whose d2t and t2d are one list of ids here: `draft_token_ids`.
Checkpoints of one format cannot be read as the other. Not supported: targets whose embedding or
head scales its input or output, drafters for Gemma, and SpecForge's DSpark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from dllm_bench.core.declared import CheckedFields, Count, Positive
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.adapters import PublishedConfig, value
from dllm_bench.models.text import library_errors_named

HEAD_NAMES = ("vanilla", "gated", "rnn")
TARGET_TABLES = "target_tables"  # key of a config: whether embedding and head are the target's
DRAFT_IDS = "draft_token_ids"  # key of a config: the draft vocabulary
MAX_LAYERS = 1000  # more take minutes to build, before they are compared with the tensors
wrong_values_named = library_errors_named(
    "The drafter's config has a value of another type or size", "use the published one"
)
"""Decorator of functions that read a config."""


@dataclass(frozen=True)
class DrafterConfig(CheckedFields):
    """Settings of a drafter's config.json other than the sizes of its layers."""

    slots: Positive
    """Slots of a block, the anchor's included; of a chain, the steps it was trained for."""
    feature_layers: tuple[int, ...]
    """Layers of the target whose outputs it reads; -1 is the embedding."""
    target_layers: Positive
    """Number of layers of the target it was trained for."""
    mask: Count = 0
    """Id of the token that is fed at every slot after the anchor."""
    silent: int = 0
    """The first slots, which predict nothing."""
    tables: bool = True
    """Whether the checkpoint holds the target's embedding and head."""
    head: str = "vanilla"
    """Kind of the Markov head, one of `HEAD_NAMES`."""
    rank: Count = 0
    """Rank of the Markov head, or of DFlash 2's path selector; 0: it has neither."""
    confidence: bool = False
    """Whether it has a confidence head."""
    confidence_reads_token: bool = True
    """Whether the confidence head reads the Markov embedding of the previous token."""
    chain: bool = False
    """Whether it is an EAGLE-3 chain instead of a block."""
    windows: tuple[int, ...] = ()
    """Positions that a slot of each layer sees back, including its own; 0 for all. Empty: 0 in
    every layer."""
    causal: tuple[bool, ...] = ()
    """Whether a slot of each layer sees no later one. Empty: it sees all, in every layer."""
    input_scale: float = 1.0
    """Factor of the embeddings of the slots' tokens."""
    output_scale: float = 1.0
    """Factor of the logits, before `softcap`."""
    softcap: float | None = None
    """Logits x are s tanh(x / s) with this s; None: as they are."""
    conv_taps: Count = 0
    """DFlash 2: rows of the convolutions around each sublayer; 0: there are none."""
    conv_group: Positive = 1
    """DFlash 2: channels that share a convolution's correction."""
    candidates: Count = 0
    """DFlash 2: tokens of a slot that its path selector chooses among; 0: it has none."""
    draft_ids: tuple[int, ...] = ()
    """Draft vocabulary: ids of the target's tokens that can be drafted, ascending. Empty: all."""

    @property
    def has_transition_head(self) -> bool:
        """Whether it has a Markov head."""
        return self.rank > 0 and not self.candidates


def read_z_lab(published: PublishedConfig) -> DrafterConfig:
    """Return a z-lab or SpecForge config; newer ones nest the block length too.

    Layers with a sliding window are causal and others are not, unless `is_causal` says it for all;
    `use_sliding_window` false takes their window away.
    """
    nested = value(published, "dflash_config")
    both = {**published, **nested}
    if nested.get("projector_type", "dflash") != "dflash":
        raise DllmBenchError(
            f"The drafter's config has projector_type {nested['projector_type']!r}; in this "
            "format only DFlash is supported, use DeepSpec's checkpoint for DSpark."
        )
    kinds = published.get("layer_types") or [None] * value(published, "num_hidden_layers")
    sliding = [kind == "sliding_attention" for kind in kinds]
    causal, ends = published.get("is_causal"), published.get("use_sliding_window", True)
    return DrafterConfig(
        slots=value(both, "block_size"),
        feature_layers=tuple(value(nested, "target_layer_ids")),
        target_layers=value(published, "num_target_layers"),
        mask=value(nested, "mask_token_id"),
        silent=1,
        tables=not published.get(TARGET_TABLES, True),
        windows=tuple(value(published, "sliding_window") if one and ends else 0 for one in sliding),
        causal=tuple(one if causal is None else causal for one in sliding),
        input_scale=both.get("input_embedding_scale") or 1.0,
        output_scale=both.get("output_multiplier") or 1.0,
        softcap=both.get("final_logit_softcapping") or None,
    )


def read_dflash2(published: PublishedConfig) -> DrafterConfig:
    """Return a z-lab config of DFlash 2."""
    both = {**published, **value(published, "dflash_config")}
    return replace(
        read_z_lab(published),
        conv_taps=value(both, "conv_kernel_size"),
        conv_group=value(both, "conv_group_size"),
        candidates=value(both, "selector_top_k"),
        rank=value(both, "selector_rank"),
    )


def draft_ids(published: PublishedConfig) -> tuple[int, ...]:
    """Return the draft vocabulary of a config; DllmBenchError if its ids are not ascending."""
    ids = tuple(published.get(DRAFT_IDS) or ())
    if any(first >= second for first, second in pairwise((-1, *ids))):
        raise DllmBenchError(
            f"The drafter's {DRAFT_IDS} are no ascending token ids; use the config of its training."
        )
    return ids


def read_deep_spec(published: PublishedConfig) -> DrafterConfig:
    """Return a DeepSpec config of DSpark, or of DFlash if it names no heads."""
    head = published.get("markov_head_type", "vanilla")
    if head not in HEAD_NAMES:
        raise DllmBenchError(
            f"The drafter's config has markov_head_type {head!r}; choose a checkpoint with one of "
            f"{', '.join(HEAD_NAMES)}."
        )
    return DrafterConfig(
        slots=value(published, "block_size"),
        feature_layers=tuple(value(published, "target_layer_ids")),
        target_layers=value(published, "num_target_layers"),
        mask=value(published, "mask_token_id"),
        tables=not published.get(TARGET_TABLES, False),
        head=head,
        rank=published.get("markov_rank", 0),
        confidence=bool(published.get("enable_confidence_head", False)),
        confidence_reads_token=bool(published.get("confidence_head_with_markov", True)),
        draft_ids=draft_ids(published),
    )


def read_eagle3(published: PublishedConfig) -> DrafterConfig:
    """Return a DeepSpec config of EAGLE-3; the chain is as long as training unrolled it
    (`ttt_length`)."""
    chain = {**published, "block_size": value(published, "ttt_length"), "mask_token_id": 0}
    return replace(read_deep_spec(chain), chain=True)


READERS: Mapping[str, Callable[[PublishedConfig], DrafterConfig]] = {
    "DFlashDraftModel": read_z_lab,
    "DFlash2DraftModel": read_dflash2,
    "Qwen3DSparkModel": read_deep_spec,
    "Qwen3Eagle3Model": read_eagle3,
}


def architecture(published: PublishedConfig) -> str:
    """Return the architecture a config names; DllmBenchError if it is not in `READERS`."""
    name = (published.get("architectures") or ["nothing"])[0]
    if name not in READERS:
        raise DllmBenchError(
            f"The drafter's config.json names the architecture {name!r}; choose a drafter with "
            f"one of {', '.join(READERS)}."
        )
    return str(name)


@wrong_values_named
def read_drafter_config(published: PublishedConfig) -> DrafterConfig:
    """Read a drafter's config.json, in the format its architecture calls for."""
    layers = value(published, "num_hidden_layers")
    if not 0 < layers <= MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}")
    config = READERS[architecture(published)](published)
    known = [layer for layer in config.feature_layers if -1 <= layer < config.target_layers]
    fits = list(config.feature_layers) == known and len(config.windows) in (0, layers)
    fits &= value(published, "hidden_size") % config.conv_group == 0
    if not fits or config.mask >= value(published, "vocab_size"):
        raise DllmBenchError(
            f"The drafter's config.json reads layers {list(config.feature_layers)} of "
            f"{config.target_layers}, has {len(config.windows)} layer_types for {layers} layers, "
            f"mask token {config.mask} of {published['vocab_size']} and groups of "
            f"{config.conv_group} of {published['hidden_size']} channels; use the published config."
        )
    return config
