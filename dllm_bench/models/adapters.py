"""`CheckpointLayout`: how a published checkpoint maps onto a model class of transformers.

A layout translates config.json into the arguments of transformers' config class, and says which
published tensors make up each parameter of the module built from it. No modelling code of a
checkpoint is copied or run.

`ADAPTERS` is the one registry of adapter name -> layout. An adapter is the name (`adapter:` in a
model's yaml) of a `CheckpointLayout`. To support another architecture, add an entry to
`layouts.yaml`, which holds all that is data, and a subclass where that is not enough.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dllm_bench.core.declared import shown
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


@dataclass(frozen=True)
class CheckpointLayout:
    """One published architecture: its config keys, tensor names and habits, see `layouts.yaml`.

    Unless a subclass or that file says otherwise, keys and names are those of transformers.
    """

    name: str
    """The adapter."""
    model_type: str
    """`model_type` of its config.json."""
    family: str
    """The class of transformers that runs it, without "ForCausalLM"."""
    shifted: bool = False
    """Whether row i predicts position i + 1."""
    attention: str = "full"
    """Attention it is usually trained with; a model's yaml may name another."""
    ropes: Sequence[str] = ("default",)
    """Supported variants of the rotary embedding."""
    plain_layers: bool = True
    """Whether a layer is `input_layernorm`, `self_attn`, `post_attention_layernorm` and `mlp`, each
    pair added to its input, and V a projection of its own: what `RowLayer` runs by its parts."""
    counts: Mapping[str, str] = field(
        default_factory=lambda: {"num_hidden_layers": "layers", "num_experts": "experts"}
    )
    """Config key -> how the names of that many published parts begin, before their number."""
    ignored: str | None = None
    """Regular expression of published tensors that are not read."""

    def recognises(self, published: PublishedConfig) -> bool:
        """Return whether a config.json is of this layout."""
        return str(published.get("model_type")).lower() == self.model_type.lower()

    def text_config(self, published: PublishedConfig) -> PublishedConfig:
        """Return the part of the config that describes the language model."""
        return published

    def settings(self, published: PublishedConfig) -> dict[str, Any]:
        """Return the arguments of transformers' config class."""
        every = LAYOUTS["sizes"]
        keys = every.get(self.name, every["standard"])
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
        return renamed(self.name, name) or name

    def parts(self, name: str, shapes: Shapes) -> list[PublishedTensor]:
        """Return the published tensors that make up a parameter."""
        return expert_parts(name, shapes) or [PublishedTensor(self.to_published(name))]

    def check(self, published: PublishedConfig) -> None:
        """Raise DllmBenchError, naming every key, for a config that this layout would load
        wrongly."""
        text = self.text_config(published)
        if wrong := unsupported("every", published) + unsupported(self.name, text):
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
        f"{key}={shown(config[key])}"
        for key, values in LAYOUTS["supported"][kind].items()
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
    names = LAYOUTS["names"].get(kind, {})
    return {
        re.compile(re.escape(own).replace(r"\*", r"(\d+)")): other.replace("*", r"\1")
        for own, other in names.items()
    }


def value(published: PublishedConfig, key: str, file: str = "config.json") -> Any:
    """Return a config value that must not be missing; `file` is named in the error."""
    if published.get(key) is None:
        raise DllmBenchError(
            f"The checkpoint's {file} has no {key!r}; complete it from the published config."
        )
    return published[key]


# --- architectures that are more than data --------------------------------------------------------


class LladaLayout(CheckpointLayout):
    """`LLaDAModelLM` of block type "llama"; the class of transformers depends on its biases."""

    def recognises(self, published: PublishedConfig) -> bool:
        return super().recognises(published) and "num_experts" not in published

    def family_of(self, published: PublishedConfig) -> str:
        return "Qwen2" if published.get("include_qkv_bias") else self.family

    def settings(self, published: PublishedConfig) -> dict[str, Any]:
        without = {**published, "head_dim": None}  # which LLaDA's own code does not read
        inner = published.get("mlp_hidden_size")
        one_group = bool(published.get("multi_query_attention"))
        groups = published.get("n_kv_heads") or one_group or value(published, "n_heads")
        return super().settings(without) | {
            "vocab_size": published.get("embedding_size") or value(published, "vocab_size"),
            "intermediate_size": int(
                inner or value(published, "mlp_ratio") * value(published, "d_model")
            ),
            "num_key_value_heads": int(groups),
            "tie_word_embeddings": bool(published.get("weight_tying", False)),
        }


