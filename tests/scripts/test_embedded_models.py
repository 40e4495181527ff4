"""Training of the embedded models: layouts as exported and read back, adaptation, block diffusion;
their tokenizer is lossless, stable and agrees with every shipped asset.

The training network is compared with transformers' classes, which the package loads from what
`export` wrote; matrix products are in float32, so that only the order of additions differs. The
embedded DiffusionGemma is trained on the network that decoding runs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models import load as loading
from dllm_bench.models.canvas import CanvasDenoiser
from dllm_bench.models.sources import SHIPPED_MODELS
from dllm_bench.models.spec import ModelSpec
from dllm_bench.paths import assets_dir
from dllm_bench.training import loop
from scripts.embedded import __main__ as command
from scripts.embedded import adapt, canvas, data, export, network, objectives
from scripts.embedded import tokenizer as embedded
from scripts.embedded import train as training
from scripts.embedded.items import task_pairs
from scripts.embedded.optim import Muon
from scripts.embedded.recipes import RECIPES
from scripts.embedded.tasks import minicode, minigsm
from scripts.embedded.train import train
from tests.canvas import canvas_decoder
from tests.helpers import load_denoiser
from tests.tiers import covering

TOLERANCE = 1e-4  # float32, states of size 1
BLOCK, LENGTH = 4, 64
TOKENIZER = embedded.build_tokenizer()
VOCABULARY = training.vocabulary_of(TOKENIZER)


@pytest.fixture(autouse=True)
def _float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "half", lambda tensor: tensor)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _random(layout: str) -> tuple[network.Weights, network.NetworkSizes]:
    sizes = network.sizes_of_layout(layout, len(TOKENIZER))
    weights = network.initial_weights(sizes, 3, list(range(100)))
    return {n: w.bfloat16().float() for n, w in weights.items()}, sizes


def _states(
    weights: network.Weights,
    sizes: network.NetworkSizes,
    ids_BL: torch.Tensor,
    bias: torch.Tensor | None = None,
    positions_L: torch.Tensor | None = None,
) -> torch.Tensor:
    positions_L = torch.arange(ids_BL.shape[1]) if positions_L is None else positions_L
    return network.hidden_states(weights, sizes, ids_BL, network.rotary(sizes, positions_L), bias)


def _places(example: objectives.Example) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row, column) of each position that is scored."""
    width = example.inputs_BL.shape[1]
    return example.rows_N // width, example.rows_N % width


@pytest.mark.parametrize("layout", list(network.LAYOUTS))
def test_a_layout_is_read_back_as_it_was_trained(layout: str, tmp_path: Path) -> None:
    weights, sizes = _random(layout)
    export.write_checkpoint(tmp_path, weights, sizes, layout, TOKENIZER)
    loaded = loading.load_model(ModelSpec("made", str(tmp_path), dtype="float32", device="cpu"))
    assert loaded.metadata.adapter == layout
    model: Any = loaded.denoiser.module.model  # type: ignore[attr-defined]
    ids_BL = torch.randint(300, 600, (2, 24), generator=seeded(0))
    states_BLD = model.embed_tokens(ids_BL)
    rotation = model.rotary_emb(states_BLD, torch.arange(24)[None])
    mask = torch.zeros(1, 1, 24, 24)
    for layer in model.layers:
        states_BLD = layer(states_BLD, attention_mask=mask, position_embeddings=rotation)
    assert (_states(weights, sizes, ids_BL) - model.norm(states_BLD)).abs().max() < TOLERANCE
    read = export.read_weights(tmp_path, sizes, layout)  # where another model starts
    assert {n: tuple(w.shape) for n, w in read.items()} == network.shapes(sizes)
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def test_a_folder_of_another_training_or_vocabulary_is_refused(tmp_path: Path) -> None:
    torch.save({"model": "tiny-llada"}, tmp_path / "state.pt")
    with pytest.raises(DllmBenchError, match="training of tiny-llada, and tiny-d2f-dream-base "):
        training.train("tiny-d2f-dream-base", tmp_path)
    export.write_checkpoint(tmp_path, *_random("qwen3"), "qwen3", TOKENIZER)
    with pytest.raises(DllmBenchError, match="starts from a tiny-qwen3-fixed of 552 words"):
        training.prepare(replace(RECIPES["tiny-trunk-qwen3"], pool_size=20), None, tmp_path)


