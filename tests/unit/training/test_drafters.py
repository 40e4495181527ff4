"""Training of drafters on a tiny random target: blocks, masks, texts, learning, resuming."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file

from dllm_bench.cli.main import parse
from dllm_bench.cli.train import drafter_job
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.speculative import Context
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.speculative import FixedLength, SpeculativeDecoder
from dllm_bench.methods.drafting import NoDraft
from dllm_bench.methods.trained_drafts import DFlash, DFlash2, DSpark, Eagle3
from dllm_bench.metrics import drafts
from dllm_bench.metrics.definitions import measure
from dllm_bench.models.drafters import TrainedBlockDrafter, TrainedChainDrafter
from dllm_bench.models.load import LoadedModel, load_model
from dllm_bench.store.lock import Lock
from dllm_bench.training import DRAFTER_KINDS
from dllm_bench.training import drafter_objectives as objectives
from dllm_bench.training import drafters as training
from dllm_bench.training.drafter_objectives import LossShares, TargetRows
from dllm_bench.training.drafters import KINDS, DrafterJob
from dllm_bench.training.drafters import DrafterTraining as Drafting
from dllm_bench.training.loop import TrainingText, learning_rate_factor, padded
from tests.helpers import ROLES, Watched, noting, tiny_checkpoint
from tests.sample_stats import drafted
from tests.speculative import DRAFTERS, trainable, write_drafter
from tests.tiers import covering
from tests.unit.models.common import spec

LENGTH, ROWS = 24, 3
TABLES = {"embed_tokens.weight", "lm_head.weight"}
JOB = DrafterJob(slots=4, layers=1)


@lru_cache
def loaded(folder: Path, seed: int = 1) -> LoadedModel:
    """Return a random target whose next tokens are easy to tell."""
    return load_model(spec(tiny_checkpoint("qwen3", folder, seed)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded(tmp_path_factory.mktemp("target"))


def prompts(count: int) -> list[tuple[int, ...]]:
    drawn = torch.randint(90, (count, 6), generator=torch.Generator().manual_seed(5))
    return [tuple(row.tolist()) for row in drawn]


def answered(model: LoadedModel, count: int, file: Path) -> list[TrainingText]:
    requests = [Request(str(i), tuple(ids), 20) for i, ids in enumerate(prompts(count))]
    return training.generated_texts(model, requests, 0.0, file)


def rows_for(model: Any, feature_layers: tuple[int, ...]) -> TargetRows:
    ids = torch.randint(90, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    answer = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    answer[:, 6:20] = True
    answer[1, 10:12] = False
    return objectives.target_rows(model.denoiser, ids, answer, feature_layers)


def test_anchors_lie_in_the_answer_and_have_a_label() -> None:
    answer = torch.rand(40, 30, generator=torch.Generator().manual_seed(0)) < 0.5
    anchors, kept = objectives.draw_anchors(answer, 6, torch.Generator().manual_seed(1))
    for row, possible in enumerate(answer[:, :-1] & answer[:, 1:]):
        own = anchors[row][kept[row]].tolist()
        assert (own, len(own)) == (sorted(set(own)), min(6, int(possible.sum())))
        assert possible[own].all() and not anchors[row][~kept[row]].any()


def test_anchors_are_drawn_evenly() -> None:
    answer = torch.zeros(4000, 12, dtype=torch.bool)
    answer[:, 2:] = True
    anchors, _ = objectives.draw_anchors(answer, 3, torch.Generator().manual_seed(1))
    counts = torch.bincount(anchors.flatten(), minlength=12)
    assert counts[:2].sum() == counts[11] == 0
    expected = 4000 * 3 / 9
    assert ((counts[2:11] - expected) ** 2 / expected).sum() < 30  # chi^2, 8 degrees of freedom


def test_a_slot_counts_until_the_first_label_outside() -> None:
    answer = torch.tensor([[False, True, True, True, False, True, True, True]])
    anchors, kept = torch.tensor([[1, 5, 0]]), torch.tensor([[True, True, False]])
    at = objectives.blocks_at(anchors, kept, answer, slots=4)
    assert at.supervised_BND.int().tolist() == [[[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]]


@pytest.mark.parametrize("kind", ["dflash_zlab", "dflash2"])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kernel", [objectives.dense, objectives.flex])
def test_a_block_is_what_decoding_would_draft(kind, kernel, model, tmp_path) -> None:
    """Hidden states and logits of every block, one by one with the drafter's own cache; of kinds
    whose training is not recorded."""
    config = DRAFTERS[kind] | {"target_tables": False}
    drafter = TrainedBlockDrafter(write_drafter(tmp_path / kind, config))
    network: Any = trainable(Path(drafter.source))
    rows, silent = rows_for(model, drafter.config.feature_layers), drafter.config.silent
    anchors, kept = objectives.draw_anchors(rows.answer_BL, 4, torch.Generator().manual_seed(3))
    at = objectives.blocks_at(anchors, kept, rows.answer_BL, drafter.config.slots - silent)
    before = objectives.at(rows.ids_BL, at.labels_BND - 1)
    with torch.no_grad():
        hidden = objectives.hidden_states(network, rows, at, kernel)[:, :, silent:]
        drafted = objectives.block_forward(network, rows, at, kernel)
        for row in range(ROWS):
            for block, anchor in enumerate(anchors[row].tolist()):
                features = rows.features_BLC[row : row + 1, :anchor]
                text = rows.ids_BL[row, : anchor + 1]
                context = Context(text, features, model.denoiser, network.new_cache(LENGTH + 8))
                own, base = network.block(context, drafter.config.slots)
                torch.testing.assert_close(hidden[row, block], own, atol=2e-5, rtol=1e-4)
                if drafter.config.candidates:
                    base = base + network.candidate_selector(before[row, block], own)
                said = drafted.logits_BNDV[row, block]
                torch.testing.assert_close(said, base, atol=1e-4, rtol=1e-4)


def test_the_columns_of_a_chain_that_count_are_those_before_two_tokens_of_an_answer(model) -> None:
    counts = objectives.supervised_columns(rows_for(model, (0,)).answer_BL)[0]
    assert counts.nonzero()[:, 0].tolist() == list(range(5, 18))


def test_the_targets_own_texts_are_decoded_once(model, tmp_path, monkeypatch) -> None:
    file = tmp_path / "texts.jsonl"
    first = answered(model, 3, file)
    decoder: Any = SpeculativeDecoder(NoDraft())
    for text, prompt in zip(first, prompts(3), strict=True):
        wanted = decoder.generate(model.denoiser, Request("x", prompt, 20)).ids[:20]
        assert text.ids[: text.prompt] == prompt
        answer = text.ids[text.prompt :]
        assert answer == wanted[: len(answer)] and (len(answer) == 20 or answer[-1] == ROLES["eos"])
    watched: Any = Watched(model.denoiser)

    def begun() -> list[tuple[int, ...]]:
        pairs = zip(watched.canvases, watched.plans, strict=True)
        return [(*ids[0, :6].tolist(),) for ids, plan in pairs if plan.kind == ForwardKind.PREFILL]

    model, (*_, fourth, fifth) = replace(model, denoiser=watched), prompts(5)
    assert (answered(model, 5, file)[:3], begun()) == (first, [fourth, fifth])
    monkeypatch.setattr(training, "BATCH", 2)  # answers may be done out of order
    assert answered(model, 5, tmp_path / "pairs.jsonl") == answered(model, 5, file)
    file.write_text(file.read_text()[:-5])  # stopped while the last line was written
    done = len(begun())
    assert (answered(model, 5, file)[:3], begun()[done:]) == (first, [fifth])
    assert len(file.read_text().splitlines()) == 5
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    with Lock(file.with_suffix(".lock")), pytest.raises(DllmBenchError, match="process .*wait"):
        answered(model, 2, file)
    with pytest.raises(DllmBenchError, match="answers to other prompts"):
        training.generated_texts(model, [Request("0", (1, 2), 20)], 0.0, file)


def test_rows_are_filled_behind_the_answer() -> None:
    ids, answer = padded([TrainingText((5, 6, 7, 8), 2), TrainingText((5, 9), 1)], end=1)
    assert ids.tolist() == [[5, 6, 7, 8], [5, 9, 1, 1]]
    assert answer.int().tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]


def test_gold_texts_end(model: LoadedModel) -> None:
    (text,) = training.gold_texts(model, [("w3 w4", " w5")])
    assert text == TrainingText((3, 4, 5, ROLES["eos"]), 2)


def job(kind: str, changes: dict[str, Any]) -> DrafterJob:
    small = {"slots": 4, "rows": 4, "anchors": 4, "steps": 6, "lr": 3e-3, "rank": 8}
    return replace(KINDS[kind], **(small | changes))


def fitted(asked: DrafterJob, model: LoadedModel, folder: Path, texts: int = 12) -> Drafting:
    found = answered(model, texts, folder / "texts.jsonl")
    return Drafting.start(asked, model, found).run(folder / "out")


def draft_of(kind: str, folder: Path) -> Any:
    """Return the piece that drafts with a trained drafter."""
    if kind == "eagle3":
        return Eagle3(TrainedChainDrafter(str(folder)))
    head: Any = {"dflash": DFlash, "dflash2": DFlash2}.get(kind, DSpark)
    return head(TrainedBlockDrafter(str(folder)))


@pytest.mark.parametrize("kind", covering(4, KINDS))
def test_a_trained_drafter_saves_forwards_and_changes_nothing(kind, model, tmp_path) -> None:
    """A few texts learned by heart: rounds get longer, the text stays the target's own."""
    lengths = []
    for steps in (1, 60):
        folder = tmp_path / str(steps)
        run = fitted(job(kind, {"steps": steps, "rows": 8, "anchors": 8}), model, folder, texts=4)
        piece, facts = draft_of(kind, folder / "out"), []
        if kind != "eagle3":
            assert piece.drafter.config.confidence == kind.startswith("dspark")
        for text in run.texts:
            request = Request("x", text.ids[: text.prompt], len(text.ids) - text.prompt)
            found = SpeculativeDecoder(piece).generate(model.denoiser, request)
            assert found.ids[: request.max_new_tokens] == text.ids[text.prompt :]
            facts.append(drafted(drafts.rounds_of(found.trace, found.born)))
        lengths.append(measure("acceptance/length", facts))
    assert lengths[1] > lengths[0] + 0.5


