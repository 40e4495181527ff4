"""Tensor parallelism: torch's own plans, applied to the transformers module of a denoiser.

Projections to the heads and to the MLP's hidden layer are split by output, those back by input, so
that a layer costs two sums over the processes. `lm_head` is split over the vocabulary and its
logits are gathered; every process holds the whole embedding and all norms, and the K/V of its own
heads. Left out: experts, quantised and compiled models, unmerged adapters, and reading only a share
of a checkpoint (each process reads all of it, then drops the rest).
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import Linear

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.layers import module_layers
from dllm_bench.models.transformer import TransformerDenoiser

BY_OUTPUT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
BY_OUTPUT_MLP = ("mlp.gate_proj", "mlp.up_proj")
BY_INPUT = ("self_attn.o_proj", "mlp.down_proj")


def shard(denoiser: TransformerDenoiser, mesh: DeviceMesh) -> None:
    """Split the module behind `denoiser` over a mesh of one dimension, in place."""
    check(denoiser, mesh.size())
    split = (*BY_OUTPUT, *BY_OUTPUT_MLP)
    layers = "model.layers.*."
    plan: dict[str, Any] = {f"{layers}{name}": ColwiseParallel() for name in split}
    plan |= {f"{layers}{name}": RowwiseParallel() for name in BY_INPUT}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    denoiser.layers = module_layers(denoiser.module)  # the collectives are in the module's hooks
    parallelize_module(denoiser.module, mesh, plan, src_data_rank=None)
    denoiser.parts = mesh.size()
    denoiser.chooses_rows = False  # each process would choose by the V of its own heads


def check(denoiser: TransformerDenoiser, parts: int) -> None:
    """Raise DllmBenchError for a model that cannot be split."""
    module = denoiser.module
    if type(denoiser) is not TransformerDenoiser:
        raise DllmBenchError(
            f"Tensor parallelism over {parts} processes cannot split compiled layers; set "
            "hardware.compile=none."
        )
    names = (*BY_OUTPUT, *BY_OUTPUT_MLP, *BY_INPUT)
    for layer in module.model.layers:
        linear = {name for name, part in layer.named_modules() if type(part) is Linear}
        if not linear.issuperset(names):
            raise DllmBenchError(
                f"Tensor parallelism splits plain linear layers, and this model "
                f"({type(module).__name__}) has none called "
                f"{', '.join(sorted(set(names) - linear))}; use a dense model, not quantised, "
                "with its adapter merged."
            )
    config = module.config
    heads = {config.num_attention_heads, config.num_key_value_heads}
    if any(count % parts for count in heads):
        raise DllmBenchError(
            f"Tensor parallelism over {parts} processes splits the heads evenly, and this model "
            f"has {config.num_attention_heads} heads and {config.num_key_value_heads} K/V heads; "
            "choose a divisor of both."
        )
