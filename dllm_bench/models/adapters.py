"""`CheckpointLayout`: how a published checkpoint maps onto a model class of transformers.

A layout translates config.json into the arguments of transformers' config class, and says which
published tensors make up each parameter of the module built from it. No modelling code of a
checkpoint is copied or run.

`ADAPTERS` is the one registry of adapter name -> layout. An adapter is the name (`adapter:` in a
model's yaml) of a `CheckpointLayout`. To support another architecture, add a subclass and an entry
in `ADAPTERS`; its config keys, tensor names and supported values are in `layouts.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml

# --- layouts --------------------------------------------------------------------------------------

PublishedConfig = Mapping[str, Any]  # the checkpoint's config.json
Shapes = Mapping[str, tuple[int, ...]]  # parameter name of the module -> its shape


@dataclass(frozen=True)
class PublishedTensor:
    """A published tensor that fills a parameter of the module, or a part of one."""

    name: str
    """Name in the checkpoint."""
    rows: tuple[int, int] | None = None
    """The half-open span of its rows that is read; None: all of them."""
    place: tuple[int | slice, ...] = ()
    """Index of the part of the parameter that it fills; empty: the whole parameter."""


class CheckpointLayout:
    """One published architecture: its config keys, tensor names and habits.

    Unless a subclass says otherwise, keys and names are those of transformers.
    """

    model_type: ClassVar[str]
    """`model_type` of its config.json."""
    family: ClassVar[str]
    """The class of transformers that runs it, without "ForCausalLM"."""
    shifted: ClassVar[bool] = False
    """Whether row i predicts position i + 1."""
    attention: ClassVar[str] = "full"
    """Attention it is usually trained with; a model's yaml may name another."""
    ropes: ClassVar[tuple[str, ...]] = ("default",)
    """Supported variants of the rotary embedding."""
    plain_layers: ClassVar[bool] = False
    """Whether a layer is `input_layernorm`, `self_attn`, `post_attention_layernorm` and `mlp`, each
    pair added to its input, and V a projection of its own: what `RowLayer` runs by its parts."""
    counts: ClassVar[Mapping[str, str]] = {"num_hidden_layers": "layers", "num_experts": "experts"}
    """Config key -> how the names of that many published parts begin, before their number."""
    ignored: ClassVar[str | None] = None
    """Regular expression of published tensors that are not read."""

    def recognises(self, published: PublishedConfig) -> bool:
        """Return whether a config.json is of this layout."""
        return str(published.get("model_type")).lower() == self.model_type.lower()

    def text_config(self, published: PublishedConfig) -> PublishedConfig:
        """Return the part of the config that describes the language model."""
        return published

    def settings(self, published: PublishedConfig) -> dict[str, Any]:
        """Return the arguments of transformers' config class."""
        every = _layouts()["sizes"]
        keys = every.get(type(self).__name__, every["CheckpointLayout"])
        sizes = {name: value(published, key) for name, key in keys.items()}
        optional = {"head_dim": published["head_dim"]} if published.get("head_dim") else {}
        tied = bool(published.get("tie_word_embeddings", False))
        shared = {"rope_parameters": self.rope(published), "tie_word_embeddings": tied}
        return {**sizes, **optional, **shared}

    def family_of(self, published: PublishedConfig) -> str:
        """Return the class of transformers for this config, without "ForCausalLM"."""
        return self.family

    def to_published(self, name: str) -> str:
        """Return the published name of a parameter, if names correspond one to one."""
        return renamed(type(self).__name__, name) or name

    def parts(self, name: str, shapes: Shapes) -> list[PublishedTensor]:
        """Return the published tensors that make up a parameter."""
        return expert_parts(name, shapes) or [PublishedTensor(self.to_published(name))]

    def check(self, published: PublishedConfig) -> None:
        """Raise DllmBenchError, naming every key, for a config that this layout would load
        wrongly."""
        wrong = unsupported(type(self).__name__, self.text_config(published))
        if wrong:
            raise DllmBenchError(
                f"The config asks for {', '.join(wrong)}, which the {self.model_type} adapter does "
                f"not support; use a checkpoint without it or extend the adapter."
            )

    def rope(self, published: PublishedConfig) -> dict[str, Any]:
        """Return `rope_parameters` of the rotary embedding.

        Reads the older keys of transformers (`rope_theta`, `rope_scaling`) and the newer one.
        """
        scaling = dict(published.get("rope_parameters") or published.get("rope_scaling") or {})
        bases = {base for base in (published.get("rope_theta"), scaling.get("rope_theta")) if base}
        if len(bases) > 1:
            raise DllmBenchError(
                f"config.json gives rope_theta={published['rope_theta']} at its top level and "
                f"{scaling['rope_theta']} inside of rope_parameters; keep the one the weights were "
                f"trained with."
            )
        kind = scaling.pop("type", None) or scaling.pop("rope_type", "default")
        if kind not in self.ropes:
            raise DllmBenchError(
                f"The config asks for rotary embeddings of type {kind!r}, the {self.model_type} "
                f"adapter supports {', '.join(self.ropes)}; use a checkpoint without it or extend "
                f"the adapter."
            )
        base = bases.pop() if bases else value(published, "rope_theta")
        return {**scaling, "rope_type": kind, "rope_theta": base}


