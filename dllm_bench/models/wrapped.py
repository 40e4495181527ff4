"""Models that were made elsewhere: a transformers object that is already loaded, or a function.

`wrap_object` decodes with a `*ForCausalLM` of transformers whose class an adapter uses too, with
its keys and values cached. The object stays the caller's: modes and flags that decoding changes are
restored after every forward. It also takes any function from ids (B, L) to logits (B, L, V), which
has no cache, so every forward feeds the whole canvas, and decoders that cache are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import SpecialTokens
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.kv import PositionCache
from dllm_bench.models.load import LoadedModel, ModelMetadata
from dllm_bench.models.spec import CANVAS, CHOICES, OBJECT
from dllm_bench.models.text import SpecialTokenSources, TextCodec, special_tokens
from dllm_bench.models.transformer import TransformerDenoiser, is_causal, ready_to_decode

Function = Callable[[Tensor], Tensor]
"""ids (B, L), int64 -> logits (B, L, V)."""
SUPPORTED = {
    f"{layout.family}ForCausalLM" for layout in ADAPTERS.values() if layout.attention != CANVAS
}
"""Classes of transformers whose layers `TransformerDenoiser` can run."""
UNREAD = ("transformers_version", "architectures", "dtype", "torch_dtype", "is_causal", "use_cache")
"""Keys of a config that say how a module was stored or is called, not what it computes."""


class BorrowedDenoiser(TransformerDenoiser):
    """A denoiser over a module that the caller owns; create it inside `borrowed`."""

    owns_layers = False  # the owner's class and weights may change between forwards

    def reuse_prefix(self, kv: KVCache, prompt_ids: Sequence[int], grid: int, by: object) -> None:
        """See `TransformerDenoiser.reuse_prefix`; nothing is reused once weights have changed."""
        weights = [(w.data_ptr(), w.is_inference() or w._version) for w in self.module.parameters()]
        super().reuse_prefix(kv, prompt_ids, grid, (by, weights))

    def forward(self, tokens_KL: Tensor, plan: ForwardPlan, kv: KVCache) -> Tensor:
        """See `TransformerDenoiser.forward`."""
        with borrowed(self.module):
            return super().forward(tokens_KL, plan, kv)

    def forward_batch(
        self, tokens: Sequence[Tensor], plans: Sequence[ForwardPlan], caches: Sequence[KVCache]
    ) -> list[Tensor]:
        """See `TransformerDenoiser.forward_batch`."""
        with borrowed(self.module):
            return super().forward_batch(tokens, plans, caches)


@contextmanager
def evaluated(module: torch.nn.Module) -> Iterator[None]:
    """Put the module in evaluation mode in the block; afterwards its modes are as before."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def borrowed(module: Any) -> Iterator[None]:
    """Make the module ready to decode in the block; afterwards its modes and flags are as
    before."""
    holders = [module.config, *(layer.self_attn for layer in module.model.layers)]
    before = [(holder, vars(holder).get("is_causal")) for holder in holders]
    with evaluated(module):
        ready_to_decode(module)
        try:
            yield
        finally:
            for holder, flag in before:
                del holder.is_causal
                if flag is not None:
                    holder.is_causal = flag


