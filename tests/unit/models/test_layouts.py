"""Published layouts, loaded through the real path, against a float64 implementation of each.

Also: models as transformers saves them against its own whole models, batched forwards of these,
published sizes, and DiffusionGemma's checkpoint: what is read of it, in which forms, and what is
refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import dllm_bench as db
from dllm_bench.api.compose import compose
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.checkpoint import published_shapes, shapes_of
from dllm_bench.models.load import build_module, load_model
from dllm_bench.models.spec import ModelSpec
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.store.inputs import decoder_of
from tests.canvas import FULL, SLIDING, published, scaled_apart
from tests.helpers import (
    CONFIGS,
    VOCAB,
    load_denoiser,
    shard,
    tiny_checkpoint,
    tiny_config,
    tiny_tokenizer,
)
from tests.unit.models.common import respelled, spec
from tests.unit.models.restated import Sees, restated
from tests.unit.models.test_forward import FIRST, LENGTH, PROMPT, canvas

NEW = 12
BLOCK = 4
RELATIVE = 1e-4
FORMS: dict[str, Sees] = {
    "full": lambda q, k: True,
    "block_causal": lambda q, k: block_of(k) <= block_of(q),
    "causal": lambda q, k: k <= q,
}


def block_of(position: int) -> int:
    return 0 if position < PROMPT else 1 + (position - PROMPT) // BLOCK


def step(
    form: str, feed: tuple[int, int], rows: tuple[int, int], store: tuple[int, int]
) -> ForwardPlan:
    if form == "full":
        return ForwardPlan(ForwardKind.DENOISE, feed, rows, store)
    block, origin = (1, 0) if form == "causal" else (BLOCK, PROMPT)
    return ForwardPlan(ForwardKind.DENOISE, feed, rows, store, "block_causal", block, origin)


def ours(model: TransformerDenoiser, tokens_1L: Tensor, form: str) -> Tensor:
    """Return logits (L, V) as the published model gives them: shifted rows are shifted back."""
    length = tokens_1L.shape[1]
    ahead = int(model.shifted)
    plan = step(form, (0, length), (ahead, length + ahead), (0, 0))
    return model.forward(tokens_1L, plan, model.new_cache(length + ahead))[0]


def gap(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return float((actual.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("layout", [one for one in CONFIGS if one != "llada"])  # see tests/golden
def test_a_loaded_checkpoint_is_the_published_architecture(layout: str, tmp_path: Path) -> None:
    base = {} if "rope_parameters" in CONFIGS[layout] else {"rope_theta": 5000.0}
    folder = tiny_checkpoint(layout, tmp_path, seed=7, **base)
    model = load_denoiser(folder)
    forms = ["causal"] if model.attention_form == "causal" else list(FORMS)
    expected = {form: restated(folder, canvas()[0].tolist(), FORMS[form]) for form in forms}
    for form in forms:
        assert gap(ours(model, canvas(), form), expected[form]) < RELATIVE
    if len(forms) > 1:
        assert gap(expected["full"], expected["block_causal"]) > 100 * RELATIVE
    whole = ours(model, canvas(), forms[-1])
    shard(folder)
    assert torch.equal(ours(load_denoiser(folder), canvas(), forms[-1]), whole)


AUTOREGRESSIVE = ("model.attention_form=causal", "model.block=null", "model.shifted=true")
SETTINGS = [  # yaml of a model, the layout of its weights, and its own decoder
    ("wedlm-8b", "wedlm", ["decoder=wedlm"]),
    ("wedlm-8b-instruct", "wedlm", ["decoder=wedlm_blocks"]),
    ("i-dlm-8b", "sdar", ["decoder=idlm"]),
    ("nemotron-labs-diffusion-8b", "nemotron_diffusion", ["decoder=nemotron", *AUTOREGRESSIVE]),
]


@pytest.mark.parametrize(("name", "layout", "settings"), SETTINGS)
def test_weights_of_2026_are_decoded_as_their_yaml_says(name, layout, settings, tmp_path) -> None:
    """Without a warning; those that verify give the text of one token per forward."""
    path = str(tiny_checkpoint(layout, tmp_path, seed=7))
    config = compose([f"model={name}", *settings])
    own = {"path": path, "chat": False, "mask_token": None, "dtype": "float32", "device": "cpu"}
    loaded = load_model(ModelSpec(**{**config["model"], **own}))

    def decoded(settings: list[str]) -> tuple[Any, tuple[int, ...]]:
        decoder = decoder_of(compose(settings)["decoder"])
        request = Request("settings", tuple(canvas()[0].tolist()), NEW)
        return decoder.summary(), decoder.generate(loaded.denoiser, request).ids

    summary, ids = decoded(settings)
    assert len(ids) == NEW
    if loaded.attention_form == "causal":
        assert ids == decoded(["decoder=ar_speculative"])[1]
    else:
        assert loaded.attention_warning(str(summary.attention), summary.block or 0) is None
        assert loaded.attention_warning("block_causal", 16)


def test_the_selection_bias_stays_in_float32(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llada2", tmp_path, seed=7)
    gate = load_model(spec(folder, dtype="bfloat16")).denoiser.module.model.layers[1].mlp.gate
    assert gate.e_score_correction_bias.dtype == torch.float32
    assert gate.weight.dtype == torch.bfloat16


PUBLISHED = yaml.safe_load((Path(__file__).parents[2] / "data/published_sizes.yaml").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_give_published_parameter_counts(name: str) -> None:
    """On the meta device: nothing is allocated, and names of all tensors are worked out."""
    published = PUBLISHED[name]
    adapter = ADAPTERS[published["adapter"]]
    with torch.device("meta"):
        module = build_module(adapter, published["sizes"], "sdpa")
    parameters = sum(parameter.numel() for parameter in module.parameters())
    assert round(parameters / 1e9, 3) == published["billions"]
    expected = published_shapes(adapter, shapes_of(module))
    buffers = sum(b.numel() for n, b in module.named_buffers() if n in shapes_of(module))
    assert sum(math.prod(shape) for shape in expected.values()) == parameters + buffers


OWN = ("rope", "tie", "model_type")  # keys of a family
SIZES = {key: one for key, one in tiny_config("qwen2").items() if not key.startswith(OWN)}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE = {"rope_type": "default", "rope_theta": 1e6}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {"tie_word_embeddings": True, "rope_parameters": ROPE},
    "Qwen3": {"head_dim": 16, "rope_parameters": ROPE},
    "Llama": {"rope_parameters": LLAMA3},
}


def random_model(family: str, **changes: Any) -> Any:
    """Return a model of transformers; `changes` go into its config."""
    import transformers

    torch.manual_seed(0)
    if family != "Gemma4":
        config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | changes)
        return getattr(transformers, f"{family}ForCausalLM")(config).eval()
    text = {
        **SIZES,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 6,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "final_logit_softcapping": 5.0,
    }
    vision = {"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 4, "patch_size": 2}
    audio = {"audio_embed_dim": 16}
    parts = {"text_config": text, "vision_config": vision, "audio_config": audio}
    config = transformers.Gemma4UnifiedConfig(**parts)
    return transformers.Gemma4UnifiedForConditionalGeneration(config).eval()


@pytest.fixture(params=[*FAMILIES, "Gemma4"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, TransformerDenoiser]:
    """Return a random model of transformers, and what is read of it where it was saved.

    Gemma's layers see a window of 6 positions, less than is fed.
    """
    theirs = random_model(request.param)
    for parameter in theirs.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(str(tmp_path))
    return theirs, load_denoiser(tmp_path)


def test_a_model_saved_by_transformers_is_the_same_here(saved) -> None:
    theirs, model = saved
    tokens_1L = torch.randint(4, VOCAB, (1, LENGTH))
    with torch.inference_mode():
        expected = theirs(tokens_1L).logits[0].double()
    assert model.attention_form == "causal"
    assert gap(ours(model, tokens_1L, "causal"), expected) < RELATIVE
    kv, outputs = model.new_cache(LENGTH), []
    for start, stop in ((0, 9), (9, 10), (10, 17), (17, LENGTH)):
        plan = step("causal", (start, stop), (start + 1, stop + 1), (start, stop))
        outputs.append(model.forward(tokens_1L, plan, kv)[0])
        kv.keep(plan, FIRST)
    assert gap(torch.cat(outputs), expected) < RELATIVE


def test_gemma_whose_layers_share_their_keys_is_refused(tmp_path: Path) -> None:
    random_model("Gemma4").save_pretrained(str(tmp_path))
    respelled(tmp_path, num_kv_shared_layers=2)
    with pytest.raises(DllmBenchError, match="num_kv_shared_layers=2"):
        load_denoiser(tmp_path)


FEEDS = [  # (start, stop) of every request in three forwards, beginning with the prompts
    [(0, 9), (0, 1), (0, 14), (0, 4)],
    [(9, 10), (1, 8), (14, 17), (4, 6)],
    [(10, 16), (8, 9), (17, 18), (6, 13)],
]


def test_batched_requests_are_those_of_whole_texts(saved) -> None:
    theirs, model = saved
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(4, VOCAB, (1, LENGTH - r), generator=generator) for r in range(4)]
    with torch.inference_mode():
        wholes = [theirs(tokens_1L).logits[0].double() for tokens_1L in tokens]
    caches = [model.new_cache(tokens_1L.shape[1]) for tokens_1L in tokens]
    for feeds in FEEDS:
        rows = [(max(stop - 1, start + 1), stop + 1) for start, stop in feeds]
        plans = [step("causal", feed, row, feed) for feed, row in zip(feeds, rows, strict=True)]
        found = model.forward_batch(tokens, plans, caches)
        for one, whole, kv, plan in zip(found, wholes, caches, plans, strict=True):
            assert gap(one[0], whole[plan.rows[0] - 1 : plan.rows[1] - 1]) < RELATIVE
            kv.keep(plan, FIRST)


# --- DiffusionGemma -------------------------------------------------------------------------------

CANVAS, TEXT = 8, 21


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint as transformers writes it, vision tower included."""
    theirs = scaled_apart(published(4, canvas=CANVAS, layers=(SLIDING, FULL), window=8))
    theirs.save_pretrained(str(tmp_path))
    return tmp_path


