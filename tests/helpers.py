"""Tiny random checkpoints in the published layouts, for tests that need a model but no data.

`tiny_checkpoint` writes a whole folder (config, safetensors, tokenizer), `shard` splits its weights
as large checkpoints are, `tiny_denoiser` skips the disk. Weights are scaled so that top-1
probabilities spread over (0, 1). `load_denoiser` reads a checkpoint folder. Gemma's layout is
written by transformers itself (tests/unit/models).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm_bench import paths, registry
from dllm_bench.api import compose as composing
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.request import Generation, SpecialTokens
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.checkpoint import published_shapes
from dllm_bench.models.load import build_module, load_model
from dllm_bench.models.spec import ModelSpec
from dllm_bench.models.transformer import TransformerDenoiser

VOCAB, WIDTH, LAYERS, HEADS, MLP, LENGTH = 96, 32, 2, 4, 48, 512
NAMES = ("<|mask|>", "<|endoftext|>", "<|pad|>", "<|bos|>", "<|eot|>")  # the vocabulary's last ids
IDS = {name: VOCAB - 1 - i for i, name in enumerate(NAMES)}
ROLES = dict(zip(("mask", "eos", "pad", "bos", "eot"), IDS.values(), strict=True))
TEMPLATE = "{% for m in messages %}<|bos|>{{ m['content'] }}<|eot|>{% endfor %}"

STANDARD: dict[str, Any] = {  # the keys transformers itself uses, base in the old spelling
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "intermediate_size": MLP,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": LENGTH,
    "vocab_size": VOCAB,
}
QWEN2 = {**STANDARD, "use_sliding_window": False}
WIDE = {**STANDARD, "head_dim": 16, "attention_bias": False}  # wider than hidden_size / heads
SDAR = {**WIDE, "use_sliding_window": False}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "llada": {
        "model_type": "llada",
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "d_model": WIDTH,
        "n_layers": LAYERS,
        **dict.fromkeys(("n_heads", "n_kv_heads"), HEADS),
        "mlp_hidden_size": MLP,
        "rope": True,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        **dict.fromkeys(("weight_tying", "include_qkv_bias", "include_bias"), False),
        "max_sequence_length": LENGTH,
        **dict.fromkeys(("vocab_size", "embedding_size"), VOCAB),
    },
    "dream": {**QWEN2, "model_type": "Dream"},
    "fast_dllm_v2": {**QWEN2, "model_type": "Fast_dLLM_Qwen", "bd_size": 32},
    "sdar": {**SDAR, "model_type": "sdar"},
    "llada_moe": {
        **{key: value for key, value in STANDARD.items() if key != "intermediate_size"},
        "model_type": "llada",
        "architectures": ["LLaDAMoEModelLM"],
        "dense_intermediate_size": MLP,
        "expert_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_layer_freq": [1] * LAYERS,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "qk_layernorm": True,
        "partial_rotary_factor": 1.0,
        **dict.fromkeys(("norm_topk_prob", "shared_expert_intermediate_size", "clip_qkv")),
        "num_key_value_heads": HEADS,
    },
    "llada2": {
        **STANDARD,
        "model_type": "llada2_moe",
        **EXPERTS,
        "head_dim": 16,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        **dict.fromkeys(("use_qkv_bias", "use_bias", "norm_head"), False),
    },
    "sdar_moe": {
        **SDAR,
        **EXPERTS,
        "model_type": "sdar_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "wedlm": {**SDAR, "model_type": "wedlm", "qk_norm": True},
    "nemotron_diffusion": {
        **WIDE,
        "model_type": "nemotron_labs_diffusion",
        "mlp_bias": False,
        "sliding_window": None,
        "dlm_paradigm": "bidirectional",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": STANDARD["rope_theta"],
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 1024,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen2": {**QWEN2, "model_type": "qwen2"},
    "qwen3": {**WIDE, "model_type": "qwen3"},
    "llama": {**STANDARD, "model_type": "llama", "attention_bias": False, "mlp_bias": False},
}


DEVICE = os.environ.get("DLLM_BENCH_TEST_DEVICE", "cpu")
"""Of the golden traces: `make test-gpu` sets cuda."""


def load_denoiser(folder: Path) -> TransformerDenoiser:
    """Return the float32 denoiser of a checkpoint folder, on `DEVICE`."""
    spec = ModelSpec(folder.name, str(folder), dtype="float32", device=DEVICE)
    denoiser = load_model(spec).denoiser
    assert isinstance(denoiser, TransformerDenoiser)
    return denoiser


def tiny_config(layout: str, **changes: Any) -> dict[str, Any]:
    """Return a published config.json of a tiny model."""
    ids = {f"{role}_token_id": ROLES[role] for role in ("mask", "eos", "pad", "bos")}
    return CONFIGS[layout] | ids | changes


def tiny_weights(module: torch.nn.Module, seed: int) -> dict[str, Tensor]:
    """Random weights under the module's names."""
    generator, state = torch.Generator().manual_seed(seed), module.state_dict()
    return {name: _random(name, tensor, generator) for name, tensor in state.items()}