class FunctionDenoiser(Denoiser):
    """A denoiser over a function of ids, without a cache.

    `attention_form` and `block` describe the function; a plan with another attention is refused.
    """

    parameters = 0

    def __init__(
        self,
        function: Function,
        special: SpecialTokens,
        shifted: bool,
        *,
        attention_form: str = "full",
        block: int | None = None,
    ) -> None:
        self.function = function
        self.special = special
        self.shifted = shifted
        self.attention_form = attention_form
        self.block = block
        # of another function, one without parts
        self._module = function if isinstance(function, torch.nn.Module) else torch.nn.Module()
        self.device = next((one.device for one in self._module.parameters()), torch.device("cpu"))
        logits_11V = self._logits(torch.zeros(1, 1, dtype=torch.long, device=self.device))
        self.device, self.dtype = logits_11V.device, logits_11V.dtype
        self.vocab_size: int = logits_11V.shape[-1]
        if max(special.mask, *special.ends) >= self.vocab_size:
            raise DllmBenchError(
                f"The function returns logits of {self.vocab_size} tokens, which lack special "
                f"tokens of the tokenizer ({special}); wrap it with the tokenizer of its weights."
            )

    def new_cache(self, length: int) -> PositionCache:
        """Return a cache that stays empty."""
        return PositionCache(0, length)

    def reuse_prefix(self, kv: KVCache, prompt_ids: Sequence[int], grid: int, by: object) -> None:
        """Raise: there are no keys and values to reuse."""
        raise _needs_cache("reuses the prefix of the request before")

    def forward(self, tokens_KL: Tensor, plan: ForwardPlan, kv: KVCache) -> Tensor:
        """Return logits (K, R, V): entry [k, i] predicts position rows[0] + i."""
        self._check(plan)
        logits_KFV = self._visible_logits(tokens_KL[:, : plan.feed[1]], plan.visible_K)
        rows_R = torch.arange(*plan.rows, device=self.device) - int(self.shifted)
        return logits_KFV.index_select(1, rows_R.clamp_min(0))

    def embed(self, ids: Tensor) -> Tensor:
        """Raise: a function takes ids."""
        raise DllmBenchError(
            "The decoder feeds means of embeddings, and the model is a function of ids; set "
            "smoothing to 0, choose a decoder that feeds ids, or wrap the model's object."
        )

    def mean_embeddings(self, logits_KRV: Tensor) -> Tensor:
        """Raise, as `embed` does."""
        return self.embed(logits_KRV)

    def _check(self, plan: ForwardPlan) -> None:
        if plan.feed[0] > 0 or plan.stores or plan.sets is not None or plan.recompute is not None:
            raise _needs_cache("keeps keys and values")
        if plan.added is not None or plan.alone is not None:
            raise DllmBenchError(
                "The decoder hides positions from each other within a forward, and a function has "
                "one attention; choose another decoder, or wrap the model's object."
            )
        asked = "causal" if is_causal(plan) else plan.attention
        if asked != self.attention_form or (asked == "block_causal" and plan.block != self.block):
            raise DllmBenchError(
                f"The decoder asks for {plan.attention} attention (blocks of {plan.block}), and a "
                f"function has one attention, wrapped as {self.attention_form} (blocks of "
                f"{self.block}); choose a decoder for that attention, or wrap the model's object."
            )

    def _visible_logits(self, ids_KF: Tensor, visible_K: Tensor | None) -> Tensor:
        """Return logits (K, F, V); a branch that sees less of the canvas is a call of its own."""
        if visible_K is None:
            return self._logits(ids_KF)
        fed, pairs = ids_KF.shape[1], zip(ids_KF, visible_K.tolist(), strict=True)
        seen = [self._logits(ids_F[None, :visible])[0] for ids_F, visible in pairs]
        return torch.stack([pad(rows_XV, (0, 0, 0, fed - len(rows_XV))) for rows_XV in seen])

    @torch.inference_mode()
    def _logits(self, ids_BL: Tensor) -> Tensor:
        with evaluated(self._module):
            logits_BLV = self.function(ids_BL.clone())  # it may write into what it is given
        shape, kind = getattr(logits_BLV, "shape", ()), getattr(logits_BLV, "dtype", None)
        floats = isinstance(kind, torch.dtype) and kind.is_floating_point
        if not floats or shape[:2] != ids_BL.shape or len(shape) != 3:
            returned = f"{kind} {tuple(shape)}" if shape else type(logits_BLV).__name__
            raise DllmBenchError(
                "A model function takes ids (B, L) and returns logits (B, L, V), floating-point "
                f"numbers of torch; for ids {tuple(ids_BL.shape)} this one returned {returned}. "
                "Return the logits alone, for example `lambda ids: model(ids).logits`."
            )
        return logits_BLV


def is_supported(module: Any) -> bool:
    """Return whether the layers of a transformers object can be run here."""
    return bool(SUPPORTED & {kind.__name__ for kind in type(module).__mro__})


def _needs_cache(what: str) -> DllmBenchError:
    return DllmBenchError(
        f"The decoder {what}, and the model is a function of ids, which has no cache; choose a "
        'piece without one, decoder(..., cache="none"), or wrap the model\'s object.'
    )


