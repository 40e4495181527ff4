"""`ModelSpec`: which weights, read how. Plain data with its own checks; nothing is opened here.

What a checkpoint says itself (sizes, ids) is not repeated; what it does not say (how prompts are
written, which attention it was trained with) is. Light to import.
"""

from __future__ import annotations

from dataclasses import dataclass

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.adapters import ADAPTERS

AUTO, NONE = "auto", "none"
CHOICES = {
    "adapter": tuple(ADAPTERS),
    "dtype": ("float32", "bfloat16", "float16", AUTO),
    "attention": ("sdpa", "eager"),
    "attention_form": ("full", "block_causal", "causal"),
    "quantization": (NONE, "w8a8", "fp8"),
    "compile": (NONE, "default", "max"),
}
DEVICES = (AUTO, "cpu", "cuda")


@dataclass(frozen=True)
class ModelSpec:
    """Which weights, read how. `path` and `lora`: a folder, assets/<name>, or a hub id.

    adapter None takes the one the checkpoint's own config names; device and dtype "auto" are a CUDA
    device with bfloat16 where there is one, else the CPU with float32. `attention` is the kernel;
    `attention_form`, `block` and `shifted` say how the weights were trained (None: as the
    architecture usually is). `thinking` goes to the chat template as `enable_thinking`, where it is
    given. `mask_token` is the mask's text, where the config names no id or to
    check the one it names.
    """

    name: str
    path: str
    adapter: str | None = None
    revision: str | None = None
    lora: str | None = None
    lora_revision: str | None = None
    merge_lora: bool = True
    chat: bool = False
    bos: bool = False
    thinking: bool | None = None
    mask_token: str | None = None
    attention_form: str | None = None
    block: int | None = None
    shifted: bool | None = None
    dtype: str = AUTO
    attention: str = "sdpa"
    device: str = AUTO
    quantization: str = NONE
    compile: str = NONE

    def __post_init__(self) -> None:
        for field, known in CHOICES.items():
            found = getattr(self, field)
            if found is not None:
                self._check(field, found, known)
        kind, _, index = self.device.partition(":")
        self._check("device", kind if not index or index.isdigit() else self.device, DEVICES)
        if self.block is not None and (self.attention_form != "block_causal" or self.block < 1):
            raise DllmBenchError(
                f"Model {self.name!r} has block: {self.block} with attention_form: "
                f"{self.attention_form}; a block of 1 or more belongs to block_causal alone."
            )

        if self.quantization != NONE and self.lora is not None and not self.merge_lora:
            raise DllmBenchError(
                f"Model {self.name!r} asks for quantization {self.quantization!r} beside an "
                f"adapter that is not merged; set merge_lora: true."
            )

    def _check(self, field: str, found: str, known: tuple[str, ...]) -> None:
        if found not in known:
            raise DllmBenchError(
                f"Model {self.name!r} asks for {field} {found!r}; choose one of {', '.join(known)}."
            )