def test_a_loss_that_is_no_number_ends_a_training(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    recipe = replace(RECIPES["tiny-dream-base-free"], pool_size=60, batch_tokens=800)
    lost = torch.tensor(torch.nan, requires_grad=True)
    monkeypatch.setattr(training, "loss_of", lambda *_: lost * 1)
    with pytest.raises(DllmBenchError, match="tiny-dream-base-free is nan at step 0"):
        training.train(recipe.name, tmp_path / "model", recipe=recipe)
    assert not (tmp_path / "model").exists()


EXPERTS = network.Experts(3, 3, 128, shared=False, dense_layers=1, score="softmax")
MORE = {"vocab_size": len(TOKENIZER), "n_kv_heads": 4}


@pytest.mark.parametrize(
    ("layout", "words", "changes"),  # all experts chosen are the MLP they were cut from
    [("qwen3", len(embedded.first_pieces()), MORE), ("llada", 600, {"experts": EXPERTS})],
)
def test_more_words_heads_and_experts_change_nothing(layout, words, changes, monkeypatch) -> None:
    monkeypatch.setattr(adapt, "COPY_NOISE", 0.0)  # of experts
    source = network.sizes_of_layout(layout, words)
    weights, target = network.initial_weights(source, 0, [300]), replace(source, **changes)
    made = adapt.adapted(weights, source, target, 0)
    assert {n: tuple(w.shape) for n, w in made.items()} == network.shapes(target)
    for name in made:
        if name.endswith(".router"):
            made[name].zero_()
    ids_BL = torch.arange(300, 330)[None]
    before, after = _states(weights, source, ids_BL), _states(made, target, ids_BL)
    assert torch.allclose(before, after, atol=1e-5)


def test_no_expert_holds_a_neuron_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapt, "COPY_NOISE", 0.0)
    for layout in ("llada_moe", "llada2"):
        source, target = network.sizes_of_layout("sdar", 600), network.sizes_of_layout(layout, 600)
        made = adapt.adapted(network.initial_weights(source, 0, [300]), source, target, 0)
        assert {n: tuple(w.shape) for n, w in made.items()} == network.shapes(target)
        assert target.experts
        for gate in made["1.gate"].split(target.experts.size):
            assert len({tuple(row.tolist()) for row in gate}) == target.experts.size


@pytest.mark.parametrize("layout", ["llada", "dream"])
def test_an_adapter_is_added_to_the_weights_it_was_trained_on(layout: str, tmp_path: Path) -> None:
    weights, sizes = _random(layout)
    recipe = replace(RECIPES["tiny-d2f-dream-long"], layout=layout)
    lora = training._new_lora(weights, recipe)
    lora = {n: (torch.randn_like(t) * 0.1).bfloat16().float() for n, t in lora.items()}
    export.write_checkpoint(tmp_path / "base", weights, sizes, layout, TOKENIZER)
    export.write_adapter(tmp_path / "lora", lora, "base", recipe.lora_rank, layout)
    base, adapter = str(tmp_path / "base"), str(tmp_path / "lora")
    spec = ModelSpec("made", base, lora=adapter, dtype="float32", device="cpu")
    loaded: Any = loading.load_model(spec).denoiser
    for part in "qkvo":
        made = getattr(loaded.module.model.layers[1].self_attn, f"{part}_proj").weight
        update = lora[f"1.{part}.B"] @ lora[f"1.{part}.A"]
        assert torch.allclose(made, weights[f"1.{part}"] + update, atol=1e-5)