def _random(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(like.shape, generator=generator)
    if like.dim() == 1:
        return 0.3 * noise if name.endswith("bias") else 1 + 0.1 * noise
    if "embed_tokens" in name:
        return 4 * noise
    return noise * (2.5 if "lm_head" in name else 1.6) / like.shape[1] ** 0.5


def forget_composed() -> None:
    """Let settings be composed and plug-ins be found anew."""
    for cached in (
        paths.plugin_folders,
        registry.load_plugins,
        composing.compose_groups,
        composing.merge_groups,
        composing.parse_value_override,
    ):
        cached.cache_clear()


def tiny_checkpoint(layout: str, path: Path, seed: int, **changes: Any) -> Path:
    """Write a checkpoint folder of `layout` (see `CONFIGS`); `changes` go into config.json."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    config = tiny_config(layout, **changes)
    (path / "config.json").write_text(json.dumps(config))
    module = build_module(ADAPTERS[layout], config, "sdpa")
    save_file(publish(layout, tiny_weights(module, seed)), path / "model.safetensors")
    tiny_tokenizer().save_pretrained(str(path))
    return path


def publish(layout: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under the module's names -> the tensors of the published checkpoint."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    expected = published_shapes(ADAPTERS[layout], shapes)
    tensors = {name: torch.empty(shape) for name, shape in expected.items()}
    for name, tensor in weights.items():
        for part in ADAPTERS[layout].parts(name, shapes):
            tensors[part.name][slice(*(part.rows or (None,)))] = tensor[part.place]
    return tensors


def shard(folder: Path) -> list[Path]:
    """Split a folder's model.safetensors into two files of an index; returns the files."""
    from safetensors.torch import load_file, save_file

    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [folder / "a.safetensors", folder / "b.safetensors"]
    where: dict[str, str] = {}
    for i, file in enumerate(files):
        part = sorted(whole)[i :: len(files)]
        save_file({name: whole[name] for name in part}, file)
        where |= dict.fromkeys(part, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return files


def tiny_tokenizer() -> Any:
    """Words w0, w1, ... and the special tokens, with a chat template.

    Like many published tokenizers it puts a BOS before a text unless told not to.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCAB - len(NAMES))} | IDS
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    mask, eos, pad, bos, _ = NAMES
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, IDS[bos])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, mask_token=mask, eos_token=eos, pad_token=pad, bos_token=bos
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_denoiser(
    layout: str, seed: int, attention: str = "sdpa", **changes: Any
) -> TransformerDenoiser:
    """Return a random float32 model of `layout` in memory; `changes` go into its config."""
    adapter = ADAPTERS[layout]
    module = build_module(adapter, tiny_config(layout, **changes), attention)
    module.load_state_dict(tiny_weights(module, seed))
    special = SpecialTokens(**ROLES)
    return TransformerDenoiser(module, special, adapter.shifted, attention_form=adapter.attention)


def whole_forward(model: TransformerDenoiser, tokens_KL: Tensor) -> Tensor:
    """Return logits of every position: full attention, nothing cached."""
    length = tokens_KL.shape[1]
    plan = ForwardPlan(ForwardKind.DENOISE, (0, length), (0, length), (0, 0))
    return model.forward(tokens_KL, plan, model.new_cache(length))


def fed_causally(
    model: TransformerDenoiser, ids: Sequence[int], feature_layers: tuple[int, ...] = ()
) -> tuple[Tensor, Any]:
    """Return the logits (1, L, V) of the tokens after each of a text, and a cache that holds it."""
    end, kv, kind = len(ids), model.new_cache(len(ids)), ForwardKind.PREFILL
    plan = ForwardPlan(kind, (0, end), (1, end + 1), (0, end), "block_causal", block=1)
    plan = replace(plan, feature_layers=feature_layers)
    logits_1LV = model.forward(torch.tensor([[*ids]], device=model.device), plan, kv)
    kv.keep(plan, torch.zeros((), dtype=torch.long, device=model.device))
    return logits_1LV, kv


def noting(
    piece: Any, method: str = "__call__", keep: Callable[..., Any] = lambda *given: given
) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return the piece, and a list that gets of each call of a method what `keep` makes of its
    arguments before it, and its result."""
    noted: list[tuple[Any, Any]] = []

    def watched(self: Any, *given: Any) -> Any:
        noted.append((keep(*given), getattr(super(type(self), self), method)(*given)))
        return noted[-1][1]

    return with_method(piece, method, watched), noted


def with_method(piece: Any, name: str, method: Callable[..., Any]) -> Any:
    """Return the piece with one method replaced."""
    made = copy(piece)
    kind = type(type(piece).__name__, (type(piece),), {name: method})
    object.__setattr__(made, "__class__", kind)
    return made


def canvases_of_trace(generation: Generation, prompt: Sequence[int], mask: int) -> list[list[int]]:
    """Return the canvas before every forward and after the last, rebuilt from the trace alone."""
    end, drawn = len(generation.trace), zip(generation.ids, generation.born, strict=True)
    lives = [(at, token, born, end) for at, (token, born) in enumerate(drawn)]
    for index, forward in enumerate(generation.trace.forwards):
        lives += [(one.position, one.before, one.born, index) for one in forward.changes]
    canvases = [[*prompt, *[mask] * len(generation.ids)] for _ in range(end + 1)]
    for at, token, born, revised in lives:
        for step in range(max(born + 1, 0), revised + 1):
            canvases[step][len(prompt) + at] = token
    return canvases


def same(one: Generation, other: Generation) -> bool:
    """Equal tokens, each from the same forward."""
    return (one.ids, one.born) == (other.ids, other.born)


def facts(generation: Generation) -> tuple[Any, ...]:
    """Tokens, when they came, where they end, and what was done for them, without times."""
    rows = [replace(row, ms=0.0) for row in generation.trace.forwards]
    return generation.ids, generation.born, generation.cut, rows


class Watched:
    """A model that keeps the canvas, the plan and the logits of every forward.

    `ending`: the position at which, and around which, the end token is made likely.
    """

    picks_rows = False

    def __init__(self, model: Any, ending: int | None = None) -> None:
        self.model, self.ending, self.special = model, ending, model.special
        self.canvases: list[Tensor] = []
        self.plans: list[Any] = []
        self.logits: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, tokens_KL: Tensor, plan: Any, kv: Any) -> Tensor:
        self.canvases.append(tokens_KL.clone())
        self.plans.append(plan)
        logits_KRV = self.model.forward(tokens_KL, plan, kv)
        if self.ending is not None:
            distance_R = (torch.arange(*plan.rows) - self.ending).abs()
            logits_KRV[..., self.special.eos] += 9 - 0.3 * distance_R
        self.logits.append(logits_KRV.clone())
        return logits_KRV
