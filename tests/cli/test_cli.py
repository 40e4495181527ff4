"""The command line as a user meets it: help, exit codes, one sentence per mistake.

Mostly called in this process for speed; what has to hold for the installed command (start time,
`python -m`, a clean working directory) is run as a process of its own.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hydra._internal.hydra import Hydra

import dllm_bench as db
from dllm_bench import __version__
from dllm_bench.api.compose import compose
from dllm_bench.cli.main import COMMANDS, main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.paths import options, read_yaml
from tests.tiers import covering

Capture = pytest.CaptureFixture[str]


def dllm_bench(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Return the command in a process of its own."""
    command = [sys.executable, "-m", "dllm_bench", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.run(command, text=True, timeout=60, check=False, **streams)


def only_sentence(capture: Capture) -> str:
    """Return what stderr holds, which has to be one line."""
    lines = capture.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("dllm-bench: ")
    return lines[0]


@pytest.mark.parametrize("words", [["--help"], [], ["train"], ["runs"]], ids=str)
def test_help_is_printed_on_request_and_where_a_name_is_missing(words, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert "-h, --help" in printed
    assert words != ["--help"] or all(f"\n    {command} " in printed for command in COMMANDS)


def test_run_help_lists_the_choices(capsys: Capture) -> None:
    assert main(["run", "--help"]) == 0
    printed = {*capsys.readouterr().out.split()}
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


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_sentence(line, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("DLLM_BENCH_ALLOW_CODE", raising=False)
    monkeypatch.chdir(tmp_path)
    started = time.process_time()
    assert main(["run", f"paths.results={tmp_path}", *line.split()]) == 2
    assert time.process_time() - started < 10
    sentence = only_sentence(capsys)
    assert all(word in sentence for word in MISTAKES[line]) and ".py" not in sentence, sentence
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


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
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
