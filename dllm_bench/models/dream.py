"""Dream layout: Qwen2 tensor names and config keys one to one, logits shifted by one.

DiffuCoder, dParallel, d3LLM and the D2F versions of Dream are the same layout.
"""

from __future__ import annotations

from typing import ClassVar

from dllm_bench.models.layouts import Standard


class Dream(Standard):
    """`DreamModel` held by `Qwen2ForCausalLM`."""

    model_type = "Dream"
    family = "Qwen2"
    shifted = True
    required: ClassVar = {
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
        "use_mrope": (False,),
        "rope_scaling": (None,),
    }
