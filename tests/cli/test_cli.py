"""The command line as a user meets it: help, exit codes, folders as models, a sentence per mistake.

Mostly called in this process for speed; what has to hold for the installed command (imports,
`python -m`, a clean working directory) is run as a process of its own. Help and mistakes import no
model library: times depend on the machine, imports do not; what is imported is what takes the time.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hydra._internal.hydra import Hydra

import dllm_bench as db
from dllm_bench import __version__
from dllm_bench.api.compose import check_folder, compose
from dllm_bench.cli import doctor_torch
from dllm_bench.cli.main import COMMANDS, main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation
from dllm_bench.launch.slurm import PackedJob
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.paths import assets_dir, options, read_yaml
from dllm_bench.store.groups import ModelGroup
from scripts.install import IMPORTED
from tests.tiers import covering

Capture = pytest.CaptureFixture[str]


def dllm_bench(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Return the command in a process of its own."""
    command = [sys.executable, "-m", "dllm_bench", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.run(command, text=True, timeout=60, check=False, **streams)


@pytest.mark.parametrize("words", [["--help"], [], ["train"], ["runs"]], ids=str)
def test_help_is_printed_on_request_and_where_a_name_is_missing(words, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert "-h, --help" in printed
    assert words != ["--help"] or all(f"\n    {command} " in printed for command in COMMANDS)


def test_run_help_lists_the_choices(command) -> None:
    printed = {*command("run --help", here=False).split()}
    assert {*options("model"), *options("decoder"), *options("benchmark")} <= printed


def test_console_script_is_the_same_command(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("dllm-bench")
    if not script.exists():
        pytest.skip("the package is not installed in this environment")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"dllm-bench {__version__}\n")


LINES = read_yaml(Path(__file__).with_name("lines.yaml"))
MISTAKES, OTHER_MISTAKES = LINES["run"], LINES["other"]
REFUSED_BY_PARSER, COMPLETED = LINES["parser"], LINES["completed"]
BEFORE_TORCH = LINES["before torch"]


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_sentence(line, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("DLLM_BENCH_ALLOW_CODE", raising=False)
    monkeypatch.chdir(tmp_path)
    started = time.process_time()
    assert main(["run", f"paths.results={tmp_path}", *line.split()]) == 2
    assert time.process_time() - started < 10
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("dllm-bench: ") and ".py" not in sentence
    assert all(word in sentence for word in MISTAKES[line]), sentence
    assert os.listdir(tmp_path) == []


def test_a_run_is_composed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composing = Mock(wraps=Hydra.compose_config)
    monkeypatch.setattr(Hydra, "compose_config", lambda *given, **more: composing(*given, **more))
    wrong = ["decoder=fast_dllm", "decoder.select.tau=2", f"paths.results={tmp_path}"]
    assert main(["run", *wrong]) == 2 and composing.call_count == 1


@pytest.mark.parametrize("line", OTHER_MISTAKES)
def test_other_mistakes_are_one_sentence(line: str, command) -> None:
    (sentence,) = command(line, code=2).splitlines()
    assert sentence.startswith("dllm-bench: ") and OTHER_MISTAKES[line] in sentence


@pytest.mark.parametrize("line", REFUSED_BY_PARSER)
def test_the_parser_says_what_it_refuses(line: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(line.split())
    assert exit_.value.code == 2
    assert REFUSED_BY_PARSER[line] in capsys.readouterr().err


def test_configuration_is_printed_and_nothing_is_left_behind(tmp_path: Path) -> None:
    done = dllm_bench("run", "--cfg", "job", "decoder=fast_dllm", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "dllm_bench.decoding.masked.MaskedDecoder" in done.stdout and not os.listdir(tmp_path)


def test_a_full_disk_is_told_in_a_sentence(monkeypatch, capsys) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "results/table.md"))
    monkeypatch.setattr("dllm_bench.cli.main.imported", lambda name: full)
    assert main(["run"]) == 2
    assert "no space is left to write (results/table.md)" in capsys.readouterr().err


def test_a_closed_pipe_ends_the_print_of_defaults_in_silence(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = dllm_bench("run", "--info", "defaults", cwd=tmp_path, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_pipe_to_a_worker_is_no_success(monkeypatch) -> None:
    broken = Mock(side_effect=BrokenPipeError)
    monkeypatch.setattr("dllm_bench.cli.main.imported", lambda name: broken)
    with pytest.raises(BrokenPipeError):
        main(["run"])


@pytest.mark.parametrize(("more", "jobs"), [("hardware=cpu", 0), ("hardware=cpu -m", 1)])
def test_an_estimate_names_cost_and_memory_and_runs_nothing(more, jobs, command, tmp_path) -> None:
    *job, cost, memory = command(f"run {more} --estimate decoder=lopa limit=10").splitlines()
    assert cost.startswith("cost: about ") and "640 forwards" in cost
    assert "memory: weights 4." in memory and "cpu has" in memory
    assert [one[:12] for one in (*job, *os.listdir(tmp_path))] == ["hardware=cpu", ".launch"] * jobs


def test_the_prompt_of_an_item_has_the_special_tokens_of_its_template(command) -> None:
    shown = command("prompt minigsm model=tiny-dream-instruct --sample 1", here=False)
    as_in_run = "prompt benchmark=minigsm model=tiny-dream-instruct --sample 1"
    assert command(as_in_run, here=False) == shown
    assert shown.startswith("<|user|>Question:") and "\nAnswer:<|eot|><|assistant|>" in shown
    for n in (-1, 5000):
        assert "1000 items" in command(f"prompt minigsm --sample {n}", code=2, here=False)


def completed(line: str, folder: Path) -> list[str]:
    """Return the words that a shell would be given."""
    answer, line = folder / "words", f"dllm-bench {line}"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    to = {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "_ARGCOMPLETE_IFS": "\n"}
    assert dllm_bench(env={**os.environ, **asked, **to}).returncode == 0
    return [word.strip() for word in answer.read_text().split("\n")]


@pytest.mark.parametrize("line", covering(4, COMPLETED))
def test_the_shell_completes_commands_choices_and_settings(line: str, tmp_path: Path) -> None:
    (wanted, other), words = COMPLETED[line], completed(line, tmp_path)
    assert wanted in words and other not in words, words[:10]


def test_the_lines_for_a_shell_are_read_by_bash(command) -> None:
    script = f"set -e\n{command('completion', here=False)}\ncomplete -p dllm-bench"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert "_python_argcomplete" in done.stdout, done


def test_no_results_directory_is_no_working_directory(command, monkeypatch) -> None:
    monkeypatch.setenv("DLLM_BENCH_RESULTS", "")
    assert "DLLM_BENCH_RESULTS" in command("table lopa/table5", code=2, here=False)


def test_status_goes_on_behind_a_table_and_a_figure_that_cannot_be_read(command, tmp_path) -> None:
    states = ("sealed", "sealed", "missing")
    for name, text in (
        ("tables/lopa/table3.json", "[" * 100_000),
        ("tables/lopa/table4.json", '{"cells": [{'),
        ("tables/lopa/table5.json", json.dumps({"cells": [{"state": s} for s in states]})),
        ("figures/embedded/lopa/figure1.csv", "torn\n1,2"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    said = command("status")
    assert "No runs" in said and "`dllm-bench table lopa/table3` writes it again" in said
    assert "`dllm-bench table lopa/table4` writes it again" in said
    assert "table lopa/table5: 3 cells, 1 missing, 2 sealed" in said
    assert "`dllm-bench figure lopa/figure1` draws it again" in said


def test_doctor_looks_where_results_are_asked_for(capsys: Capture, tmp_path: Path) -> None:
    main(["doctor", "--results", str(tmp_path)])
    [line] = [line for line in capsys.readouterr().out.splitlines() if " results " in line]
    assert line.endswith(str(tmp_path))


def test_a_mask_token_is_given_as_its_text() -> None:
    for text in ("model.mask_token=<|mask|>", "model.mask_token='<|mask|>'"):
        assert compose(["model=tiny-llada", text])["model"]["mask_token"] == "<|mask|>"


def test_an_autoregressive_layout_is_told_how_to_be_a_diffusion_model() -> None:
    with pytest.raises(DllmBenchError, match=r"model\.attention_form=full"):
        db.generate("tiny-qwen3", "Tom has 3 apples.", "vanilla", 32)
    model = db.load_model("tiny-qwen3", attention_form="full")
    assert len(db.generate(model, "Tom has 3 apples.", "vanilla", 32)) == 1


@pytest.mark.parametrize("adapter", ["dream", "sdar", "llada_moe", "llada2"])
def test_a_rotary_embedding_that_is_spelled_out_as_usual_is_accepted(adapter: str) -> None:
    for usual in ({"rope_type": "default"}, {"type": "default"}):
        ADAPTERS[adapter].check({"rope_scaling": usual})


def test_messages_name_only_commands_that_there_are() -> None:
    texts = [path.read_text() for path in Path(db.__file__).parent.rglob("*.py")]
    named = re.findall(r"`dllm-bench ([a-z][a-z-]*)", " ".join(texts))
    assert {"run", "status"} < set(named) <= set(COMMANDS)


ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "torch transformers huggingface_hub matplotlib pandas scipy datasets sklearn "
    "safetensors wandb submitit"
).split()
NOT_FOR_HELP = (*HEAVY, "hydra", "numpy", "requests", "lm_eval.api.model")
NOT_FOR_EMBEDDED = (  # a model that ships with the package is a short text's whole work
    "transformers.modeling_utils transformers.core_model_loading transformers.generation "
    "torch.distributed.tensor torch._dynamo torch._inductor accelerate sympy scipy "
    "matplotlib datasets"
).split()
HELP = [[], *([name] for name in COMMANDS), ["lm-eval", "run"]]  # the last: lm-eval's own
HELP += [[group, kind] for group, one in COMMANDS.items() for kind in one.get("kinds", ())]
CODE = """
import json, sys
from dllm_bench.cli.main import main
heavy, known = set(sys.argv[1].split(",")), set()
for words in json.loads(sys.argv[2]):
    try:
        code = main(words)
    except SystemExit as stopped:
        code = stopped.code
    found = (heavy & set(sys.modules)) - known
    known |= found
    sys.stdout.flush()
    print(f"\\n{' '.join(words)}: exit code {code}, imported {sorted(found)}", flush=True)
    print(f"{' '.join(words)}", file=sys.stderr, flush=True)
"""


def imported(heavy: Sequence[str], commands: list[list[str]], cwd: Path) -> tuple[str, str]:
    """(stdout, stderr) of a process that runs commands and prints, after each, its exit code and
    which of the heavy modules it was the first to import."""
    command = [sys.executable, "-c", CODE, ",".join(heavy), json.dumps(commands)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def endings(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if ": exit code " in line]


TEXTS = [["generate", f"tiny-{name}", "vanilla", "Tom has"] for name in ("llada", "dream-base")]


@pytest.mark.parametrize(
    ("slow", "commands"),
    [
        pytest.param(NOT_FOR_HELP, [[*one, "--help"] for one in HELP], id="help"),
        pytest.param(  # rich: bars of runs
            ("rich",), [[one, "--help"] for one in ("table", "figure", "claims")], id="of runs"
        ),
        pytest.param(NOT_FOR_EMBEDDED, TEXTS, id="texts", marks=pytest.mark.exhaustive),
    ],
)
def test_help_and_short_texts_import_nothing_that_is_slow(slow, commands, tmp_path) -> None:
    stdout, _ = imported(slow, commands, tmp_path)
    assert endings(stdout) == [f"{' '.join(one)}: exit code 0, imported []" for one in commands]


def test_a_wrong_name_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    commands = [text.split() for text in BEFORE_TORCH]
    stdout, stderr = imported(("torch", "transformers", "matplotlib"), commands, tmp_path)
    assert endings(stdout) == [f"{text}: exit code 2, imported []" for text in BEFORE_TORCH]
    for text, named in BEFORE_TORCH.items():
        error, stderr = stderr.split(f"{text}\n", 1)
        assert named in error, text
        assert "nearest of" not in error or len(error) < 350, "a few of many names"


SEALED = """
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from dllm_bench.cli.table import fill
from dllm_bench.metrics.accuracy import mean_score
from dllm_bench.store.store import Store
assert fill(Namespace(run=True, submit=False), [], Store(Path("runs"))) == []
assert mean_score([0.0, 1.0]) is not None
"""
COMPLETION = """
from dllm_bench.cli import completion
for line in ("run", "generate", "table", "train drafter"):
    completion.parser_of(line.split())
list(completion.setting_words("decoder.", {"decoder": "lopa"}))
"""
PAGE = """
from dataclasses import replace
from dllm_bench.api.compose import compose
from dllm_bench.site.texts import TextSource
from dllm_bench.store import inputs
from dllm_bench.store.spec import RunSpec
from tests.site.builders import lookaheads
config = compose(["model=tiny-llada", "benchmark=minigsm"])
benchmark = inputs.benchmark_of(config["benchmark"])
name = benchmark.items[0]["id"]
data = {"dataset": benchmark.dataset_hash()}
spec = RunSpec(config["model"], {}, config["benchmark"], {}, inputs=data)
samples = {name: replace(lookaheads(name), text="#### 7", prompt="Why?")}
texts = TextSource(compose)
answer = texts.answers(spec, samples)[name]
assert (texts.prompts(spec, samples)[name], answer.extracted) == ("Why?", "7")
assert answer.gold.partition("#### ")[2].isdecimal()
assert texts.decode(spec)(range(40))
"""
JOB = f"""
import pickle
pickle.loads({pickle.dumps(PackedJob(b"a pickled run"))!r})
"""
RENDERING = "import dllm_bench.tables.render, dllm_bench.tables.plan"
AT_ONCE = {
    "a table whose runs are all stored": (SEALED, "torch scipy.stats"),
    "completion": (COMPLETION, "torch hydra omegaconf pandas matplotlib"),
    "rendering": (RENDERING, "torch hydra omegaconf scipy transformers pandas wandb"),
    "loggers of runs": ("import dllm_bench.runs.loggers", "wandb"),
    "what a page shows of a run": (PAGE, "torch transformers lm_eval"),
    "a job of SLURM, which answers no signal before it is read": (JOB, "torch"),
}


@pytest.mark.parametrize("what", AT_ONCE)
def test_what_answers_at_once_imports_nothing_that_is_slow(what, tmp_path) -> None:
    code, slow = AT_ONCE[what]
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    found = f"print(set(sys.modules) & set({slow.split()}))"
    command = [sys.executable, "-c", f"{start}\n{code}\n{found}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["set()"], done.stderr


def test_commands_of_the_makefile_write_bytecode() -> None:
    """Without it, each process of each run compiles torch again."""
    show = "--eval=show: ; @echo [$$PYTHONDONTWRITEBYTECODE]"
    command = ["make", "--no-print-directory", "-C", str(ROOT), show, "show"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.drill
def test_the_install_compiles_what_a_text_imports(tmp_path: Path) -> None:
    def modules(source: str) -> set[str]:
        command = [sys.executable, "-c", f"{source}\nimport sys; print(*sys.modules)"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return set(done.stdout.splitlines()[-1].split())

    text = "['generate', 'tiny-llada', 'fast_dllm', 'Tom has 3 apples.']"
    needed = modules(f"from dllm_bench.cli.main import main; main({text})")
    libraries = {name for name in needed if name.startswith(("torch.", "transformers."))}
    assert len(libraries) > 500
    assert len(libraries - modules(f"import {', '.join(IMPORTED)}")) < len(libraries) / 50


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an embedded model's files elsewhere, in a folder whose name needs quoting."""
    return shutil.copytree(assets_dir() / "tiny-llada", tmp_path / "my model, v2")


def test_a_folder_is_a_model_with_its_name(folder: Path) -> None:
    for overrides in ([f"model='{folder}'"], ["model=llada-instruct", f"model.path='{folder}'"]):
        model = compose(overrides)["model"]
        assert (model["name"], model["path"]) == (folder.name, str(folder))
    own, shipped = compose([f"model='{folder}'"])["model"], compose(["model=tiny-llada"])["model"]
    assert {key for key in shipped if own[key] != shipped[key]} == {"name", "path"}
    given = ["model.mask_token=X", "model.merge_lora=false", f"model='{folder}'", "model.name=mine"]
    assert compose(given)["model"] == own | {"name": "mine", "mask_token": "X", "merge_lora": False}
    assert compose(["model=GSAI-ML/LLaDA-8B-Instruct"])["model"]["name"] == "llada-instruct"


def test_the_folder_of_a_lora_adapter_is_the_model_it_adapts(folder: Path, tmp_path: Path) -> None:
    adapter, base_of = tmp_path / "adapter", {"base_model_name_or_path": str(folder)}
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(base_of))
    model, base = (compose([f"model='{one}'"])["model"] for one in (adapter, folder))
    assert model == {**base, "name": "adapter", "lora": str(adapter)}
    named = compose(["model=SJTU-Deng-Lab/D2F_Dream_Base_7B_Lora"])
    assert named["model"]["name"] == "d2f-dream-base"
    absent = '{"base_model_name_or_path": "owner/base"}'
    told = f"adapter of 'owner/base', which was not .*model.lora={adapter}"
    none = "holds a LoRA adapter.*model=BASE"
    for text, words in (("{}", none), ('{"base_model_name_or_path": ["x"]}', none), (absent, told)):
        (adapter / "adapter_config.json").write_text(text)
        with pytest.raises(DllmBenchError, match=words):
            compose([f"model='{adapter}'"])


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("tokenizer.json", "a tokenizer"),  # added_tokens.json is left
        ("model.safetensors", "weights"),
        ("config.json", "holds no config.json"),
        ("mask", "model.mask_token=TEXT"),
        ("template", "model.chat=false"),
        ("adapter", r"\(5\), which no adapter reads"),
    ],
)
def test_what_a_folder_lacks_is_said(folder: Path, missing: str, words: str) -> None:
    def change(file: str, **entries: object) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**content, **entries}))

    (folder / "added_tokens.json").write_text("{}")
    settings = {"name": "mine", "path": str(folder), "chat": missing == "template"}
    if missing == "mask":
        change("config.json", mask_token_id=None)
        change("tokenizer_config.json", mask_token=None)
    elif missing == "adapter":
        change("config.json", model_type="gpt2", architectures=5)
    elif missing != "template":
        (folder / missing).unlink()
    with pytest.raises(DllmBenchError, match=words):
        check_folder(ModelGroup(settings))


def test_doctor_and_prefetch_take_folders(folder: Path, command) -> None:
    fetched = command("prefetch", f"model='{folder}'", "--to", f"{folder.parent}", here=False)
    assert "nothing to fetch" in fetched and "manifest" not in fetched
    said = command("doctor", str(folder), "model.chat=false", "hardware.dtype=bfloat16")
    assert "plain prompts" in said and "run in bfloat16" in said


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """One decoder and short rows for `doctor --gpu`, with the CPU in the device's place."""
    monkeypatch.setattr(doctor_torch, "DECODERS", {"fast_dllm": "tiny-llada"})
    monkeypatch.setattr(doctor_torch, "LENGTHS", (8, 1001))
    monkeypatch.setattr(doctor_torch, "LONG", 4613)
    monkeypatch.setattr(doctor_torch, "BATCH", 3)


def checked(out: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the report's steps by name."""
    code = main(["doctor", "--gpu", "--fake", "--quick", "--out", str(out)])
    return code, {step["name"]: step for step in json.loads(out.read_text())["steps"]}


def test_every_step_passes_or_says_why_it_was_skipped(tmp_path: Path, few_cases) -> None:
    code, steps = checked(tmp_path / "gpu.json")
    assert (code, list(steps)) == (0, list(doctor_torch.STEPS))
    skipped = {name: step["why"] for name, step in steps.items() if step["state"] != "passed"}
    assert skipped == doctor_torch.NEED_CUDA
    assert steps["bfloat16"]["facts"]["equal texts"].endswith("of 3")


def test_wrong_numbers_and_other_tokens_are_found(tmp_path, monkeypatch, few_cases) -> None:
    read, decoded = doctor_torch.read_logits, doctor_torch.decoded

    def wrong_ids(*args: Any, **options: Any) -> Any:
        seen = read(*args, **options)
        return replace(seen, ids_KW=seen.ids_KW + 1)

    def other_token(name: str, device: str, batch: int, **more: str) -> dict[str, Generation]:
        made = decoded(name, device, batch, **more)
        key, ids = min(made), list(made[min(made)].ids)
        ids[4] += batch > 1
        return {**made, key: replace(made[key], ids=tuple(ids))}

    two = {name: doctor_torch.STEPS[name] for name in ("numerics", "decoders")}
    monkeypatch.setattr(doctor_torch, "STEPS", two)
    monkeypatch.setattr(doctor_torch, "read_logits", wrong_ids)
    monkeypatch.setattr(doctor_torch, "decoded", other_token)
    code, steps = checked(tmp_path / "gpu.json")
    assert (code, [step["state"] for step in steps.values()]) == (1, ["failed"] * 2)
    (problem,) = steps["decoders"]["problems"]
    assert problem.startswith("fast_dllm, batch 3") and "margin" in problem


def test_tokens_that_were_close_may_differ(monkeypatch, few_cases) -> None:
    """The margin is read where the texts first differ, in the forward that committed it."""
    law = next(iter(doctor_torch.decoded("fast_dllm", "cpu", 1).values()))
    other = replace(law, ids=(law.ids[0] + 1, *law.ids[1:]))
    monkeypatch.setattr(doctor_torch, "margin", lambda logits: torch.zeros(logits.shape[:2]))
    assert doctor_torch.margin_at_difference("fast_dllm", law, other) == 0


@pytest.mark.parametrize("crash", [True, False])
def test_a_crash_is_reported_and_time_ends_the_rest(command, monkeypatch, crash, few_cases) -> None:
    def first(check: doctor_torch.GpuCheck) -> doctor_torch.Found:
        monkeypatch.setattr(doctor_torch, "time", SimpleNamespace(monotonic=lambda: float("inf")))
        if crash:
            raise RuntimeError("CUDA error: an illegal memory access")
        return {}, []

    monkeypatch.setitem(doctor_torch.STEPS, "machine", first)
    machine, *others, late = command("doctor --gpu --fake --quick", code=1).splitlines()
    assert ("illegal memory access (test_cli.py:" in machine) == crash
    assert [" not run: out of time" in line for line in others] == [True] * 9
    assert late.endswith("not checked in 120 s; leave out --quick for 600 s")


def test_a_step_that_hangs_or_ends_its_process_is_reported() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        late: Any = process.submit(time.sleep, 0.5)
        assert "did not end" in doctor_torch.outcome(late, 0.01)["why"]
        assert doctor_torch.outcome(process.submit(os._exit, 1), 60)["state"] == "failed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_one_sentence(command) -> None:
    (line,) = command("doctor --gpu", code=2).splitlines()
    assert "give --fake" in line