def unsupported(kind: str, config: Mapping[str, Any]) -> list[str]:
    """Return the settings of a config that `layouts.yaml` does not list for a kind, as
    `key=value`."""
    return [
        f"{key}={config[key]!r}"
        for key, values in _layouts()["supported"][kind].items()
        if key in config and config[key] not in values
    ]


def renamed(kind: str, name: str) -> str | None:
    """Return a tensor's name by the other naming that `layouts.yaml` gives for a kind; None if it
    gives none."""
    for beginning, other in _beginnings(kind).items():
        if match := beginning.match(name):
            return match.expand(other) + name[match.end() :]
    return None


@cache
def _beginnings(kind: str) -> dict[re.Pattern[str], str]:
    names = _layouts()["names"].get(kind, {})
    return {
        re.compile(re.escape(own).replace(r"\*", r"(\d+)")): other.replace("*", r"\1")
        for own, other in names.items()
    }


@cache
def _layouts() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("layouts.yaml"))


def value(published: PublishedConfig, key: str, file: str = "config.json") -> Any:
    """Return a config value that must not be missing; `file` is named in the error."""
    if published.get(key) is None:
        raise DllmBenchError(
            f"The checkpoint's {file} has no {key!r}; complete it from the published config."
        )
    return published[key]


# --- architectures --------------------------------------------------------------------------------


class LladaLayout(CheckpointLayout):
    """`LLaDAModelLM` of block type "llama": OLMo's config keys, `model.transformer.*` names.

    LLaDA-1.5, dParallel and d3LLM have the same layout. Run by `LlamaForCausalLM`, or by
    `Qwen2ForCausalLM` (the same layers with biases on q, k and v) where the config has
    `include_qkv_bias`.
    """

    model_type = "llada"
    family = "Llama"
    counts: ClassVar = {"n_layers": "blocks"}
    plain_layers = True

    def recognises(self, published: PublishedConfig) -> bool:
        return super().recognises(published) and "num_experts" not in published

    def family_of(self, published: PublishedConfig) -> str:
        return "Qwen2" if published.get("include_qkv_bias") else self.family

    def settings(self, published: PublishedConfig) -> dict[str, Any]:
        without = {**published, "head_dim": None}  # which LLaDA's own code does not read
        return super().settings(without) | {
            "vocab_size": published.get("embedding_size") or value(published, "vocab_size"),
            "intermediate_size": _mlp_size(published),
            "num_key_value_heads": _kv_heads(published),
            "tie_word_embeddings": bool(published.get("weight_tying", False)),
        }


def _mlp_size(published: PublishedConfig) -> int:
    size = published.get("mlp_hidden_size")
    return int(size or value(published, "mlp_ratio") * value(published, "d_model"))


def _kv_heads(published: PublishedConfig) -> int:
    if published.get("n_kv_heads"):
        return int(published["n_kv_heads"])
    return 1 if published.get("multi_query_attention") else int(value(published, "n_heads"))


class DreamLayout(CheckpointLayout):
    """`DreamModel`: Qwen2's tensor names and config keys, logits shifted by one.

    DiffuCoder, dParallel, d3LLM and the D2F versions of Dream have the same layout.
    """

    model_type = "Dream"
    family = "Qwen2"
    shifted = True
    plain_layers = True


class FastDllmV2Layout(DreamLayout):
    """`Fast_dLLM_QwenForCausalLM`: Qwen2.5 trained on block diffusion, blocks of `bd_size`."""

    model_type = "Fast_dLLM_Qwen"
    attention = "block_causal"


EXPERTS = re.compile(r"(?P<stem>.+\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)$")


def expert_parts(name: str, shapes: Shapes) -> list[PublishedTensor] | None:
    """Return the published tensors of a stacked expert parameter, None for other parameters.

    Checkpoints store experts one by one; transformers stacks them as [gate; up] and down.
    """
    match = EXPERTS.match(name)
    if match is None:
        return None
    experts, rows, _ = shapes[name]
    if match["kind"] == "down_proj":
        return [
            PublishedTensor(f"{match['stem']}.{e}.down_proj.weight", place=(e,))
            for e in range(experts)
        ]
    halves = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    return [
        PublishedTensor(f"{match['stem']}.{e}.{side}.weight", place=(e, half))
        for e in range(experts)
        for side, half in halves.items()
    ]


