"""Laws of the forward on tiny random models, and published layouts, loaded through the real path,
against a float64 implementation of each.

Also: models as transformers saves them against its own whole models, batched forwards of these,
published sizes, and DiffusionGemma's checkpoint: what is read of it, in which forms, and what is
refused. Branches are compared with those of fixed shapes in `test_acceleration`.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dllm_bench as db
from dllm_bench.api.compose import compose
from dllm_bench.core.denoiser import ForwardPlan, PositionSets
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request, SpecialTokens
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.attention import MaskShape, attention_mask, mask_of_sets
from dllm_bench.models.checkpoint import published_shapes, shapes_of
from dllm_bench.models.kv import LENGTHENS, PositionCache
from dllm_bench.models.load import build_module, load_model
from dllm_bench.models.spec import ModelSpec
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.models.wrapped import FunctionDenoiser
from dllm_bench.store.inputs import decoder_of
from tests.canvas import FULL, SLIDING, published, scaled_apart
from tests.helpers import (
    CONFIGS,
    IDS,
    ROLES,
    VOCAB,
    load_denoiser,
    shard,
    tiny_checkpoint,
    tiny_config,
    tiny_denoiser,
    tiny_tokenizer,
    whole_forward,
)
from tests.unit.models.common import respelled, spec
from tests.unit.models.restated import Sees, restated

LENGTH, PROMPT = 29, 5
MASK = IDS["<|mask|>"]
FIRST = torch.tensor(0)


@pytest.fixture(scope="module", params=("llada", "dream"))
def model(request: pytest.FixtureRequest) -> TransformerDenoiser:
    return tiny_denoiser(request.param, seed=3)


def canvas(seed: int = 0) -> Tensor:
    """Return tokens with about half of the positions after the prompt masked."""
    generator = torch.Generator().manual_seed(seed)
    tokens_1L = torch.randint(0, VOCAB - len(IDS), (1, LENGTH), generator=generator)
    masked_1L = torch.rand(1, LENGTH, generator=generator) < 0.5
    masked_1L[:, :PROMPT] = False
    return tokens_1L.masked_fill(masked_1L, MASK)


def plan(
    feed: tuple[int, int], rows: tuple[int, int] | None = None, store: tuple[int, int] = (0, 0)
) -> ForwardPlan:
    return ForwardPlan(ForwardKind.DENOISE, feed, rows or feed, store)


def forward(model: TransformerDenoiser, what: ForwardPlan, kv: PositionCache) -> None:
    """Make a forward whose K/V are kept."""
    model.forward(canvas(), what, kv)
    kv.keep(what, FIRST)


def test_a_shorter_canvas_hides_the_cached_positions_behind_it(model: TransformerDenoiser) -> None:
    """What is stored may also begin behind what is fed."""
    start, stop, end = 8, 16, 24
    window, logits = plan((start, stop)), []
    for stores in ([(0, LENGTH)], [(0, end)], [(0, 11), (11, end)]):
        kv = model.new_cache(LENGTH)
        for store in stores:
            forward(model, plan((0, LENGTH), (start, stop), store), kv)
        logits.append(model.forward(canvas()[:, :end], window, kv))
    torch.testing.assert_close([logits[0]] * 2, logits[1:], atol=1e-5, rtol=1e-5)


def test_the_cache_changes_with_no_forward_that_is_not_kept_and_with_no_logits(model) -> None:
    """A decoder writes -inf into logits."""
    kv, after = model.new_cache(LENGTH), plan((13, LENGTH))
    forward(model, plan((0, LENGTH), (PROMPT, LENGTH), (0, 13)), kv)
    before = model.forward(canvas(), after, kv)
    expected = before.clone()
    with torch.inference_mode():
        before.fill_(0.0)
    model.forward(canvas(seed=9), plan((8, LENGTH), (PROMPT + 8, LENGTH), (8, 20)), kv)
    assert kv.length == 13
    assert torch.equal(model.forward(canvas(), after, kv), expected)


def test_misuse_raises_an_error(model: TransformerDenoiser) -> None:
    kv = model.new_cache(LENGTH)
    with pytest.raises(ValueError, match="only 0 are cached"):
        model.forward(canvas(), plan((4, LENGTH)), kv)
    with pytest.raises(ValueError, match=r"Rows \(2, 10\) of \(0, 8\)"):
        model.forward(canvas(), plan((0, 8), (2, 10)), kv)
    step = plan((0, LENGTH), (PROMPT, LENGTH), (0, 13))
    with pytest.raises(ValueError, match="last forward"):
        kv.keep(step, FIRST)
    forward(model, step, kv)
    with pytest.raises(ValueError, match="last forward"):
        kv.keep(step, FIRST)
    gap = plan((0, LENGTH), (PROMPT, LENGTH), (20, 25))
    model.forward(canvas(), gap, kv)
    with pytest.raises(ValueError, match="Cannot store"):
        kv.keep(gap, FIRST)


def test_a_shifted_window_needs_the_row_before_it() -> None:
    model = tiny_denoiser("dream", seed=3)
    kv = model.new_cache(LENGTH)
    forward(model, plan((0, LENGTH), (0, 8), (0, LENGTH)), kv)
    with pytest.raises(DllmBenchError, match=r"shifted by one .* position 12"):
        model.forward(canvas(), plan((12, 20)), kv)
    inside = model.forward(canvas(), plan((12, 20), (13, 20)), kv)
    whole = whole_forward(model, canvas())[:, 13:20]
    torch.testing.assert_close(inside, whole, atol=1e-5, rtol=1e-5)


SPECIAL = SpecialTokens(**ROLES)


def test_a_function_gives_every_row_where_no_branch_sees_them_all(model) -> None:
    ends_K, last = torch.tensor([9, 12]), 20
    what = replace(plan((0, last), (PROMPT, last)), visible_K=ends_K)
    function = FunctionDenoiser(partial(whole_forward, model), SPECIAL, shifted=False)
    found, law = (
        one.forward(canvas().expand(2, -1), what, one.new_cache(LENGTH))
        for one in (function, model)
    )
    assert found.shape == law.shape
    for end, of_function, of_model in zip(ends_K - PROMPT, found, law, strict=True):
        torch.testing.assert_close(of_function[:end], of_model[:end], atol=1e-5, rtol=1e-5)


def test_a_module_as_a_function_is_evaluated_and_keeps_its_modes() -> None:
    module = nn.Sequential(nn.Embedding(VOCAB, 4), nn.Dropout(), nn.Linear(4, VOCAB).eval())
    model, what = FunctionDenoiser(module, SPECIAL, shifted=False), plan((0, LENGTH))
    one, other = (model.forward(canvas(), what, model.new_cache(0)) for _ in range(2))
    assert one.equal(other)
    assert [part.training for part in module] == [True, True, False]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda ids: torch.zeros(*ids.shape, 40), "logits of 40 tokens.*mask=95"),
        (lambda ids: torch.zeros(*ids.shape, VOCAB, dtype=torch.long), "returned torch.int64"),
        (lambda ids: torch.zeros(*ids.shape, VOCAB).numpy(), r"returned float32 \(1, 1, 96\)"),
    ],
)
def test_a_function_of_other_logits_is_refused(function, words: str) -> None:
    with pytest.raises(DllmBenchError, match=words):
        FunctionDenoiser(function, SPECIAL, shifted=False)


def naive(shape: MaskShape, visible: list[int] | None) -> Tensor:
    """(Q, keys) True where seen, position by position."""
    fed, cached = list(range(*shape.feed)), [p for span in shape.cached for p in range(*span)]
    keys = [(None, p) for p in cached] + [(k, p) for k in range(shape.branches) for p in fed]

    def sees(branch: int, query: int, owner: int | None, key: int) -> bool:
        own = owner is None or owner == branch
        open_ = owner is None or visible is None or key < visible[owner]
        ordered = shape.block == 0 or shape.block_index(key) <= shape.block_index(query)
        return own and open_ and ordered

    queries = [(k, p) for k in range(shape.branches) for p in fed]
    return torch.tensor([[sees(*query, *key) for key in keys] for query in queries])


def test_the_mask_of_sets_is_that_of_equal_spans() -> None:
    fed, cached, ends_K = torch.arange(4, 9), torch.arange(4), torch.tensor([7])
    spans = plan((4, 9))
    for window, visible_K, alone in product((0, 3), (None, ends_K), (None, 6)):
        shape = MaskShape(1, (4, 9), ((0, 4),), window=window, alone=alone)
        expected = attention_mask(shape, visible_K, torch.float32, torch.device("cpu"))
        sets = PositionSets(fed, cached, fed)
        scattered = replace(spans, sets=sets, visible_K=visible_K, alone=alone)
        mask = mask_of_sets(scattered, window, torch.float32)
        if mask is None or expected is None:
            assert mask is expected
        else:
            assert torch.equal(mask, expected.expand_as(mask))


@pytest.mark.parametrize("seed", range(40))
def test_masks_equal_the_rule_position_by_position(seed: int) -> None:
    draw = random.Random(seed)
    start, fed, branches = draw.randint(0, 9), draw.randint(1, 9), draw.randint(1, 3)
    stop = start + fed
    spans = [(0, start), (stop, stop + draw.randint(0, 4))]
    cached = tuple(span for span in spans if span[0] < span[1])
    shape = MaskShape(branches, (start, stop), cached, draw.randint(1, 6), draw.choice([0, 3]))
    visible = [draw.randint(start + 1, stop) for _ in range(branches)] if seed % 2 else None
    ends_K = None if visible is None else torch.tensor(visible)
    mask = attention_mask(shape, ends_K, torch.float32, torch.device("cpu"))
    expected = naive(shape, visible)
    if mask is None:
        assert expected.all()
    else:
        assert torch.equal((mask == 0).expand(1, 1, *expected.shape)[0, 0], expected)


@pytest.mark.parametrize("shape", [MaskShape(1, (9, 13), ((0, 9),)), MaskShape(3, (5, 8), ())])
def test_rows_of_masks_begin_where_a_cuda_device_can_read(shape: MaskShape) -> None:
    """torch's kernel reads eight numbers of bfloat16 at a time; a view that begins elsewhere
    crashes it."""
    for stop in (*range(13, 22), *range(1020, 1030)):
        causal = MaskShape(1, (stop - 4, stop), ((0, stop - 4),), block=1)
        for one in (replace(shape, block=2), causal):
            mask = attention_mask(one, None, torch.bfloat16, torch.device("cpu"))
            assert mask is not None
            assert mask.storage_offset() % 8 == mask.stride(2) % 8 == 0
        assert torch.equal(mask[0, 0] == 0, naive(causal, None))


POSITIONS, BRANCHES = 16, 40


def test_buffers_of_a_rising_need_move_a_few_times_and_the_trace_counts_them() -> None:
    """Branches behind a prefix that grows by a position need more room in every forward."""
    cache, generator = PositionCache(2, POSITIONS), torch.Generator().manual_seed(0)
    moved = []
    for start in range(POSITIONS):
        feed, count = (start, start + 1), BRANCHES if start else 1
        step = plan(feed, store=feed)
        fresh = torch.randn(1, 2, count, 4, generator=generator)
        cache.begin(step, POSITIONS)
        for layer in range(2):
            before = cache.positions[layer].stored
            known = None if before is None else before[0][:, :, :start].clone()
            keys, values = cache.update(fresh, -fresh, layer)
            assert known is None or keys[:, :, :start].equal(known)
            assert keys[:, :, start:].equal(fresh) and values[:, :, start:].equal(-fresh)
        moved.append(cache.execution.moved)
        cache.hold(step, torch.zeros(count, 1, 3))
        cache.keep(step, torch.tensor(count - 1))
    assert moved == [False, True, True] + [False] * (POSITIONS - 3)
    kept = cache.positions[0].stored
    assert kept is not None and kept[0].shape[2] < LENGTHENS * (POSITIONS + BRANCHES)


# --- published layouts ----------------------------------------------------------------------------

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


def logits(model: Any) -> Tensor:
    """Of a canvas behind a text."""
    numbers = torch.Generator().manual_seed(1)
    tokens_1L = torch.randint(3, 500, (1, TEXT + CANVAS), generator=numbers)
    mean_1CH = torch.randn(1, CANVAS, model.hidden_size, generator=numbers).to(model.dtype)
    kv = model.new_cache(TEXT + CANVAS)
    text, span = (0, TEXT), (TEXT, TEXT + CANVAS)
    plan = ForwardPlan(ForwardKind.PREFILL, text, text, text, "block_causal", 1)
    model.forward(tokens_1L, plan, kv)
    kv.keep(plan, FIRST)
    plan = ForwardPlan(ForwardKind.DENOISE, span, span, (0, 0), added_KFH=mean_1CH)
    return model.forward(tokens_1L, plan, kv)


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
