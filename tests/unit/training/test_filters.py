"""Training of filters: traces under the oracle, split by prompt, label scopes, FLAN, resuming."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from dllm_bench.benchmarks.embedded import FrozenTask
from dllm_bench.core.decoder import BlockLength, Condition, Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.methods.learn2pd import Filter
from dllm_bench.models.filters import LearnedFilter
from dllm_bench.paths import assets_dir
from dllm_bench.training import filters as training
from dllm_bench.training import prompts
from dllm_bench.training.filters import FilterJob, Traces, TraceSource
from tests.helpers import ROLES, Watched, tiny_denoiser

SOURCE = TraceSource("tiny", "w" * 64, "t" * 64, "p" * 64, block=8, gen_length=32)
PROMPTS = [" ".join(f"w{(7 * i + j) % 90}" for j in range(6)) for i in range(12)]
JOB = FilterJob(block=8, gen_length=32, epochs=300, lr=0.01)
ENDING = 26  # where the end token is likely: in the third block after a prompt of 6


def encode(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def model(ending: int | None = None) -> Watched:
    return Watched(tiny_denoiser("llada", seed=1), ending)


def collect(
    watched: Watched, folder: Path, prompts: list[str], source: TraceSource = SOURCE
) -> Traces:
    return training.collect_traces(watched, encode, prompts, source, folder)


def synthetic(prompts: int = 200, steps: int = 4, block: int = 8) -> Traces:
    """Return traces in which a candidate is right where its confidence and its left neighbour's
    together are high."""
    generator = torch.Generator().manual_seed(0)
    confidence_SW = torch.rand(prompts * steps, block, generator=generator)
    right_SW = confidence_SW + confidence_SW.roll(1, 1) > 1.2
    masked_SW = torch.rand(confidence_SW.shape, generator=generator) < 0.7
    prompt_S = torch.arange(prompts).repeat_interleave(steps)
    return Traces(confidence_SW, right_SW, masked_SW, prompt_S, prompts)


def request(text: str) -> Request:
    return Request("x", tuple(encode(text)), 32)


def oracle(source: TraceSource) -> Any:
    return training.oracle_decoder(source, [])


def test_rows_are_the_steps_of_the_oracle(tmp_path: Path) -> None:
    """Confidences, labels and masks of every step, beside a plain oracle run of the same prompt."""
    source = replace(SOURCE, all_blocks=True)
    found, decoder = collect(model(), tmp_path, PROMPTS[:2], source), oracle(source)
    row = 0
    for index, text in enumerate(PROMPTS[:2]):
        generation = replace(decoder, select=decoder.select.oracle).generate(model(), request(text))
        blocks = [generation.born[start : start + 8] for start in range(0, 32, 8)]
        for step, forward in enumerate(generation.trace.forwards):
            born = next(block for block in blocks if max(block) >= step)
            assert found.masked_SW[row].tolist() == [b >= step for b in born]
            agreed = found.right_SW[row] & found.masked_SW[row]
            assert agreed.tolist() == [b == step and not forward.forced for b in born]
            assert found.prompt_S[row] == index
            row += 1
    assert row == len(found.prompt_S)
    assert ((found.confidence_SW > 0) & (found.confidence_SW <= 1)).all()


def test_blocks_after_the_end_of_the_text_are_left_out(tmp_path: Path) -> None:
    few = PROMPTS[:5]
    some = collect(model(ENDING), tmp_path, few)
    every = collect(model(ENDING), tmp_path, few, replace(SOURCE, all_blocks=True))
    assert len(some.prompt_S) < len(every.prompt_S)
    for prompt in range(len(few)):
        kept, whole = (part.of_prompts(torch.tensor([prompt])) for part in (some, every))
        assert torch.equal(kept.confidence_SW, whole.confidence_SW[: len(kept.prompt_S)])
        opened = int((kept.masked_SW.all(1)).sum())
        text = oracle(SOURCE).generate(model(ENDING), request(few[prompt]))
        assert len(text.ids) == 8 * opened and (ROLES["eos"] in text.ids[-8:] or opened == 4)


def test_an_interrupted_collection_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = PROMPTS[:7]
    whole = collect(model(), tmp_path / "whole", few)
    monkeypatch.setattr(training, "SAVE_EVERY_S", -1.0)

    def stop(text: str) -> list[int]:
        if text == PROMPTS[5]:
            raise KeyboardInterrupt
        return encode(text)

    with pytest.raises(KeyboardInterrupt):
        training.collect_traces(model(), stop, few, SOURCE, tmp_path, print)
    assert training.load_traces(SOURCE.file(tmp_path)).done == 5
    watched = model()
    resumed = collect(watched, tmp_path, few)
    begun = {tuple(canvas[0, :6].tolist()) for canvas in watched.canvases}
    assert begun == {tuple(encode(text)) for text in few[5:]}
    torch.testing.assert_close(astuple(resumed), astuple(whole), atol=0, rtol=0)
    untouched = model()
    collect(untouched, tmp_path, few)
    assert untouched.canvases == []
    file = SOURCE.file(tmp_path)
    for content in (b"", file.read_bytes()[:-1], save({"a": torch.ones(1)})):
        file.write_bytes(content)
        with pytest.raises(DllmBenchError, match="remove it to collect them again"):
            collect(untouched, tmp_path, few)


def test_stalls_are_counted() -> None:
    """Steps in which nothing masked is right, whatever is right at decoded positions."""
    right_SW = torch.tensor([[1, 0, 0], [0, 0, 1], [0, 0, 0], [1, 1, 0]]).bool()
    masked_SW = torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 0, 0]]).bool()
    assert Traces(right_SW.float(), right_SW, masked_SW, torch.arange(4), 4).stalled == 2


def test_prompts_are_of_the_train_split() -> None:
    items = FrozenTask("minigsm").items("test")
    test = {f"Question: {item['question']}\nAnswer:" for item in items}
    drawn = prompts.train_prompts(("minigsm", "minicode"), 101, seed=0)
    assert len(set(drawn)) == 101 and test.isdisjoint(drawn)
    assert [text.startswith("Question:") for text in drawn] == [i % 2 == 0 for i in range(101)]
    assert drawn != prompts.train_prompts(("minigsm", "minicode"), 101, seed=1)


def flan(folder: Path, sizes: dict[str, int]) -> Path:
    folder.mkdir()
    texts = [(task, f"{task} {i}") for task, count in sizes.items() for i in range(count)]
    rows = [json.dumps({"task": t, "inputs": text, "targets": "-"}) for t, text in texts]
    half = len(rows) // 2
    for name, part in (("one", rows[:half]), ("two", rows[half:])):
        (folder / f"{name}.jsonl").write_text("\n".join(part))
    return folder


def test_flan_gives_forty_prompts_of_every_task(tmp_path: Path) -> None:
    folder = flan(tmp_path / "flan", {"anli": 500, "boolq": 70, "cb": 12})
    job = FilterJob(flan=folder)
    texts = job.texts()
    counts = Counter(text.split()[0] for text in texts)
    assert counts == {"anli": 40, "boolq": 40, "cb": 12} and len(set(texts)) == len(texts)
    assert texts == job.texts() != FilterJob(flan=folder, seed=1).texts()
    late = [int(text.split()[1]) >= 250 for text in texts if text.startswith("anli")]
    assert 5 < sum(late) < 35, "not only the first rows of a task"


@pytest.mark.parametrize(
    ("content", "word"), [(b"{}", "no FLAN row"), (b"x", "Line 1"), (b'{"task": "\xe9"', "UTF-8")]
)
def test_a_directory_that_is_no_flan_is_refused(tmp_path, content, word) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DllmBenchError, match=word):
        prompts.flan_prompts(tmp_path, 40, 0)


def test_parts_are_eight_to_one_to_one_and_share_no_prompt() -> None:
    found = synthetic()
    parts = training.split_by_prompt(found, seed=0)
    prompts = {name: set(part.prompt_S.tolist()) for name, part in parts.items()}
    sizes = {name: len(own) for name, own in prompts.items()}
    assert sizes == {"train": 160, "validation": 20, "test": 20}
    assert len(set.union(*prompts.values())) == 200
    assert sum(len(part.prompt_S) for part in parts.values()) == len(found.prompt_S)
    assert set(training.split_by_prompt(found, seed=1)["test"].prompt_S.tolist()) != prompts["test"]


def test_a_rule_that_can_be_learned_is_learned() -> None:
    fitted = training.fit(synthetic(400), replace(JOB, epochs=200, lr=0.04))
    test, plain = fitted.rates["test"], fitted.rates["confidence"]
    assert test["loss"] < fitted.curve[0]["validation"] / 3
    assert test["false_positive"] < plain["false_positive"] / 3
    assert test["accepted"] > 3 * plain["accepted"]


def test_the_best_validation_loss_is_kept() -> None:
    """Few prompts and many epochs: the network learns them by heart."""
    fitted = training.fit(synthetic(20, 2), replace(JOB, epochs=400, lr=0.03, layers=4))
    best = min(fitted.curve, key=lambda point: point["validation"])
    assert fitted.epoch == best["epoch"] < 400
    assert fitted.rates["validation"]["loss"] == pytest.approx(best["validation"], abs=1e-4)
    assert fitted.curve[-1]["train"] < best["train"]


def test_fitting_is_repeatable() -> None:
    fitted = []
    for drawn_before in range(2):
        torch.manual_seed(drawn_before)
        fitted.append(training.fit(synthetic(30), replace(JOB, epochs=20)).tensors)
    torch.testing.assert_close(*fitted, atol=0, rtol=0)


def test_label_scopes() -> None:
    """Labels at decoded positions count in the scope "all" alone."""
    found = synthetic(10)
    logits_SW = torch.randn(found.confidence_SW.shape, generator=torch.Generator().manual_seed(1))
    right_SW, masked_SW = found.right_SW.float(), found.masked_SW
    entropy = torch.nn.functional.binary_cross_entropy_with_logits
    for scope, flips in (("masked", False), ("all", True)):
        loss = training.loss_of(logits_SW, found, scope)
        flipped = replace(found, right_SW=found.right_SW ^ ~masked_SW)
        assert (training.loss_of(logits_SW, flipped, scope) != loss) == flips
    inside = entropy(logits_SW[masked_SW], right_SW[masked_SW])
    torch.testing.assert_close(training.loss_of(logits_SW, found, "masked"), inside)
    with pytest.raises(DllmBenchError, match="is NaN in all 1 epochs; lower --lr"):
        training.fit(replace(found, masked_SW=masked_SW & False), replace(JOB, epochs=1))


def test_decisions_by_hand() -> None:
    part = Traces(
        torch.zeros(1, 6),
        right_SW=torch.tensor([[True, True, False, False, False, True]]),
        masked_SW=torch.tensor([[True, True, True, True, True, False]]),
        prompt_S=torch.zeros(1, dtype=torch.long),
    )
    found = training.decisions(torch.tensor([[0.97, 0.5, 0.99, 0.91, 0.3, 0.99]]), part)
    assert found == {"false_positive": 2 / 3, "accepted": 1 / 2, "wrong_accepted": 1 / 2}


def test_the_command_collects_once_and_writes_a_filter_that_decodes(tmp_path, command) -> None:
    small = "--prompts 10 --benchmark minigsm --block 8 --gen-length 16 --epochs 60"
    told = [command(f"train filter tiny-llada {small} --collect-only")]
    [file] = (tmp_path / "training" / "traces").iterdir()
    folder = tmp_path / "training" / "filters"
    assert not folder.exists()
    told += [command(f"train filter tiny-llada {small} --layers {n}") for n in (1, 2)]
    printed = "".join(told)
    assert printed.count("10 of 10 prompts") == 1, "the model decodes once"
    assert str(file) in printed
    out = folder / "tiny-llada-block8"
    assert {*folder.iterdir()} == {out, folder / "tiny-llada-block8-layers1"}
    use = f"decoder=learn2pd decoder.schedule.block=8 decoder.select.first.head.source={out}"
    assert f"use it: model=tiny-llada {use}" in printed
    learned = LearnedFilter(str(out))
    facts = learned.metadata
    assert (learned.block, facts.model, facts.labels) == (8, "tiny-llada", "masked")
    curve = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    assert [point["epoch"] for point in curve] == [1, 50, 60]
    card = (out / "CARD.md").read_text()
    assert "10 prompts (train splits of minigsm, in turn), 16 new tokens" in card
    assert f"{learned.parameters:,} parameters" in card and "| validation |" in card
    assert Filter(learned).needs == {
        Need("schedule", BlockLength(8)),
        Need("cache", Condition.FED_WINDOW),  # it reads committed confidences
    }
    command(f"train filter tiny-llada {small}")
    for words, weights in ((f"{small} --lr 0.1", facts.weights[:10]), (small, "another's")):
        (out / "CARD.md").write_text(card.replace(facts.weights[:10], weights))
        assert "this command did not make" in command(f"train filter tiny-llada {words}", code=2)


def test_a_converted_filter_has_a_name_of_its_own_and_replaces_no_other(tmp_path, command) -> None:
    words = f"train filter tiny-llada --from {tmp_path / 'own.pth'}"
    folder = tmp_path / "training" / "filters" / "tiny-llada-block8-own"
    torch.save(training.network_of(8, 2, 0).state_dict(), tmp_path / "own.pth")
    assert f"head.source={folder}" in command(words)
    command(words)
    torch.save(training.network_of(8, 2, 1).state_dict(), tmp_path / "own.pth")
    assert "did not make; name another folder" in command(words, code=2)
    (folder / "filter.safetensors").unlink()
    (folder / "filter.safetensors").symlink_to(tmp_path / "outside")
    command(words)
    assert not (tmp_path / "outside").exists()


SEVERAL = " --benchmark minicode --benchmark minigsm --gen-length 128"


@pytest.mark.parametrize("arguments", ["", " --layers 4 --all-blocks --labels all", SEVERAL])
@pytest.mark.parametrize("model", ["tiny-llada", str(assets_dir() / "tiny-llada")])
def test_a_card_names_the_command_it_was_made_with(model, arguments, monkeypatch, command) -> None:
    """The folder is named after the model's name, or after that of its folder."""
    made: list[tuple[FilterJob, Path]] = []
    monkeypatch.setattr(training, "train", lambda job, model, out, folder: made.append((job, out)))
    given = f"train filter {model}{arguments}"
    command(given)
    written = made[0][0].command("tiny-llada").removeprefix("dllm-bench ")
    command(written)
    assert made[0] == made[1]
    assert len(written.split()) == len(given.split())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("--prompts 9", "10 or more"),
        ("--flan nowhere", "no .jsonl file"),
        ("--block 12", "does not divide"),
        ("--lr 1e38", "lr 1e+38; give a number above 0"),
        ("--seed 9999999999999999999", "give a whole number from 0 to"),
    ],
)
def test_mistakes_are_one_sentence(arguments: str, word: str, command) -> None:
    (line,) = command(f"train filter tiny-llada {arguments}", code=2).splitlines()
    assert word in line