class LladaMoeLayout(CheckpointLayout):
    """`LLaDAMoEModelLM`, run by Qwen3-MoE's class.

    Its config.json has model_type "llada", as the dense model's does. Softmax over all experts, the
    top-k weights not renormalised, RMSNorm per head on q and k (as in Qwen3-MoE; OLMoE normalises
    the whole projection).
    """

    model_type = "llada"
    family = "Qwen3Moe"
    plain_layers = True

    def recognises(self, published: PublishedConfig) -> bool:
        kind = str(published.get("model_type")).lower().replace("_", "")
        return kind in ("llada", "lladamoe") and "num_experts" in published

    def settings(self, published: PublishedConfig) -> dict[str, Any]:
        sparse = published.get("moe_layer_freq") or [1] * value(published, "num_hidden_layers")
        return super().settings(published) | {
            "intermediate_size": published.get("dense_intermediate_size") or 1,
            "norm_topk_prob": bool(published.get("norm_topk_prob")),
            "mlp_only_layers": [i for i, is_sparse in enumerate(sparse) if not is_sparse],
            "head_dim": _head_dim(published),
        }


LLADA2_FUSED = ("q_proj", "k_proj", "v_proj")  # rows of query_key_value, in this order


class Llada2Layout(CheckpointLayout):
    """`LLaDA2MoeModelLM` (Bailing MoE v2), run by GLM-4-MoE's class; block diffusion, blocks of 32.

    LLaDA2.1 and DMax have the same layout. So has LLaDA2.2, but its router admits
    `expert_capacity` experts a block before each token chooses; such a config is refused.

    Sigmoid scores with a selection bias, the best groups by the sum of their two best experts, one
    shared expert, rotary embedding on the first part of a head (half of it in LLaDA2.0), q/k/v in
    one tensor: [all q | all k | all v].
    """

    model_type = "llada2_moe"
    family = "Glm4Moe"
    attention = "block_causal"
    plain_layers = True

    def settings(self, published: PublishedConfig) -> dict[str, Any]:
        standard = super().settings(published)
        fraction = published.get("partial_rotary_factor", 1.0)
        return standard | {
            "rope_parameters": standard["rope_parameters"] | {"partial_rotary_factor": fraction},
            "head_dim": _head_dim(published),
            "use_qk_norm": True,
            "norm_topk_prob": bool(published.get("norm_topk_prob", True)),
        }

    def parts(self, name: str, shapes: Shapes) -> list[PublishedTensor]:
        stem, _, side = name.removesuffix(".weight").rpartition(".self_attn.")
        if side not in LLADA2_FUSED:
            return super().parts(name, shapes)
        row_counts = [shapes[f"{stem}.self_attn.{other}.weight"][0] for other in LLADA2_FUSED]
        start = sum(row_counts[: LLADA2_FUSED.index(side)])
        rows = (start, start + shapes[name][0])
        return [PublishedTensor(f"{stem}.attention.query_key_value.weight", rows=rows)]