def logits(model: Any, parts: tuple[int, ...] = (TEXT,)) -> Tensor:
    """Of a canvas behind a text that is encoded in parts which end at these positions."""
    numbers = torch.Generator().manual_seed(1)
    tokens_1L = torch.randint(3, 500, (1, TEXT + CANVAS), generator=numbers)
    mean_1CH = torch.randn(1, CANVAS, model.hidden_size, generator=numbers).to(model.dtype)
    kv = model.new_cache(TEXT + CANVAS)
    for start, stop in zip((0, *parts), parts, strict=False):
        span = (start, stop)
        plan = ForwardPlan(ForwardKind.PREFILL, span, span, span, "block_causal", 1)
        model.forward(tokens_1L, plan, kv)
        kv.keep(plan, FIRST)
    span = (TEXT, TEXT + CANVAS)
    plan = ForwardPlan(ForwardKind.DENOISE, span, span, (0, 0), added_KFH=mean_1CH)
    return model.forward(tokens_1L, plan, kv)


def test_text_encoded_in_parts_is_text_encoded_at_once(folder: Path) -> None:
    model = load_denoiser(folder)
    whole = logits(model)
    for parts in ((1, TEXT), (7, 8, TEXT), (12, 20, TEXT)):
        torch.testing.assert_close(logits(model, parts), whole, atol=2e-5, rtol=1e-5)


