"""Models as objects: `load_model` by name, folder or hub id; `wrap` for one that is already
loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dllm_bench.api.compose import as_override, compose
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models import load, wrapped
from dllm_bench.models.load import LoadedModel
from dllm_bench.store.groups import Hardware
from dllm_bench.store.inputs import model_spec, resolve_model

if TYPE_CHECKING:
    from torch import Tensor

ATTENTION_FORMS = {"full": "full", "block": "block_causal", "causal": "causal"}


def load_model(source: str | Path, **settings: Any) -> LoadedModel:
    """Load a model; nothing is downloaded.

    source: a name of `conf/model` ("tiny-llada"), a checkpoint folder, or a hub id in the cache.
    settings: replace those of the model's yaml, for example `dtype="bfloat16"`, `device="cuda:1"`;
        `dllm_bench.models.spec.ModelSpec` lists them.

    Raises DllmBenchError, which names what is missing or does not fit.
    """
    changed = [as_override(f"++model.{key}", value) for key, value in settings.items()]
    model = compose([as_override("model", str(source)), *changed])["model"]
    loaded = load.load_model(model_spec(resolve_model(model, Hardware({}))))
    made = {"dtype": loaded.metadata.dtype, "attention": loaded.metadata.attention}
    return replace(loaded, settings={**model, **made})


def wrap(
    model: Any | Callable[[Tensor], Tensor],
    tokenizer: Any,
    *,
    mask_token: str | None = None,
    attention: Literal["full", "block", "causal"] = "full",
    block: int | None = None,
    shifted: bool | None = None,
    bos: bool = False,
    weights_hash: str | None = None,
) -> LoadedModel:
    """Return a model that is already loaded, ready for `generate`, `run` and `evaluate`.

    model: a `*ForCausalLM` object of transformers, which keeps its modes, flags and config; or any
        function from ids (B, L), int64, to logits (B, L, V). A function has no cache: each forward
        feeds the whole canvas, and decoders that cache are refused.
    tokenizer: its tokenizer, of transformers; with a chat template prompts may be chats.
    mask_token: text of the mask token, if neither config nor tokenizer names it.
    attention: which positions a position attends to, as in training: all, its own and earlier
    blocks, or earlier positions only (an autoregressive model). block: block length in positions,
    with attention="block". shifted: whether the logits at position i predict i + 1 (Dream); None:
    only if causal. bos: whether plain text begins with the BOS token. weights_hash: only for a
    function: a text that changes whenever its weights or code do. `run` needs it to tell stored
    runs apart. For a torch module the weights themselves are hashed.

    Raises DllmBenchError for a class that cannot be run, a missing mask token, and a function that
    does not return logits.
    """
    if attention not in ATTENTION_FORMS:
        choices = ", ".join(ATTENTION_FORMS)
        raise DllmBenchError(f"wrap takes attention as one of {choices}, not {attention!r}.")
    if (block is not None) != (attention == "block"):
        raise DllmBenchError(
            f"wrap was given attention={attention!r} with block={block}; a block length goes with "
            'attention="block", and only with it.'
        )
    is_module = hasattr(model, "config") and hasattr(model, "named_parameters")
    as_model = wrapped.wrap_module if is_module else wrapped.wrap_function
    return as_model(
        model,
        tokenizer,
        mask_token=mask_token,
        attention_form=ATTENTION_FORMS[attention],
        block=block,
        shifted=attention == "causal" if shifted is None else shifted,
        bos=bos,
        weights_hash=weights_hash,
    )