def _head_dim(published: PublishedConfig) -> int:
    given = published.get("head_dim")
    return int(given or published["hidden_size"] // published["num_attention_heads"])


class SdarLayout(CheckpointLayout):
    """`SDARForCausalLM`: Qwen3 trained on block diffusion, logits not shifted."""

    model_type = "sdar"
    family = "Qwen3"
    attention = "block_causal"
    plain_layers = True


class WedlmLayout(SdarLayout):
    """`WeDLMForCausalLM` with `qk_norm`: Qwen3's layers, causal in the order in which rows are fed.

    Without `qk_norm` the layers are Qwen2.5's with biases (WeDLM-7B), of which no config was seen.
    """

    model_type = "wedlm"


class SdarMoeLayout(SdarLayout):
    """`SDARMoeForCausalLM`: Qwen3-MoE trained on block diffusion, experts stored one by one."""

    model_type = "sdar_moe"
    family = "Qwen3Moe"


class NemotronDiffusionLayout(CheckpointLayout):
    """`NemotronLabsDiffusionModel`: Ministral 3's layers under `encoder`, with a `diffusion_head`.

    Run by Llama's class, which computes the same up to `original_max_position_embeddings` positions
    (16,384): beyond them Ministral 3 scales its queries. Row i predicts position i. The attention
    is that of the released loop with `causal_context=False`; by default it encodes finished blocks
    causally.
    """

    model_type = "nemotron_labs_diffusion"
    family = "Llama"
    attention = "block_causal"
    plain_layers = True
    ropes = ("default", "yarn")

    def rope(self, published: PublishedConfig) -> dict[str, Any]:
        """Return `rope_parameters`, without the scale of queries and the length that Ministral 3
        adds."""
        own = ("llama_4_scaling_beta", "max_position_embeddings")
        return {key: given for key, given in super().rope(published).items() if key not in own}


class CausalLayout(CheckpointLayout):
    """An autoregressive model: rows predict the next position and see no later one."""

    shifted = True
    attention = "causal"
    plain_layers = True


class Qwen2Layout(CausalLayout):
    """`Qwen2ForCausalLM`, Qwen2.5 included."""

    model_type = "qwen2"
    family = "Qwen2"
    ropes = ("default", "yarn")


class Qwen3Layout(CausalLayout):
    """`Qwen3ForCausalLM`."""

    model_type = "qwen3"
    family = "Qwen3"
    ropes = ("default", "yarn")


class LlamaLayout(CausalLayout):
    """`LlamaForCausalLM`, Llama 3.1 included."""

    model_type = "llama"
    family = "Llama"
    ropes = ("default", "llama3")


class Gemma4Layout(CausalLayout):
    """The language model of `Gemma4UnifiedForConditionalGeneration`; vision and audio are not read.

    Its layers alternate between a sliding window and full attention, each kind with a rotary
    embedding of its own.
    """

    model_type = "gemma4_unified"
    family = "Gemma4Unified"
    plain_layers = False
    ignored = r"model\.(?!language_model\.)"

    def text_config(self, published: PublishedConfig) -> PublishedConfig:
        outer = {key: published[key] for key in ("tie_word_embeddings",) if key in published}
        return {"tie_word_embeddings": True, **outer, **value(published, "text_config")}

    def settings(self, published: PublishedConfig) -> dict[str, Any]:
        """Return settings by kind of layer: full-attention layers have head sizes of their own,
        under an old or a new key."""
        heads = "per_layer_config" if "per_layer_config" in published else "global_head_dim"
        optional = ("attention_k_eq_v", "num_global_key_value_heads", "final_logit_softcapping")
        given = {key: published[key] for key in optional if key in published}
        return {**super().settings(published), **given, heads: value(published, heads)}

    def rope(self, published: PublishedConfig) -> dict[str, Any]:
        return dict(value(published, "rope_parameters"))


class DiffusionGemmaLayout(Gemma4Layout):
    """The language model of `DiffusionGemmaForBlockDiffusion`; its vision tower is not read.

    Encoder and decoder share all weights but a number a layer, which the checkpoint stores twice.
    """

    model_type = "diffusion_gemma"
    family = "DiffusionGemma"
    shifted = False
    attention = "canvas"
    counts: ClassVar = {"num_hidden_layers": "layers"}
    ignored = r"model\.encoder\.(?!language_model\.layers\.\d+\.layer_scalar$)"

    def parts(self, name: str, shapes: Shapes) -> list[PublishedTensor]:
        if name == "scale_N1":
            names = (f"model.decoder.layers.{n}.layer_scalar" for n in range(shapes[name][0]))
            return [PublishedTensor(of_layer, place=(n,)) for n, of_layer in enumerate(names)]
        return super().parts(name, shapes)


ADAPTERS: Mapping[str, CheckpointLayout] = {  # config.json is matched in this order
    "llada": LladaLayout(),
    "llada_moe": LladaMoeLayout(),
    "llada2": Llada2Layout(),
    "dream": DreamLayout(),
    "fast_dllm_v2": FastDllmV2Layout(),
    "sdar": SdarLayout(),
    "wedlm": WedlmLayout(),
    "sdar_moe": SdarMoeLayout(),
    "nemotron_diffusion": NemotronDiffusionLayout(),
    "qwen2": Qwen2Layout(),
    "qwen3": Qwen3Layout(),
    "llama": LlamaLayout(),
    "gemma4": Gemma4Layout(),
    "diffusion_gemma": DiffusionGemmaLayout(),
}

PLAIN_CLASSES = {f"{one.family}ForCausalLM" for one in ADAPTERS.values() if one.plain_layers}
"""Classes of transformers with `plain_layers`."""


def recognised_adapter(published: PublishedConfig) -> str | None:
    """Return the name of the adapter whose layout a config.json has; None if it is not
    supported."""
    names = (name for name, layout in ADAPTERS.items() if layout.recognises(published))
    return next(names, None)