def wrap_object(
    model: Any,
    tokenizer: Any,
    *,
    mask_token: str | None,
    attention_form: str,
    block: int | None,
    shifted: bool,
    bos: bool,
    weights_hash: str | None,
) -> LoadedModel:
    """Return a loaded transformers object, or a function from ids (B, L) to logits (B, L, V), as a
    model. For the settings see `ModelSpec`; DllmBenchError for classes that are not supported.
    """
    has_layers = hasattr(model, "config") and hasattr(model, "named_parameters")
    has_weights = has_layers or isinstance(model, torch.nn.Module)
    if has_weights and weights_hash is not None:
        raise DllmBenchError(
            f"wrap was given weights_hash={weights_hash!r} for a {type(model).__name__}, whose "
            "weights are hashed themselves; leave weights_hash out."
        )
    kind, maskless = type(model).__name__, attention_form == "causal"
    how: dict[str, Any] = {"attention_form": attention_form, "block": block}
    denoiser: BorrowedDenoiser | FunctionDenoiser
    if has_layers:
        _check_layers(model)
        generation = getattr(model, "generation_config", None)
        ends = {} if generation is None else generation.to_dict()
        sources = SpecialTokenSources(published(model), tokenizer, ends)
        special = special_tokens(sources, model.config.vocab_size, mask_token, maskless)
        with borrowed(model):
            denoiser = BorrowedDenoiser(model, special, shifted, **how)
        name = str(model.config.name_or_path).rstrip("/").rpartition("/")[2] or kind
        adapter, attention = kind, model.config._attn_implementation
    else:
        sources = SpecialTokenSources({}, tokenizer, {})
        special = special_tokens(sources, len(tokenizer), mask_token, maskless)
        denoiser = FunctionDenoiser(model, special, shifted, **how)
        name = getattr(model, "__name__", kind)
        adapter, attention = "function without a cache", "its own"
    chat = bool(getattr(tokenizer, "chat_template", None))
    text = TextCodec(name, tokenizer, special, chat=chat, bos=bos)
    metadata = ModelMetadata(
        name=name,
        adapter=adapter,
        template_sha256=text.template_sha256,
        dtype=str(denoiser.dtype).removeprefix("torch."),
        device=str(denoiser.device),
        attention=attention,
        parameters=denoiser.parameters,
    )
    named = {"name": name, "adapter": OBJECT, "dtype": metadata.dtype, "attention": attention}
    settings = {**named, **how, "shifted": shifted, "chat": chat, "bos": bos}

    def content() -> dict[str, str]:
        weights = state_sha256(model) if has_weights else text_sha256(name, weights_hash)
        given = settings_sha256(published(model) if has_layers else {}, special)
        return {"weights": weights, "config": given, "tokenizer": vocabulary_sha256(tokenizer)}

    return LoadedModel(denoiser, text, metadata, attention_form, block, settings, content)


def _check_layers(module: Any) -> None:
    """Raise DllmBenchError for an object whose layers cannot be run here."""
    name, attention = type(module).__name__, module.config._attn_implementation
    if not is_supported(module):
        raise DllmBenchError(
            f"{name} is no class whose layers can be run here ({', '.join(sorted(SUPPORTED))}); "
            "wrap a function in place of it: wrap(lambda ids: model(ids).logits, tokenizer)."
        )
    if attention not in CHOICES["attention"]:
        raise DllmBenchError(
            f"{name} computes attention by {attention!r}, which takes no mask of blocks; call "
            "model.set_attn_implementation('sdpa') before you wrap it."
        )


# --- what tells one object from another ----------------------------------------------------------


def state_sha256(module: torch.nn.Module) -> str:
    """Return sha256 over the tensors of a module's state: name, dtype, shape and bytes, in its
    order."""
    hashed = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hashed.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return hashed.hexdigest()


def text_sha256(name: str, weights_hash: str | None) -> str:
    """Return sha256 of the text that the user gave for a function's weights."""
    if not weights_hash:
        raise DllmBenchError(
            f"Model {name!r} is a function, whose weights cannot be hashed, so nobody could "
            "tell which weights made a stored run; give wrap(..., weights_hash=TEXT), a text that "
            "changes whenever the weights or the function do, or use evaluate, which stores "
            "nothing."
        )
    return hashlib.sha256(weights_hash.encode()).hexdigest()


def published(module: Any) -> dict[str, Any]:
    """Return the settings of a module's config, those of its text model included."""
    return {**module.config.get_text_config().to_dict(), **module.config.to_dict()}


def settings_sha256(settings: Mapping[str, Any], special: SpecialTokens) -> str:
    """Return sha256 of a module's config, without what says how it was stored, and of the special
    ids."""
    kept = {k: v for k, v in settings.items() if k not in UNREAD and not k.startswith("_")}
    return _sha256({"config": kept, "special": asdict(special)})


def vocabulary_sha256(tokenizer: Any) -> str:
    """Return sha256 of what decides how text becomes ids: the tokenizer and its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend else tokenizer.get_vocab()
    kept = {key: value for key, value in rules.items() if key not in ("padding", "truncation")}
    return _sha256({"rules": kept, "template": getattr(tokenizer, "chat_template", None)})


def _sha256(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()
