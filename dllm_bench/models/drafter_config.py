"""What a drafter's config.json says, in the dialects it is published in.

z-lab and SpecForge (`DFlashDraftModel`) nest their keys in `dflash_config`, predict with the masks
only and borrow the target's embedding and head. DeepSpec (`Qwen3DSparkModel`, DFlash and DSpark
alike) has flat keys, predicts with every slot one position on, and carries both tables. The two
are not interchangeable. Gemma's drafters and SpecForge's DSpark are left out. Light to import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.layouts import PublishedConfig, value

HEAD_NAMES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DrafterConfig:
    """What a drafter's config says beyond the sizes of its layers.

    slots: of a block, or steps of a chain; the first `silent` predict nothing; tables: embedding
    and head of the target are in the checkpoint; rank 0: no head of transitions.
    """

    slots: int
    feature_layers: tuple[int, ...]
    target_layers: int
    mask: int = 0
    silent: int = 0
    tables: bool = True
    head: str = "vanilla"
    rank: int = 0
    confidence: bool = False
    confidence_reads_token: bool = True
    chain: bool = False


def z_lab(published: PublishedConfig) -> DrafterConfig:
    """Facts of a z-lab or SpecForge config; newer ones nest the block length too."""
    nested = value(published, "dflash_config")
    if nested.get("projector_type", "dflash") != "dflash":
        raise DllmBenchError(
            f"The drafter's config has projector_type {nested['projector_type']!r}; of this "
            "dialect only DFlash is read, use DeepSpec's checkpoint for DSpark."
        )
    slots = published.get("block_size") or nested.get("block_size")
    return DrafterConfig(
        slots=value({"block_size": slots}, "block_size"),
        feature_layers=tuple(value(nested, "target_layer_ids")),
        target_layers=value(published, "num_target_layers"),
        mask=value(nested, "mask_token_id"),
        silent=1,
        tables=False,
    )


def deep_spec(published: PublishedConfig) -> DrafterConfig:
    """Facts of a DeepSpec config, DFlash where it has no heads."""
    head = published.get("markov_head_type", "vanilla")
    if head not in HEAD_NAMES:
        raise DllmBenchError(
            f"The drafter's config has markov_head_type {head!r}; known are "
            f"{', '.join(HEAD_NAMES)}."
        )
    return DrafterConfig(
        slots=value(published, "block_size"),
        feature_layers=tuple(value(published, "target_layer_ids")),
        target_layers=value(published, "num_target_layers"),
        mask=value(published, "mask_token_id"),
        head=head,
        rank=published.get("markov_rank", 0),
        confidence=bool(published.get("enable_confidence_head", False)),
        confidence_reads_token=bool(published.get("confidence_head_with_markov", True)),
    )


def eagle3(published: PublishedConfig) -> DrafterConfig:
    """Facts of DeepSpec's EAGLE-3 config; the unrolled steps of training are the chain's length."""
    return DrafterConfig(
        slots=value(published, "ttt_length"),
        feature_layers=tuple(value(published, "target_layer_ids")),
        target_layers=value(published, "num_target_layers"),
        chain=True,
    )


READERS: Mapping[str, Callable[[PublishedConfig], DrafterConfig]] = {
    "DFlashDraftModel": z_lab,
    "Qwen3DSparkModel": deep_spec,
    "Qwen3Eagle3Model": eagle3,
}


def architecture(published: PublishedConfig) -> str:
    """The architecture a config names, one of those that are known."""
    named = (published.get("architectures") or ["nothing"])[0]
    if named not in READERS:
        raise DllmBenchError(
            f"The drafter's config.json names the architecture {named!r}; known are "
            f"{', '.join(READERS)}."
        )
    return str(named)


def read_drafter_config(published: PublishedConfig) -> DrafterConfig:
    """The facts of a drafter's config."""
    return READERS[architecture(published)](published)