@pytest.mark.parametrize(
    ("kind", "part"),
    [("dspark-rnn", {}), ("eagle3", {"flan": Path("X")}), ("dspark-markov", {"draft_vocab": 24})],
)
def test_an_interrupted_run_goes_on_as_if_it_had_not_stopped(
    kind, part, model, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(Drafting, "measure_every", 2)
    whole = fitted(job(kind, part), model, tmp_path / "whole")
    texts, out, told = answered(model, 12, tmp_path / "texts.jsonl"), tmp_path / "parts", []

    def stop(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            raise KeyboardInterrupt

    begun: Any = Drafting.start(job(kind, part), model, texts)
    begun.save_every_s = 0.0
    with pytest.raises(KeyboardInterrupt):
        begun.run(out, stop)
    assert torch.load(out / "state.pt")["step"] == 3
    resumed = Drafting.start(job(kind, part), model, texts).run(out, told.append)
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1, "who reads one reads all"
    weights = [one.network.state_dict() for one in (resumed, whole)]
    torch.testing.assert_close(*weights, atol=0, rtol=0)
    curve = (out / "curve.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in curve] == resumed.curve == whole.curve
    assert [point["step"] for point in resumed.curve] == [2, 4, 6]
    card = (out / "CARD.md").read_text()
    assert "6 of\n6 steps" in card and f"train drafter tiny {kind} --slots 4" in card
    with pytest.raises(DllmBenchError, match="other settings"):
        Drafting.start(job(kind, {"lr": 1.0}), model, texts).run(out)


def test_every_step_draws_rows_that_are_not_held_out(model, tmp_path) -> None:
    with patch.object(Drafting, "loss_of", autospec=True, side_effect=Drafting.loss_of) as loss_of:
        run = fitted(job("dflash", {}), model, tmp_path, texts=30)
    *steps, measured = (call.args[1] for call in loss_of.call_args_list)
    assert measured == run.held_out
    assert len({tuple(text.ids for text in step) for step in steps}) == run.job.steps
    assert not {text.ids for step in steps for text in step} & {t.ids for t in run.held_out}


PART = {"draft_vocab": 24, "store_gib": 1.0}


def test_the_draft_vocabulary_is_what_answers_have_most_often() -> None:
    texts = [TrainingText((9, 9, 9, 5, 5, 7), 3), TrainingText((8, 5, 7, 2), 1)]
    kept = {2: (5, 7), 4: (2, 5, 7, 9), 7: (0, 1, 2, 5, 7, 8, 9)}
    assert {size: training.frequent_tokens(texts, size, 10) for size in kept} == kept


@pytest.mark.parametrize("kind", covering(2, ["dflash", "dspark-rnn", "eagle3", "dspark-markov"]))
def test_a_drafter_of_frequent_tokens_drafts_these_alone(kind, model, tmp_path) -> None:
    """The text stays the target's own, and a target of other weights gets its own head."""
    run = fitted(job(kind, PART | {"steps": 30, "rows": 8}), model, tmp_path)
    ids = training.frequent_tokens(run.texts, 24, run.target.vocab_size)
    assert (run.network.draft_ids.tolist(), run.network.lm_head.weight.shape[0]) == (list(ids), 24)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert run.target.vocab_size not in {size for w in stored.values() for size in w.shape}
    draft = draft_of(kind, tmp_path / "out")
    target, second = model.denoiser, loaded(tmp_path / "other", 2).denoiser
    accepted = 0
    for one in (target, second, target):
        length, noted = noting(FixedLength(), keep=list)
        for temperature in (0.0, 0.8):
            decoder = SpeculativeDecoder(draft, length=length, temperature=temperature)
            for text in run.texts[:2]:
                request = Request("x", text.ids[: text.prompt], 20)
                decoded = decoder.generate(one, request)
                rounds = drafts.rounds_of(decoded.trace, decoded.born)
                accepted += sum(made.accepted for made in rounds)
                plain = SpeculativeDecoder(NoDraft()).generate(one, request)
                assert temperature or decoded.ids[:20] == plain.ids[:20]
        assert {int(token) for (made,), _ in noted for token in made.tokens_D} <= set(ids)
        network = draft.drafter.on(one)
        assert torch.equal(network._head_rows_NH, one.module.lm_head.weight[network.draft_ids])
    assert accepted
    every = network.spread(torch.arange(24.0), -torch.inf)
    assert every[list(ids)].tolist() == list(range(24)) and every.isfinite().sum() == 24
    assert network.places(torch.tensor([*ids, ROLES["mask"]])).tolist() == list(range(25))


@pytest.mark.parametrize("kind", ["dspark-markov", "eagle3"])
def test_a_draft_vocabulary_of_all_tokens_changes_no_loss(kind, model, tmp_path) -> None:
    texts, found = answered(model, 6, tmp_path / "texts.jsonl"), []
    for count in (0, model.denoiser.vocab_size):
        run = Drafting.start(job(kind, {"draft_vocab": count}), model, texts)
        for name, weight in run.network.named_parameters():
            if name not in TABLES:
                weight.data.fill_(0.02)
        loss, numbers = run.loss_of(texts, torch.Generator().manual_seed(0), measured=True)
        found.append(numbers(loss))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_what_cannot_be_drafted_is_missed(model: LoadedModel, tmp_path: Path) -> None:
    """L1 and cross-entropy of a part of the vocabulary, from their definitions."""
    texts = answered(model, 3, tmp_path / "texts.jsonl")
    run = Drafting.start(job("dflash", {"draft_vocab": 5}), model, texts)
    rows, ids = run.rows(texts), run.network.draft_ids
    anchors = objectives.draw_anchors(rows.answer_BL, 4, torch.Generator().manual_seed(1))
    blocks = objectives.blocks_at(*anchors, rows.answer_BL, 4)
    network: Any = run.network
    with torch.no_grad():
        drafted = objectives.block_forward(network, rows, blocks)
        loss, numbers = run.loss_of(texts, torch.Generator().manual_seed(1), measured=True)
        law = run.target.head(objectives.at(rows.last_BLH, blocks.labels_BND - 1)).softmax(-1)
    full = torch.zeros_like(law)
    full[..., ids] = drafted.logits_BNDV.softmax(-1)
    weight = objectives.slot_weights(blocks.supervised_BND, run.job.shares.decay)
    label = objectives.at(rows.ids_BL, blocks.labels_BND)
    l1 = ((full - law).abs().sum(-1) * weight).sum() / weight.sum()
    assert numbers(loss)["l1"] == pytest.approx(l1.item(), rel=1e-4)
    inside = torch.isin(label, ids)
    assert inside[blocks.supervised_BND].any() and not inside[blocks.supervised_BND].all()
    nats = -full.gather(-1, label[..., None])[..., 0].log()
    ce = (nats.where(inside, torch.zeros(())) * weight).sum() / weight.sum()
    assert numbers(loss)["ce"] == pytest.approx(ce.item(), rel=1e-4)
    loss, numbers = run.loss_of(texts, torch.Generator().manual_seed(1))
    assert set(numbers(loss)) == {"loss", "ce", "confidence"}


def test_the_targets_outputs_are_computed_once(model, tmp_path, monkeypatch) -> None:
    """By trainings of several drafters; a folder that is full changes nothing."""
    computed = Mock(wraps=objectives.target_rows)
    monkeypatch.setattr(objectives, "target_rows", computed)
    texts, rows = answered(model, 12, tmp_path / "texts.jsonl"), tmp_path / "rows"

    def trained(kind: str, out: str, rows: Path, **changes: Any) -> Drafting:
        return Drafting.start(job(kind, PART | changes), model, texts, rows).run(tmp_path / out)

    whole = trained("dflash", "whole", rows)
    assert {len(call.args[1]) for call in computed.call_args_list} == {1}
    assert len(list(rows.rglob("*.safetensors"))) == computed.call_count <= 12
    computed.reset_mock()
    trained("dflash", "again", rows)
    trained("dspark-markov", "other", rows)
    assert not computed.called
    full = trained("dflash", "full", tmp_path / "none", store_gib=1e-6)
    assert computed.called and not list((tmp_path / "none").rglob("*.safetensors"))
    weights = [one.network.state_dict() for one in (full, whole)]
    torch.testing.assert_close(*weights, atol=0, rtol=0)
    for file in rows.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:99])
    with pytest.raises(DllmBenchError, match="cannot be read.*remove it"):
        trained("dflash", "cut", rows)


def test_prompts_of_files_take_their_turn(model: LoadedModel, tmp_path: Path) -> None:
    rows, flan = [{"task": "t", "inputs": f"w{i} w{i + 1}"} for i in range(40)], tmp_path / "flan"
    flan.mkdir()
    (flan / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = replace(JOB, flan=flan, benchmarks=("minimath",), prompts=20)
    found = training.prompts_of(asked)
    assert set(found[1::2]) <= {row["inputs"] for row in rows} and len(set(found[1::2])) == 10
    assert training.prompts_of(replace(asked, prompts=7)) == found[:7]
    assert training.prompts_of(replace(asked, seed=1))[1::2] != found[1::2]
    assert training.prompts_of(replace(asked, seed=1, text_seed=asked.seed)) == found
    only = replace(asked, benchmarks=(), prompts=4, max_new_tokens=4)
    assert training.texts_file(only, "abc") != training.texts_file(asked, "abc")
    assert training.target_key("ab" * 32, "bfloat16") != training.target_key("ab" * 32, "float32")
    texts = training.texts_of(only, model, False, tmp_path / "texts.jsonl")
    encode = model.text.encode
    assert [t.ids[: t.prompt] for t in texts] == [(*encode(p),) for p in training.prompts_of(only)]
    with pytest.raises(DllmBenchError, match="holds 40; give fewer"):
        training.prompts_of(replace(only, prompts=41))
    words = "train drafter tiny-qwen3 dflash --flan X --draft-vocab 9 --store-gib 0.5".split()
    given = drafter_job(parse(words))
    assert (given.flan, given.benchmarks) == (Path("X"), ())
    assert "--flan DIR" in given.command("tiny-qwen3")


def test_rate_and_taps() -> None:
    rates = [learning_rate_factor(step, 100) for step in range(101)]
    assert (rates[:5], rates[-1]) == ([0.25, 0.5, 0.75, 1.0, 1.0], pytest.approx(0.0))
    assert rates[4:] == sorted(rates[4:], reverse=True)
    taps = {36: (1, 9, 17, 25, 33), 40: (1, 10, 19, 28, 37), 4: (0, 1, 2), 1: (-1,)}
    assert {layers: training.feature_layers(layers) for layers in taps} == taps


def test_what_cannot_be_trained_is_one_sentence(tmp_path, command) -> None:
    masked = load_model(spec(tiny_checkpoint("llada", tmp_path / "llada", 1)))
    refused = {
        "causal attention": lambda: Drafting.start(JOB, masked, [TrainingText((5, 6), 1)] * 9),
        "has ce nan": lambda: LossShares(ce=float("nan")),
        "text_seed .* from 0 to": lambda: replace(JOB, text_seed=10**14),
        "one layer": lambda: DrafterJob(chain=True, layers=2),
        "prompts 1; give .* 2 or more": lambda: DrafterJob(prompts=1),
        "max_new_tokens 1": lambda: replace(JOB, max_new_tokens=1),
        "after its first slot": lambda: replace(KINDS["dflash2"], slots=1),
        "give 'target' or 'gold'": lambda: replace(JOB, texts="mine"),  # type: ignore[arg-type]
        "loss of its own": lambda: replace(KINDS["eagle3"], shares=LossShares(ce=1.0)),
        "one of them above 0": lambda: LossShares(ce=0.0, l1=0.0),
        "draft-vocab too": lambda: replace(JOB, store_gib=1.0),
        "no draft vocabulary": lambda: replace(KINDS["dflash2"], draft_vocab=9),
        "no answers here": lambda: replace(JOB, flan=Path("X"), texts="gold"),
    }
    for words, make in refused.items():
        with pytest.raises(DllmBenchError, match=words):
            make()
    assert "dspark-markov" in command("train drafter tiny-qwen3 medusa", code=2)
    gold = "train drafter tiny-qwen3 dflash --texts gold --texts-only"
    assert "leave out one" in command(gold, code=2)
    assert tuple(KINDS) == DRAFTER_KINDS, "the names that are told without torch"


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
def test_the_command_of_a_card_asks_for_the_same_job(kind: str) -> None:
    changes: dict[str, Any] = {"lr": 3e-3, "temperature": 0.0, "texts": "gold"}
    changes["benchmarks"] = ("minigsm_free", "ministory")
    if kind != "eagle3":
        changes["shares"] = replace(KINDS[kind].shares, ce=1.0, l1=0.5)
    asked = job(kind, changes)
    assert drafter_job(parse(asked.command("tiny-qwen3", "model.chat=false").split()[1:])) == asked


def test_the_command(tmp_path: Path, command) -> None:
    start = "train drafter tiny-qwen3 dflash model.chat=false --benchmark minimath"
    said = command(f"{start} --texts-only --prompts 2 --max-new-tokens 4")
    (file,) = (tmp_path / "training" / "drafters").glob("*.jsonl")
    assert f"written: {file}" in said and len(file.read_text().splitlines()) == 2
    out = tmp_path / "drafter"
    gold = f"--layers 1 --prompts 12 --steps 2 --texts gold --rows 2 --out {out}"
    said = command(f"{start} --benchmark ministory {gold}")
    assert f"model.chat=false decoder=dflash decoder.draft.drafter.source={out}" in said
    assert "dflash model.chat=false --layers 1" in (out / "CARD.md").read_text()
    facts = TrainedBlockDrafter(str(out)).config
    assert (facts.slots, facts.feature_layers) == (7, (0, 1, 2))
