"""Training of adapters on tiny random models: masks, the forward, learning, resuming, use."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.load import LoadedModel, load_model
from dllm_bench.paths import assets_dir
from dllm_bench.training import adapters
from dllm_bench.training.adapters import AdapterJob, AdapterTraining
from dllm_bench.training.loop import TrainingText, stored_texts
from tests.helpers import tiny_checkpoint
from tests.unit.models.common import edit, spec

BLOCK = 4
JOB = AdapterJob(block=BLOCK, rank=4, prompts=40, rows=4, steps=6, lr=1e-2)
TEXTS = [
    TrainingText(tuple(torch.arange(start, start + length).tolist()), prompt)
    for start, length, prompt in ((3, 17, 6), (20, 12, 4), (9, 22, 13), (30, 9, 3))
]
KINDS = ("qwen3", "llada")  # logits shifted, and not, with tensor names of its own


def loaded(folder: Path, kind: str, **changes: str) -> LoadedModel:
    source = folder if folder.exists() else tiny_checkpoint(kind, folder, 1)
    form = {"attention_form": "block_causal", "block": BLOCK}
    return load_model(spec(source, **{**form, **changes}))


def started(folder: Path, job: AdapterJob = JOB, **changes: str) -> AdapterTraining:
    """Return a training on many texts, of the model in `folder` / model."""
    own = [TrainingText((10 + n % 60, 11 + n % 50, *range(5, 14)), 2) for n in range(60)]
    return AdapterTraining.start(job, loaded(folder / "model", "qwen3", **changes), [*own, *TEXTS])


def trained(out: Path, job: AdapterJob = JOB) -> AdapterTraining:
    return started(out.parent, job).run(out, report=lambda line: None)


@pytest.mark.parametrize("kind", KINDS)
def test_training_sees_what_a_block_diffusion_decoder_sees(kind: str, tmp_path: Path) -> None:
    """The logits of a masked block are those of the decoder's forward behind clean blocks."""
    model = loaded(tmp_path / "model", kind)
    denoiser, special = model.denoiser, model.special
    batch = adapters.masked_batch(TEXTS, BLOCK, special.mask, special.eos, seeded(2))
    with torch.no_grad():
        logits_RV, target_R = adapters.logits_of(denoiser.module, batch, BLOCK, denoiser.shifted)
    text_R, index_R = batch.masked_BN.nonzero(as_tuple=True)
    assert len(set(text_R.tolist())) == len(TEXTS)
    for text, index, got_V, target in zip(text_R, index_R, logits_RV, target_R, strict=True):
        place = int(batch.place_BN[text, index])
        start, first = (at // BLOCK * BLOCK for at in (place, int(index)))
        canvas_L = batch.clean_BL[text].clone()
        assert target == canvas_L[place]
        canvas_L[start : start + BLOCK] = batch.noised_BN[text, first : first + BLOCK]
        span, rows = (0, start + BLOCK), (place, place + 1)
        plan = ForwardPlan(ForwardKind.DENOISE, span, rows, span, "block_causal", BLOCK)
        wanted_V = denoiser.forward(canvas_L[None], plan, denoiser.new_cache(len(canvas_L)))[0, 0]
        assert torch.allclose(got_V, wanted_V, atol=1e-4)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_masks_lie_in_answers_and_the_rest_of_their_last_block() -> None:
    for seed in range(20):
        batch = adapters.masked_batch(TEXTS, BLOCK, mask=90, end=91, rng=seeded(seed))
        for row, text in enumerate(TEXTS):
            places = batch.place_BN[row][batch.masked_BN[row]].tolist()
            end = -(-len(text.ids) // BLOCK) * BLOCK
            assert all(text.prompt <= place < end for place in places)
            assert batch.clean_BL[row, : len(text.ids)].tolist() == list(text.ids)
        assert (batch.noised_BN[batch.masked_BN] == 90).all()


def test_a_third_of_the_blocks_is_masked_wholly_and_none_is_left_out_by_a_cut() -> None:
    blocks_JS = adapters._drawn(seeded(0), 1, 40_000, BLOCK).unflatten(1, (-1, BLOCK))[0]
    assert abs(blocks_JS.all(1).float().mean() - (0.35 + 0.35 / BLOCK + 0.30 * 0.25)) < 0.05
    assert blocks_JS.any(1).float().mean() > 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_learns_and_is_loaded_by_a_model(kind: str, tmp_path: Path) -> None:
    tiny_checkpoint(kind, tmp_path / "model", 1)
    training = trained(tmp_path / "out", replace(JOB, steps=60))
    assert len(training.learned) == 2 * 7 * training.denoiser.num_layers
    first, last = training.curve[0], training.curve[-1]
    assert last["held_out_loss"] < 3.0 and last["step"] == 60 and first["step"] == 50
    adapted = loaded(tmp_path / "model", kind, lora=str(tmp_path / "out"))
    batch = training.batch(TEXTS, seeded(1))
    with torch.no_grad():
        own, _ = training.predict(batch)
        merged, _ = adapters.logits_of(adapted.denoiser.module, batch, BLOCK, kind == "qwen3")
    assert (own - merged).abs().max() < 0.05 * own.abs().max()  # bfloat16
    assert "blocks of 4" in (tmp_path / "out" / "CARD.md").read_text()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_products_in_bfloat16_learn_what_those_in_float32_do(attention: str, tmp_path) -> None:
    whole, short = started(tmp_path), started(tmp_path, dtype="bfloat16", attention=attention)
    for _ in range(6):
        losses = [one.optimizer_step()[0] for one in (whole, short)]
        torch.testing.assert_close(*losses, rtol=0.02, atol=0)
    assert {weight.dtype for weight in short.learned.values()} == {torch.float32}
    short.save(tmp_path / "out")
    assert "products in bfloat16" in (tmp_path / "out" / "CARD.md").read_text()


def test_a_resumed_training_gives_the_same_weights(tmp_path: Path) -> None:
    whole, half = trained(tmp_path / "a"), started(tmp_path)
    for _ in range(3):
        half.optimizer_step()
    half.save(tmp_path / "b")
    again = trained(tmp_path / "b")
    torch.testing.assert_close(again.learned, whole.learned, atol=0, rtol=0)
    tiny_checkpoint("qwen3", tmp_path / "c" / "model", 2)
    others = [started(tmp_path, replace(JOB, lr=1e-3)), started(tmp_path / "c")]
    others += [started(tmp_path, dtype="bfloat16"), replace(half, texts=whole.held_out)]
    for other in others:
        with pytest.raises(DllmBenchError, match="other settings"):
            other.run(tmp_path / "b")
    (state := tmp_path / "b" / "state.pt").write_bytes(state.read_bytes()[:999])
    for out, words in ((tmp_path / "b", "cannot be read.*remove it"), (state, "not be written")):
        with pytest.raises(DllmBenchError, match=words):
            half.run(out)
    assert half.step == 3


def test_held_out_texts_were_held_out_of_a_training_on_fewer_texts_too() -> None:
    texts = [TrainingText((n, n + 1, 7), 2) for n in range(200)]
    few, more = (adapters.texts_held_out(some) for some in (texts[:90], texts[::-1] + texts))
    assert len(few) == len(more) == len(set(more)) == adapters.HELD_OUT
    assert set(more) & set(texts[:90]) <= set(few)


def test_no_prompt_of_a_held_out_text_is_trained_on(tmp_path: Path) -> None:
    texts = [TrainingText((n, n + 1, answer), 2) for answer in (7, 8) for n in range(3, 53)]
    run = AdapterTraining.start(JOB, loaded(tmp_path / "model", "qwen3"), texts)
    assert not {text.ids[:2] for text in run.texts} & {text.ids[:2] for text in run.held_out}
    assert (len(run.held_out), len(run.texts)) == (adapters.HELD_OUT, 36)


def test_a_training_may_begin_with_another_adapter(tmp_path: Path) -> None:
    first, job = trained(tmp_path / "a"), replace(JOB, start=str(tmp_path / "a"), block=2)
    for name, weight in started(tmp_path, job).learned.items():
        assert torch.equal(weight, first.learned[name].bfloat16().float())
    with pytest.raises(DllmBenchError, match="not one of rank 8"):
        started(tmp_path, replace(job, rank=8))
    with pytest.raises(DllmBenchError, match="assets/.* is not one of rank"):
        started(tmp_path, replace(job, start="assets/smollm2-block4-longer"))


def test_the_command_trains_an_embedded_model(tmp_path, command) -> None:
    out, words = tmp_path / "adapter", "--benchmark minigsm --steps 1 --rows 2 --prompts 40"
    model, setting = str(assets_dir() / "tiny-qwen3"), "model.mask_token=<|mask|>"
    printed = command(f"train adapter {model} {setting} {words} --out {out}")
    assert f"model={model} '{setting}' model.lora={out}" in printed
    assert f"train adapter {model} '{setting}'" in (out / "CARD.md").read_text()
    assert f'_path": "{model}"' in (out / "adapter_config.json").read_text()


def test_stored_answers_are_learned_without_the_block_that_their_limit_cut(tmp_path: Path) -> None:
    model, file = loaded(tmp_path / "model", "qwen3"), tmp_path / "texts.jsonl"
    end = model.special.eos
    ended, cut = (5, 6, 7, 8, 9, end), (5, 6, 7, 8, 9, 10)  # prompts of 3 tokens
    rows = [{"ids": ids, "prompt": 3} for ids in (ended, cut, cut[:3])] * adapters.HELD_OUT
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = adapters.texts_of(replace(JOB, texts=(str(file),), prompts=1000), model, chat=False)
    counts = Counter(text.ids for text in texts)  # the third has no answer
    assert counts == {ended: adapters.HELD_OUT, cut[:BLOCK]: adapters.HELD_OUT}


def test_a_line_that_is_no_text_is_named_and_reading_leaves_a_file_as_it_is(tmp_path) -> None:
    file, first = tmp_path / "texts.jsonl", '{"ids": [5, 6], "prompt": 1}'
    for rest, count in (("", 1), ("\n", 1), ("\n" + first, 2), ('\n{"ids": [5, ', 1)):
        file.write_text(first + rest)
        assert stored_texts(file, 96) == [TrainingText((5, 6), 1)] * count
        assert file.read_text() == first + rest
    ids = "[5]", '[], "prompt": 0', '[5], "prompt": 2', '[96], "prompt": 1', '[-1], "prompt": 1'
    for line in ("x", "", "[5]", *(f'{{"ids": {rest}}}' for rest in ids)):
        file.write_text(f"{first}\n{line}\n")
        with pytest.raises(DllmBenchError, match="Line 2 of .*texts.jsonl"):
            stored_texts(file, 96)


def test_what_cannot_be_trained_is_one_sentence(tmp_path: Path) -> None:
    model = loaded(tmp_path / "model", "qwen3")
    maskless = tiny_checkpoint("qwen3", tmp_path / "maskless", 1, mask_token_id=None)
    edit(maskless / "tokenizer_config.json", mask_token=None)
    repeated = [TrainingText((n % 20, 7, 8), 1) for n in range(40)]
    open_text = replace(JOB, benchmarks=("open_text",))

    def begun(source: Path, **changes: str) -> AdapterTraining:
        own = load_model(adapters.as_block_diffusion(spec(source, **changes), JOB))
        return AdapterTraining.start(JOB, own, repeated)

    refused = {
        "--texts-only": lambda: adapters.texts_of(replace(JOB, texts=("absent",)), model, False),
        "no gold answers": lambda: adapters.texts_of(open_text, model, False),
        "seed .*; give .* from 0 to": lambda: replace(JOB, seed=10**14),
        "--start assets/x": lambda: begun(maskless, lora="assets/x"),
        "mask token of its own": lambda: begun(maskless),
        "lower --lr than 1e.30": lambda: trained(tmp_path / "out", replace(JOB, lr=1e30)),
        "40 texts of 20 prompts": lambda: begun(tmp_path / "model"),
        "choose a dense model": lambda: begun(Path("assets/tiny-llada-moe")),
        "joined matrices": lambda: begun(Path("assets/tiny-llada2")),
        "or a canvas": lambda: begun(Path("assets/tiny-diffusion-gemma")),
    }
    for words, make in refused.items():
        with pytest.raises(DllmBenchError, match=words):
            make()
    assert not list((tmp_path / "out").iterdir())
