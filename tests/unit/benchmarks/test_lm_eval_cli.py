"""lm-eval's own command line running this project's models, in this process.

Only the index of lm-eval's own 14,000 tasks is left out, because building it takes ten seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.api.lm_eval_model import MODEL
from dllm_bench.benchmarks.lm_eval import TASKS
from dllm_bench.cli.main import main
from dllm_bench.paths import read_yaml
from dllm_bench.runs.runner import run
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store, read_samples

WORDS = Path(__file__).with_name("words.txt").read_text()
REFUSED = read_yaml(Path(__file__).with_name("gold.yaml"))["refused by lm-eval"]
DECODER = ("decoder=fast_dllm", "decoder.select.tau=0.8")


@pytest.fixture
def own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.tasks

    class OwnTasks(lm_eval.tasks.TaskManager):  # type: ignore[misc,name-defined]
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "include_defaults": False})

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", OwnTasks)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def lm_eval(*arguments: str) -> int:
    return main(["lm-eval", "--model", MODEL, *arguments])


def results(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (file,) = folder.glob("tiny-*/results_*.json")
    (samples,) = folder.rglob("samples_*.jsonl")
    lines = samples.read_text(encoding="utf-8").split("\n")
    return json.loads(file.read_text()), [json.loads(line) for line in lines if line]


@pytest.mark.usefixtures("own_tasks")
def test_our_task_gives_the_texts_of_our_runner(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = lm_eval(
        "--model_args", f"model=tiny-llada,{','.join(DECODER)}", "--tasks", "minigsm",
        "--include_path", str(TASKS), "--limit", "3", "--log_samples", "--output_path", str(out),
    )  # fmt: skip
    assert code == 0
    found, samples = results(out)
    texts = {one["doc"]["id"]: one["resps"][0][0] for one in samples if one["filter"][0] == "s"}
    overrides = ["model=tiny-llada", "hardware=cpu", "benchmark=minigsm", "limit=3", *DECODER]
    spec = RunSpec.from_config(compose([*overrides, "benchmark.max_new_tokens=128"]))
    store = Store(tmp_path / "runs")
    record, ours = run(spec, store=store), read_samples(store.path(spec))
    assert texts == {key: sample.text for key, sample in ours.items()}
    assert all(sample.prompt.startswith("Question:") for sample in ours.values())
    mean = found["results"]["minigsm"]["exact_match,strict-match"]
    assert mean == pytest.approx(record.score.mean)
    measured = found["config"][found["config"]["model"]]
    assert measured["tps/e2e"] > 0
    for name in ("tpf/emitted", "forwards/mean"):
        assert measured[name] == record.summary[name]
    (folder,) = out.iterdir()
    assert folder.name.startswith("tiny-llada-fast_dllm-")


def words(folder: Path, kind: str = "generate_until") -> None:
    rows = [{"question": f"What is {i} + 1?", "answer": f" {i + 1}"} for i in range(4)]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metric = "perplexity" if kind == "loglikelihood" else "exact_match"
    text = WORDS.format(file=folder / "words.jsonl", kind=kind, metric=metric)
    (folder / "words.yaml").write_text(text)


@pytest.mark.usefixtures("own_tasks")
def test_flags_of_lm_eval_work(tmp_path: Path) -> None:
    """Chat turns, budget, system text, cache of answers, and a limit."""
    words(tmp_path)
    out = tmp_path / "out"
    settings = ("--model_args", "model=tiny-dream-instruct,decoder=fast_dllm_dream")
    asked = (
        "--tasks", "words", "--include_path", str(tmp_path), "--limit", "2", "--log_samples",
        "--apply_chat_template", "--system_instruction", "Be brief.", "--gen_kwargs",
        "max_gen_toks=16", "--use_cache", str(tmp_path / "cache"), "--output_path", str(out),
    )  # fmt: skip
    assert lm_eval(*settings, *asked) == 0
    _, samples = results(out)
    assert len(samples) == 2
    turns = json.loads(samples[0]["arguments"]["gen_args_0"]["arg_0"])
    assert [turn["role"] for turn in turns] == ["system", "user"]
    assert samples[0]["arguments"]["gen_args_0"]["arg_1"]["max_gen_toks"] == 16
    assert list(tmp_path.glob("cache*"))


@pytest.mark.usefixtures("own_tasks")
@pytest.mark.parametrize(("settings", "kind", "sentence"), REFUSED)
def test_what_cannot_be_run_is_one_sentence(settings, kind, sentence, tmp_path, capsys) -> None:
    words(tmp_path, kind)
    code = lm_eval("--model_args", settings, "--tasks", "words", "--include_path", str(tmp_path))
    assert code == 2 and sentence in capsys.readouterr().err


def test_help_is_lm_eval_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["lm-eval", "run", "--help"])
    assert "--include_path" in capsys.readouterr().out