def test_muon_is_torchs_in_another_type() -> None:
    rng = seeded(0)
    for shape in ((8, 8), (24, 8), (8, 24)):
        ours, theirs = (torch.ones(shape, requires_grad=True) for _ in range(2))
        made = Muon([ours], {"lr": 0.1})
        known = torch.optim.Muon([theirs], 0.1, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
        for _ in range(3):
            ours.grad = torch.randn(shape, generator=rng)
            theirs.grad = ours.grad.clone()
            made.step()
            known.step()
        moves = [(matrix.detach() - 1).flatten() for matrix in (ours, theirs)]
        assert torch.cosine_similarity(*moves, dim=0) > 0.999  # theirs is in bf16
        assert moves[0].norm() == pytest.approx(moves[1].norm(), rel=0.01)


@cache
def _batch(count: int = 6, length: int = LENGTH) -> data.Batch:
    pool = data.make_pool(task_pairs("minirule", "train", 40, 0), chat=False)
    return data.draw_rows(pool, count, length, seeded(0), TOKENIZER.eos_token_id, False)


def test_a_noised_block_sees_itself_and_clean_text_and_is_scored_by_its_own_tokens() -> None:
    batch, (weights, sizes) = _batch(), _random("sdar")
    example = objectives.blocks(batch, VOCABULARY, seeded(1), 0, BLOCK)
    states_BLD = _states(weights, sizes, example.inputs_BL, example.bias, example.positions_L)
    rows_N, columns_N = _places(example)
    row, position = int(rows_N[0]), int(columns_N[0])
    start = position // BLOCK * BLOCK
    block_L = example.inputs_BL[row, start : start + BLOCK]
    seen_1L = torch.cat([batch.ids_BL[row, :start], block_L])[None]
    alone_BLD = _states(weights, sizes, seen_1L, objectives.causal_mask(start + BLOCK, BLOCK))
    assert torch.allclose(states_BLD[row, position], alone_BLD[0, position], atol=TOLERANCE)
    assert int(columns_N.max()) < LENGTH
    assert (example.inputs_BL[rows_N, columns_N] == VOCABULARY.mask_id).all()
    assert (batch.ids_BL[rows_N, columns_N] == example.targets_N).all()
    assert (columns_N >= batch.prompt_B[rows_N]).all()
    assert torch.equal(example.inputs_BL[:, LENGTH:], batch.ids_BL)
    sums_B = torch.zeros(len(batch.ids_BL)).index_add_(0, rows_N, example.weights_N)
    assert torch.allclose(sums_B, torch.full_like(sums_B, 1 / len(sums_B)))


def test_complementary_rows_mask_each_scored_position_once() -> None:
    """But for a block's first position, which follows the clean block before it."""
    batch = _batch()
    count = len(batch.ids_BL)
    example = objectives.complementary(batch, VOCABULARY, seeded(2), 1, BLOCK)
    rows_N, columns_N = _places(example)
    clean_N, at_N = columns_N >= LENGTH, columns_N % LENGTH + 1
    assert ((at_N % BLOCK == 0) == clean_N).all() and clean_N.any() and not clean_N.all()
    assert (batch.ids_BL[rows_N % count, at_N] == example.targets_N).all()
    masked_BL = example.inputs_BL[:, :LENGTH] == VOCABULARY.mask_id
    assert masked_BL[rows_N, at_N].equal(~clean_N)
    asked = [*zip(rows_N[~clean_N].tolist(), at_N[~clean_N].tolist(), strict=True)]
    once = [(row % count, at) for row, at in asked]
    assert len(once) == len(set(once)) and {row // count for row, _ in asked} == {0, 1}


def test_masks_are_fed_last_as_in_decoding() -> None:
    """A row of a window alone, its rows in the order in which WeDLM feeds them."""
    batch, (weights, sizes) = _batch(), _random("wedlm")
    example = objectives.feed_order(batch, VOCABULARY, seeded(1), 0, 16)
    assert example.bias is not None
    states_BLD = _states(weights, sizes, example.inputs_BL, example.bias, example.positions_L)
    masked_BL = example.inputs_BL[:, :LENGTH] == VOCABULARY.mask_id
    seen_BLL = example.bias[:, 0, :LENGTH, :LENGTH] == 0
    mixed, drafts = 0, 0
    for row, at in {(int(row), int(at)) for row, at in zip(*_places(example), strict=True)}:
        if at >= LENGTH:
            continue
        window = [p for p in range(LENGTH) if seen_BLL[row, at, p] or seen_BLL[row, p, at]]
        masks = [p for p in window if masked_BL[row, p]]
        clean = [p for p in window if not masked_BL[row, p]]
        is_draft = bool(seen_BLL[row, window][:, window].all())
        if is_draft and len(masks) > 1:
            assert clean == [window[0]] and window[0] < masks[0], "a token, then masks"
        drafts += is_draft and len(masks) > 1
        mixed += not is_draft and bool(clean) and max(clean) > at
        order = [*range(window[0]), *clean, *masks]
        both = torch.cat([batch.ids_BL[row], example.inputs_BL[row, :LENGTH]])
        fed = torch.tensor([p + LENGTH * (p >= window[0]) for p in order])
        mask = objectives.causal_mask(len(order))
        if is_draft:
            mask[window[0] :, window[0] :] = 0.0
        alone_BLD = _states(weights, sizes, both[fed][None], mask, torch.tensor(order))
        assert torch.allclose(states_BLD[row, at], alone_BLD[0, order.index(at)], atol=TOLERANCE)
    assert mixed > 3 and drafts > 3


def test_a_mask_of_a_stride_predicts_the_position_behind_it() -> None:
    """From the clean text before its run and the masks of the run up to itself."""
    batch, (weights, sizes), run = _batch(), _random("qwen3"), 3
    example = objectives.strides(batch, VOCABULARY, seeded(1), 1, run)
    assert example.bias is not None
    states_BLD = _states(weights, sizes, example.inputs_BL, example.bias, example.positions_L)
    behind = set()
    for row, at, target in torch.stack([*_places(example), example.targets_N], 1).tolist():
        assert target == batch.ids_BL[row, at % LENGTH + 1]
        if at >= LENGTH:
            continue
        start = int((example.bias[0, 0, at, :LENGTH] == 0).nonzero()[0])
        run_of = example.inputs_BL[row, start : at + 1].tolist()
        assert len(run_of) <= run and run_of[-1] == VOCABULARY.mask_id
        behind.add(run_of.count(VOCABULARY.mask_id))
        text = torch.tensor([[*batch.ids_BL[row, :start].tolist(), *run_of]])
        alone_BLD = _states(weights, sizes, text, objectives.causal_mask(text.shape[1]))
        assert torch.allclose(states_BLD[row, at], alone_BLD[0, -1], atol=TOLERANCE)
    assert behind == {1, 2, 3}


@pytest.mark.parametrize(("name", "shift"), [("feed_order", 0), ("strides", 1)])
def test_the_clean_copy_predicts_the_next_token_of_the_answer(name: str, shift: int) -> None:
    batch, rng = _batch(), seeded(1)
    example = getattr(objectives, name)(batch, VOCABULARY, rng, shift, 4)
    plain = objectives.causal(batch, VOCABULARY, rng, 1)
    rows_N, columns_N = _places(example)
    clean_N = columns_N >= LENGTH
    assert (rows_N * LENGTH + columns_N % LENGTH)[clean_N].tolist() == plain.rows_N.tolist()
    assert example.targets_N[clean_N].tolist() == plain.targets_N.tolist()
    assert torch.allclose(example.weights_N[clean_N], plain.weights_N * objectives.NEXT_TOKEN)
    assert example.weights_N[~clean_N].sum().item() == pytest.approx(1.0)


def test_dropped_norms_keep_the_size_of_a_head() -> None:
    weights, source = _random("qwen3")
    target = network.sizes_of_layout("fast_dllm_v2", source.vocab_size)
    weights |= {n: w * 1.7 for n, w in weights.items() if n.endswith(("ln_q", "ln_k"))}
    made = adapt.adapted(weights, source, target, 0)
    assert {n: tuple(w.shape) for n, w in made.items()} == network.shapes(target)
    for part in "qk":
        heads = (made[f"1.{part}"] * weights["1.ln_1"]).view(-1, target.head_dim, target.d_model)
        size = weights[f"1.ln_{part}"].pow(2).mean().sqrt()
        assert heads.pow(2).sum(2).mean(1).sqrt().mean().item() == pytest.approx(size, rel=0.05)


def test_guesses_stand_at_scored_positions_and_are_asked_to_be_right() -> None:
    example = objectives.blocks(_batch(count=200), VOCABULARY, seeded(2), 0, BLOCK)
    guess_N = example.targets_N + 1
    made = objectives.with_guesses(example, guess_N, seeded(3))
    before_N, after_N = (e.inputs_BL.flatten()[example.rows_N] for e in (example, made))
    planted_N = after_N != VOCABULARY.mask_id
    assert torch.equal(after_N[planted_N], guess_N[planted_N])
    assert (before_N == VOCABULARY.mask_id).all()
    assert (made.inputs_BL != example.inputs_BL).sum() == planted_N.sum()
    assert planted_N.float().mean().item() == pytest.approx(0.5, abs=0.1)
    shares = [planted_N[_places(example)[0] == row].float().mean() for row in range(200)]
    assert min(shares) < 0.1 and max(shares) > 0.9
    assert (made.targets_N, made.weights_N) == (example.targets_N, example.weights_N)


def test_a_model_that_edits_is_asked_for_what_it_guessed_itself(tmp_path: Path) -> None:
    weights, sizes = _random("llada2")
    export.write_checkpoint(tmp_path, weights, sizes, "llada2", TOKENIZER)
    recipe = replace(RECIPES["tiny-llada21"], pool_size=60, batch_tokens=800)
    run, rng = training.prepare(recipe, None, tmp_path), seeded(0)
    example = training.make_example(run, recipe.phases[0], rng)
    probable = network.hidden_states
    made = training.plant_guesses(run, example, rng, lambda *given: probable(*given) * 1e4)
    best_N = training.logits_of(run, run.trained, example, probable)
    best_N[:, run.vocabulary.mask_id] = -torch.inf
    after_N = made.inputs_BL.flatten()[example.rows_N]
    planted_N = after_N != run.vocabulary.mask_id
    assert planted_N.any() and torch.equal(after_N[planted_N], best_N.argmax(-1)[planted_N])
    assert training.loss_of(run, run.trained, made, probable).requires_grad


def test_a_drill_of_recall_asks_only_for_what_was_said_before() -> None:
    batch = data.draw_recalls(data.fact_table(TOKENIZER), 20, 96, seeded(0), TOKENIZER.eos_token_id)
    asked = batch.asked_BL[:, :90].view(20, 15, 6)
    for row, said in enumerate(batch.ids_BL[:, :90].view(20, 15, 6)):
        forms = [set(TOKENIZER.decode(sentence)[:-1].split()) for sentence in said]
        facts_said = [words - {"So", "The", "the", "has", "lives"} for words in forms]
        known = [fact in facts_said[:at] for at, fact in enumerate(facts_said)]
        assert asked[row].any(1).tolist() == known
    assert asked.any((0, 1)).tolist() == [False] * 3 + [True] * 2 + [False]
    example = objectives.masked(batch, VOCABULARY, seeded(1), 0, (1.0, 0.0, 0.0))
    assert batch.asked_BL.view(-1)[example.rows_N].all()


@pytest.mark.parametrize("padding", [1.0, 0.1])
def test_of_a_canvas_every_token_counts_once_and_padding_as_asked(padding: float) -> None:
    batch, canvas, length, draws = _batch(length=96), (1.0, 0.0, 0.0), 96, 1500
    mean_BL = torch.zeros(batch.ids_BL.shape)
    for seed in range(draws):
        example = objectives.masked(batch, VOCABULARY, seeded(seed), 0, canvas, padding)
        mean_BL.view(-1).index_add_(0, example.rows_N, example.weights_N / draws)
    for row, (prompt, total) in enumerate(zip(batch.prompt_B, batch.total_B, strict=True)):
        told, rest = int(total - prompt) + 1, length - int(total) - 1
        share = 1 / (told + padding * rest) / len(batch.ids_BL)
        kept_L, beyond_L = mean_BL[row, prompt : total + 1], mean_BL[row, total + 1 :]
        assert kept_L.mean().item() == pytest.approx(share, rel=0.1)
        assert beyond_L.mean().item() == pytest.approx(padding * share, rel=0.1)


TRAINED = "trunk-five llada fast-dllm-v2 sdar llada-long llada-moe-free wedlm idlm".split()


@pytest.mark.parametrize("name", covering(4, [f"tiny-{name}" for name in TRAINED]))
def test_a_step_of_a_recipe_lowers_its_loss(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(training, "PROBE_ROWS", 8)
    recipe = replace(RECIPES[name], pool_size=60, batch_tokens=800)
    start = RECIPES[str(recipe.start)]
    words = len(embedded.build_tokenizer(first=start.first_vocabulary))
    sizes = network.sizes_of_layout(start.layout, words)
    weights = network.initial_weights(sizes, 0, [300])
    export.write_checkpoint(tmp_path, weights, sizes, start.layout, TOKENIZER)
    run, phase = training.prepare(recipe, None, tmp_path), recipe.phases[-1]
    optimizer = training.Optimizer(run.trained, phase.lr, lambda n: training.is_muon_matrix(run, n))
    losses = []
    for _ in range(3):
        example = training.make_example(run, phase, seeded(0))
        loss = training.loss_of(run, run.trained, example, network.hidden_states)
        loss.backward()
        optimizer.step(1.0)
        losses.append(loss.item())
    assert losses[2] < losses[0]
    shares = [training.probe(run, phase, optimizer.average, task) for task in recipe.tasks]
    assert all(0 <= share <= 1 for share in shares)


def test_progress_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=iter([100.0, 103.49]).__next__))
    line = loop.Countdown(2000).line({"step": 200, "loss": 1.25, "left_minigsm": 1.0})
    assert line == "step 200 of 2000: loss 1.25, left_minigsm 1, ETA 0:31"


def test_the_command_names_the_folder_it_writes(monkeypatch, capsys, tmp_path) -> None:
    calls = list[Any]()
    monkeypatch.setattr(command, "train", lambda *a, **b: calls.append((a, b)) or tmp_path)
    assert command.main(["tiny-llada", "--out", str(tmp_path), "--steps", "3"]) == 0
    assert calls == [(("tiny-llada", tmp_path), {"steps": 3, "threads": 1})]
    assert capsys.readouterr().out == f"written: {tmp_path}\n"
    with pytest.raises(SystemExit):
        command.main(["tiny-nothing"])
    assert "tiny-llada" in capsys.readouterr().err


MAX_ASSET_BYTES = 4 * 2**20
FOLDERS = [assets_dir() / name for name in SHIPPED_MODELS]


@given(st.text(max_size=40))
@example("<0x41> <0x0A>")
@example("1234567 apples\t\n  \r\n▁ \x00")
@example("naïve café, 𝛼 = ½")
def test_any_unicode_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


def test_ids_follow_the_pieces_and_later_ones_leave_texts_of_the_first_tasks_as_they_were() -> None:
    pieces, first = embedded.pieces(), embedded.build_tokenizer(first=True)
    assert TOKENIZER.convert_tokens_to_ids(pieces) == list(range(len(TOKENIZER)))
    assert [TOKENIZER.mask_token, TOKENIZER.eos_token] == pieces[:2]
    assert pieces[: len(first)] == embedded.first_pieces()
    problems = [*minigsm.TASK.problems("train", 300), *minicode.TASK.problems("train", 300)]
    for text in (problem.prompt + problem.continuation for problem in problems):
        assert TOKENIZER(text).input_ids == first(text).input_ids


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_asset_is_small_and_its_ids_agree(folder: Path) -> None:
    assert sum(f.stat().st_size for f in folder.iterdir()) <= MAX_ASSET_BYTES
    if (folder / "config.json").exists():
        file = json.loads((folder / "tokenizer.json").read_text())
        saved = [piece for piece, _ in file["model"]["vocab"]]
        assert saved in (embedded.first_pieces(), embedded.pieces())
        whole = json.loads((folder / "config.json").read_text())
        config = whole.get("text_config", whole)
        assert config["vocab_size"] == len(saved)
        for kind in ("eos", "pad", "bos", *(["mask"] if config is whole else [])):
            assert config[f"{kind}_token_id"] == getattr(TOKENIZER, f"{kind}_token_id")
    else:
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == RECIPES[folder.name].start


RECIPE = replace(RECIPES["tiny-diffusion-gemma"], pool_size=80, batch_tokens=200)


def logits_in_decoding(model: CanvasDenoiser, rows: canvas.CanvasRows, mean_1CH: Any) -> Any:
    """Of the first row's canvas, behind its encoded text."""
    begin = int(rows.begin_B[0])
    tokens_1L = torch.cat([rows.ids_BL[:1, :begin], rows.noised_BC[:1]], 1)
    kv, text, open_ = model.new_cache(tokens_1L.shape[1]), (0, begin), (begin, tokens_1L.shape[1])
    plan = ForwardPlan(ForwardKind.PREFILL, text, text, text, "block_causal", 1)
    model.forward(tokens_1L, plan, kv)
    kv.keep(plan, torch.tensor(0))
    denoise = ForwardPlan(ForwardKind.DENOISE, open_, open_, (0, 0), added_KFH=mean_1CH)
    return model.forward(tokens_1L, denoise, kv)


def test_a_short_training_writes_a_model_of_the_network_it_trained(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = train(RECIPE.name, tmp_path / "made", steps=3, report=lines.append, recipe=RECIPE)
    (point,) = json.loads((folder / "training_log.json").read_text())["curve"]
    assert point["step"] == 3 and "canvas, step 3 of 3" in lines[0]
    assert "LM in the diffusion_gemma layout" in (folder / "CARD.md").read_text()
    model = load_denoiser(folder)
    assert isinstance(model, CanvasDenoiser)
    assert model.canvas_length == canvas.CANVAS and model.vocab_size > 500
    pool, module = data.load_pool("miniparallel", 80, 1, False, tmp_path / "pools"), model.module
    for seed in range(4):
        rows = canvas.draw(pool, RECIPE, model.special.eos, model.vocab_size, seeded(seed))
        for mean_BCH in (None, canvas.own_prediction(module, rows)):
            with torch.no_grad():
                hidden = canvas.hidden_states(module, rows, mean_BCH)[:1, -canvas.CANVAS :]
                expected = canvas.logits_of(module, hidden)
            found = logits_in_decoding(model, rows, None if mean_BCH is None else mean_BCH[:1])
            torch.testing.assert_close(found.clone(), expected, atol=1e-4, rtol=1e-4)
    generation = canvas_decoder(anneal__steps=3).generate(model, Request("r", (20, 21, 22), 20))
    assert len(generation.ids) == 2 * canvas.CANVAS


def test_a_canvas_is_clean_where_it_has_no_noise() -> None:
    pool = data.make_pool(task_pairs("miniparallel", "train", 60, 1), False)
    rows = canvas.draw(pool, RECIPE, 1, 600, seeded(2))
    count = RECIPE.batch_tokens // canvas.LENGTH
    assert rows.noised_BC.shape == rows.clean_BC.shape == (count, canvas.CANVAS)
    for row, begin in enumerate(rows.begin_B.tolist()):
        inside = rows.ids_BL[row, begin : begin + canvas.CANVAS]
        assert torch.equal(rows.clean_BC[row, : len(inside)], inside)
        assert (rows.clean_BC[row, len(inside) :] == 1).all()
    assert ((rows.weight_BC == 1) | (rows.clean_BC == 1)).all()