def test_settings_may_be_flat_as_in_a_release_or_nested(folder: Path) -> None:
    nested = logits(load_denoiser(folder))
    respelled(folder, per_layer_config="absent", global_head_dim=32, num_global_key_value_heads=1)
    assert torch.equal(logits(load_denoiser(folder)), nested)


def test_kernels_and_dtypes(folder: Path) -> None:
    expected = logits(load_denoiser(folder))
    eager = load_model(ModelSpec("eager", str(folder), dtype="float32", attention="eager"))
    torch.testing.assert_close(logits(eager.denoiser), expected, atol=2e-5, rtol=1e-5)
    half = load_model(ModelSpec("half", str(folder), dtype="bfloat16"))
    assert half.metadata.parameters == sum(p.numel() for p in half.denoiser.module.parameters())
    found = logits(half.denoiser)
    assert found.dtype == torch.float32
    assert (found - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_vision_and_an_encoder_that_is_stored_twice_are_not_read(folder: Path) -> None:
    file, before = folder / "model.safetensors", logits(load_denoiser(folder))
    tensors = load_file(file)
    assert any("vision" in name for name in tensors)
    shared = [name for name in tensors if name.startswith("model.decoder.layers.")]
    for name in (name for name in shared if not name.endswith("layer_scalar")):
        encoder = name.replace("model.decoder.", "model.encoder.language_model.")
        tensors[encoder] = torch.full_like(tensors[name], torch.nan)
    save_file(tensors, file)
    assert torch.equal(logits(load_denoiser(folder)), before)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"num_experts": "absent"}, "no 'num_experts'"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=3, and the weights beside it have 2"),
    ],
)
def test_configs_that_would_be_read_wrongly_are_refused(folder, change, named) -> None:
    respelled(folder, **change)
    with pytest.raises(DllmBenchError, match=named):
        load_denoiser(folder)


def test_a_missing_tensor_is_named_as_published(folder: Path) -> None:
    file = folder / "model.safetensors"
    kept = {n: t for n, t in load_file(file).items() if not n.endswith("1.layer_scalar")}
    save_file(kept, file)
    with pytest.raises(DllmBenchError, match=r"encoder\.language_model\.layers\.1\.layer_scalar"):
        load_denoiser(folder)


def test_an_object_of_transformers_class_is_not_wrapped() -> None:
    theirs = published(1, canvas=CANVAS, layers=(FULL,))
    with pytest.raises(DllmBenchError, match="DiffusionGemmaForBlockDiffusion is no class") as no:
        db.wrap(theirs, tiny_tokenizer())
    assert "DiffusionGemmaForCausalLM" not in str(no.value)