EXPERTS = re.compile(r"(?P<stem>.+\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)$")


def expert_parts(name: str, shapes: Shapes) -> list[PublishedTensor] | None:
    """Return the published tensors of a stacked expert parameter, None for other parameters.

    Checkpoints store experts one by one; transformers stacks them as [gate; up] and down.
    """
    match = EXPERTS.match(name)
    if match is None:
        return None
    experts, rows, _ = shapes[name]
    sides: dict[str, tuple[slice, ...]] = {"down_proj": ()}
    if match["kind"] == "gate_up_proj":
        sides = {"gate_proj": (slice(0, rows // 2),), "up_proj": (slice(rows // 2, rows),)}
    return [
        PublishedTensor(f"{match['stem']}.{e}.{side}.weight", place=(e, *half))
        for e in range(experts)
        for side, half in sides.items()
    ]


class LladaMoeLayout(CheckpointLayout):
    """`LLaDAMoEModelLM`, whose config.json may have the dense model's model_type."""

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
    """`LLaDA2MoeModelLM`, with q, k and v in one tensor: [all q | all k | all v]."""

    def settings(self, published: PublishedConfig) -> dict[str, Any]:
        standard = super().settings(published)
        rope, key = standard["rope_parameters"], "partial_rotary_factor"
        return standard | {
            "rope_parameters": rope | {key: published.get(key, rope.get(key, 1.0))},
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


class NemotronDiffusionLayout(CheckpointLayout):
    """`NemotronLabsDiffusionModel`, whose `rope_parameters` hold more than the rotary embedding."""

    def rope(self, published: PublishedConfig) -> dict[str, Any]:
        """Return `rope_parameters`, without the scale of queries and the length that Ministral 3
        adds."""
        own = ("llama_4_scaling_beta", "max_position_embeddings")
        return {key: given for key, given in super().rope(published).items() if key not in own}


class Gemma4Layout(CheckpointLayout):
    """The language model of `Gemma4UnifiedForConditionalGeneration`."""

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
    """The language model of `DiffusionGemmaForBlockDiffusion`.

    Encoder and decoder share all weights but a number a layer, which the checkpoint stores twice.
    """

    def parts(self, name: str, shapes: Shapes) -> list[PublishedTensor]:
        if name == "scale_N1":
            names = (f"model.decoder.layers.{n}.layer_scalar" for n in range(shapes[name][0]))
            return [PublishedTensor(of_layer, place=(n,)) for n, of_layer in enumerate(names)]
        return super().parts(name, shapes)


KINDS: Mapping[str, type[CheckpointLayout]] = {
    "llada": LladaLayout,
    "llada_moe": LladaMoeLayout,
    "llada2": Llada2Layout,
    "nemotron_diffusion": NemotronDiffusionLayout,
    "gemma4": Gemma4Layout,
    "diffusion_gemma": DiffusionGemmaLayout,
}
"""Adapter -> the class of its layout, where data are not enough."""
LAYOUTS = read_yaml(Path(__file__).with_name("layouts.yaml"))
ADAPTERS: Mapping[str, CheckpointLayout] = {  # config.json is matched in the order of the file
    name: KINDS.get(name, CheckpointLayout)(name, **facts)
    for name, facts in LAYOUTS["adapters"].items()
}

PLAIN_CLASSES = {f"{one.family}ForCausalLM" for one in ADAPTERS.values() if one.plain_layers}
"""Classes of transformers with `plain_layers`."""


def recognised_adapter(published: PublishedConfig) -> str | None:
    """Return the name of the adapter whose layout a config.json has; None if it is not
    supported."""
    return next((name for name, one in ADAPTERS.items() if one.recognises(published)), None)
