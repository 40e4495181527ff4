"""`ModelSpec`: which checkpoint to load and how to read it. Plain data that opens no file.

It holds what a checkpoint does not say itself (how prompts are written, which attention the weights
were trained with); sizes and token ids are read from the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dllm_bench.core.declared import Positive
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.registry import RUNTIME

AUTO, NONE = "auto", "none"
CANVAS = "canvas"  # of uniform-state diffusion: causal over the text, full over a canvas after it
MASKLESS = ("causal", CANVAS)  # forms of attention of models that need no mask token
OBJECT = "object"  # adapter of a model that was made elsewhere and is in no file
CHOICES = {
    "adapter": tuple(ADAPTERS),
    "dtype": ("float32", "bfloat16", "float16", AUTO),
    "attention": ("sdpa", "eager"),
    "attention_form": ("full", "block_causal", "causal", CANVAS),
    "quantization": (NONE, "w8a8", "fp8"),
    "compile": (NONE, "default", "max"),
}
DEVICES = (AUTO, "cpu", "cuda")


@dataclass(frozen=True)
class ModelSpec:
    """Which checkpoint to load, and how to read and run it."""

    name: str
    """Name of the model in tables and messages."""
    path: str = field(metadata=RUNTIME)
    """The checkpoint: a folder, assets/<name> (shipped with the package), or a hub id."""
    adapter: str | None = None
    """Name in `ADAPTERS`; None takes the adapter that the checkpoint's config.json calls for."""
    revision: str | None = field(default=None, metadata=RUNTIME)
    """Branch, tag or commit of a hub id; sha256 of the file that `imported/<name>` was made of."""
    lora: str | None = field(default=None, metadata=RUNTIME)
    """A LoRA adapter: a folder, assets/<name>, or a hub id."""
    lora_revision: str | None = field(default=None, metadata=RUNTIME)
    """Branch, tag or commit of the LoRA adapter."""
    merge_lora: bool = True
    """Add the LoRA product to the weights on load; False keeps it as separate layers."""
    chat: bool = False
    """Whether prompts may be chat turns, written by the checkpoint's template."""
    bos: bool = False
    """Whether plain text begins with the BOS token."""
    thinking: bool | None = None
    """Passed to the chat template as `enable_thinking`; None does not pass it."""
    mask_token: str | None = None
    """Text of the mask token, where config.json names no id, or to check the id it names."""
    attention_form: str | None = field(default=None, metadata=RUNTIME)
    """Attention the weights were trained with; None: what the architecture usually has."""
    block: Positive | None = field(default=None, metadata=RUNTIME)
    """Positions of a block the weights were trained with (only for block_causal attention)."""
    shifted: bool | None = None
    """Whether row i predicts position i + 1; None: as the architecture usually does."""
    dtype: str = AUTO
    """Dtype of the weights; "auto": bfloat16 on a CUDA device, float32 on the CPU."""
    attention: str = "sdpa"
    """Attention kernel of transformers."""
    device: str = field(default=AUTO, metadata=RUNTIME)
    """One of "cpu", "cuda" and "cuda:N"; "auto": a CUDA device if there is one, else the CPU."""
    quantization: str = NONE
    """Quantisation of the linear layers (models/acceleration.py)."""
    compile: str = NONE
    """"default": torch.compile (models/acceleration.py); "max": CUDA graphs (the same file)."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) is not None:
                self._check(name, value, choices)
        kind, _, index = self.device.partition(":")
        self._check("device", kind if not index or index.isdigit() else self.device, DEVICES)
        if self.block is not None and (self.attention_form != "block_causal" or self.block < 1):
            raise DllmBenchError(
                f"Model {self.name!r} has block: {self.block} with attention_form: "
                f"{self.attention_form}; only block_causal takes a block, of 1 or more positions."
            )

        if self.quantization != NONE and self.lora is not None and not self.merge_lora:
            raise DllmBenchError(
                f"Model {self.name!r} asks for quantization {self.quantization!r} with a LoRA "
                f"adapter that is not merged; set merge_lora: true."
            )

    def _check(self, name: str, value: str, choices: tuple[str, ...]) -> None:
        if value not in choices:
            raise DllmBenchError(
                f"Model {self.name!r} asks for {name} {value!r}; choose one of "
                f"{', '.join(choices)}."
            )
