"""Benchmarks: gold answers score 1, those of other items 0; verdicts and hashes are fixed.

Real item sets are read from the data directory and skip where it is absent: a fixed sample of each
task is graded, all items with DLLM_BENCH_ALL_ITEMS=1. Items that a published grader gets wrong are
listed in gold.yaml, each with the reason. What answers.yaml expects was worked out by hand from the
published rules; `test_prompts` compares with the installed packages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance

from dllm_bench.api.lm_eval_model import DllmBenchLM
from dllm_bench.benchmarks import code_answers, evalplus, sandbox
from dllm_bench.benchmarks.evalplus import PROBLEM_SETS
from dllm_bench.benchmarks.lm_eval import task_file, task_names
from dllm_bench.benchmarks.tasks import (
    code_scorers,
    korbench,
    livecodebench,
    math_answers,
    sources,
    text_scorers,
)
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml
from tests import benchmark_helpers as helpers
from tests.tiers import covering

KNOWN = read_yaml(Path(__file__).with_name("gold.yaml"))
OF_NEW_SUM = {"humaneval_plus/test/32"} if sys.version_info >= (3, 12) else set[str]()
"""Gold answers that fail since Python 3.12, whose `sum` rounds less."""


@pytest.mark.exhaustive
def test_problems_with_their_own_rule(real_data: Path) -> None:
    """Sets, several right answers, and inputs that JSON cannot hold, of both EvalPlus sets."""
    pytest.importorskip("evalplus", reason="needs the extra [code]")
    no_json = {"humaneval_plus": (), "mbpp_plus": ("empty_list", "angle_complex", "convert")}
    for dataset, others in no_json.items():
        names = {*PROBLEM_SETS[dataset].rules, *others}
        benchmark = helpers.evalplus_benchmark(dataset, data_dir=str(real_data))
        chosen = [item for item in benchmark.items if item["entry_point"] in names]
        scores = benchmark.score({item["id"]: helpers.GOLD[dataset](item) for item in chosen})
        assert len(scores) >= len(names) - 3
        assert {key for key, s in scores.items() if s.value != 1} == OF_NEW_SUM & set(scores)


def test_a_root_of_a_polynomial_is_checked_as_such(real_data: Path) -> None:
    benchmark = helpers.evalplus_benchmark("humaneval_plus", data_dir=str(real_data))
    (key,) = [i["id"] for i in benchmark.items if i["entry_point"] == "find_zero"]
    assert benchmark.score({key: "    return 0.5\n"})[key].verdict == "wrong"


def test_the_rules_are_evalplus_s_own() -> None:
    pytest.importorskip("evalplus", reason="needs the extra [code]")
    from evalplus.eval import _special_oracle as theirs

    rules = PROBLEM_SETS["mbpp_plus"].rules
    by_rule = {rule: {n for n, r in rules.items() if r == rule} for rule in rules.values()}
    assert by_rule["same_set"] == set(theirs.MBPP_OUTPUT_SET_EQ_TASKS)
    assert by_rule["same_presence"] == set(theirs.MBPP_OUTPUT_NOT_NONE_TASKS)


def test_escape_until_keeps_hard_stops_only() -> None:
    settings: dict[str, Any] = {"stop": ("Question:",), "hard_stop": ("[END]",), "limit": 1}
    ends = helpers.lm_eval_benchmark("minigsm", helpers.FLEXIBLE, **settings)
    runs_on = replace(ends, escape_until=True)
    assert runs_on.requests(helpers.encode)[0].stop == ("[END]",)
    texts = {
        k: f"{v}\nQuestion: more?\n#### 100[END]#### 101" for k, v in helpers.gold(ends).items()
    }
    assert helpers.mean(ends.score(texts)) == 1
    (score,) = runs_on.score(texts).values()
    assert (score.value, score.metrics[helpers.STRICT]) == (0, 1)  # reads on to 100


def test_verdicts_of_answers() -> None:
    benchmark = helpers.lm_eval_benchmark("minigsm", limit=4)
    answers = [helpers.GOLD["minigsm"](benchmark.items[0]), " \n", "no number", "#### 1000"]
    scores = benchmark.score(dict(zip((i["id"] for i in benchmark.items), answers, strict=True)))
    assert [s.verdict for s in scores.values()] == ["correct", "empty", "no_answer", "wrong"]


def test_verdicts_of_programs_and_stages() -> None:
    """A timeout is not a failure and does not affect other programs; plus requires base."""
    benchmark = helpers.evalplus_benchmark("minicode", limit=7, stop=("\ndef ",))
    texts = helpers.gold(benchmark)
    scores = benchmark.score(texts | dict(zip(texts, KNOWN["bodies"], strict=False)))
    verdicts = [scores[name].verdict for name in texts]
    assert verdicts == [*KNOWN["bodies"].values(), "correct"]


@pytest.mark.parametrize(
    ("word", "metrics"),
    [("not in", {"base": 1.0, "plus": 0.0}), ("in", {"base": 0.0, "plus": 0.0})],
)
def test_right_on_one_set_of_inputs(word: str, metrics: dict[str, float]) -> None:
    """Wrong outside the base inputs, then wrong on them: plus counts only with base."""
    benchmark = helpers.evalplus_benchmark("minicode", limit=1)
    (item,) = benchmark.items
    names = item["prompt"].split("(", 1)[1].split(")", 1)[0]
    body = f"    if [{names}] {word} {item['base_input']!r}: return None\n"
    texts = {item["id"]: body + item["canonical_solution"]}
    assert benchmark.score(texts)[item["id"]].metrics == metrics
    by_base = replace(benchmark, primary="base").score(texts)[item["id"]]
    assert (by_base.value, by_base.verdict == "correct") == (metrics["base"], metrics["base"] == 1)


@helpers.each_kind
def test_foreign_ids_are_refused(benchmark: helpers.Bench) -> None:
    with pytest.raises(DllmBenchError, match=r"'nowhere/1'.*limit, split and data"):
        benchmark.score({"nowhere/1": "x"})
    assert benchmark.score({}) == {}


CHANGES: Sequence[dict[str, Any]] = (
    {"limit": 9}, {"split": "train"}, {"stop": ("x",)}, {"template": "chat"},
)  # fmt: skip


@helpers.each_kind
def test_the_hash_follows_what_is_asked(benchmark: helpers.Bench) -> None:
    changed = [replace(benchmark, **change).dataset_hash() for change in CHANGES]
    assert len({benchmark.dataset_hash(), *changed}) == len(CHANGES) + 1
    assert replace(benchmark).dataset_hash() == benchmark.dataset_hash()
    same = ({"data_dir": "x"}, {"max_new_tokens": 5}, {"allow_code_execution": False})
    assert {replace(benchmark, **one).dataset_hash() for one in same} == {benchmark.dataset_hash()}


def test_the_hash_sees_shots_and_items(real_data: Path, tmp_path: Path) -> None:
    def hash_of(folder: Path, shots: int = 2) -> str:
        sources.rows.cache_clear()
        return helpers.lm_eval_benchmark("gsm8k", shots=shots, data_dir=str(folder)).dataset_hash()

    before = hash_of(real_data)
    assert hash_of(real_data, shots=3) != before
    shutil.copytree(real_data / "gsm8k", tmp_path / "gsm8k")
    assert hash_of(tmp_path) == before
    shutil.copy(tmp_path / "gsm8k" / "test.jsonl", tmp_path / "gsm8k" / "train.jsonl")
    assert hash_of(tmp_path) != before


LIGHT = Path(__file__).with_name("light.txt").read_text()


def test_checks_import_no_harness_and_hashes_depend_on_no_order_of_sets(root: Path) -> None:
    env = {"PYTHONHASHSEED": "7", "PYTHONPATH": str(root)}
    found = subprocess.run([sys.executable, "-c", LIGHT], env=env, capture_output=True, text=True)
    ours = helpers.lm_eval_benchmark("minigsm"), helpers.evalplus_benchmark("minicode")
    assert found.stdout.split() == [one.dataset_hash() for one in ours], found.stderr


def test_minicode_needs_no_evalplus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "evalplus", None)
    benchmark = helpers.evalplus_benchmark("minicode", limit=1)
    benchmark.check()
    assert helpers.mean(benchmark.score(helpers.gold(benchmark))) == 1


def test_nothing_is_run_without_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sandbox.CONSENT_VARIABLE, raising=False)
    monkeypatch.setattr(sandbox, "execute", lambda *args: pytest.fail("a program was run"))
    code = helpers.evalplus_benchmark("minicode", allow_code_execution=False)
    mbpp = helpers.lm_eval_benchmark("mbpp", helpers.COMPLETION, allow_code_execution=False)
    for benchmark in (code, mbpp):
        with pytest.raises(DllmBenchError, match="allowed yet.*_code_execution=true or DLLM_BENCH"):
            benchmark.score({"an item": "    return 1\n"})
    monkeypatch.setenv(sandbox.CONSENT_VARIABLE, "1")
    sandbox.require_consent(False, "minicode")


def lm(generate: Any) -> DllmBenchLM:
    """Return lm-eval's model around a function in place of a decoder."""
    generate.name, generate.metrics = "function", dict
    return DllmBenchLM(generate)


def test_a_task_may_begin_the_answer_of_a_chat() -> None:
    """lm-eval's gen_prefix is a last turn of the assistant, which the model continues."""
    asked: list[Any] = []
    model = lm(lambda prompt, budget, stop: asked.append(prompt) or "")
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "def f():"}]
    text = model.apply_chat_template(turns, False)
    model.generate_until([Instance("generate_until", {}, (text, {"until": []}), 0)])
    assert asked == [turns]


MBPP = "mbpp/mbpp.jsonl"  # items of every split


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_tests_that_need_the_program_s_objects_are_compared_outside_of_it(real_data: Path) -> None:
    (doc,) = [doc for doc in lines(real_data / MBPP) if doc["task_id"] == 367]
    pieces = code_scorers.Tests("\n".join([doc["test_setup_code"], *doc["test_list"]]), "").pieces
    assert [value for _, value in pieces if value] == [(False,), (True,), (False,)]
    assert not [source for source, _ in pieces if "True" in source or "False" in source]
    assert code_scorers.grade_mbpp(doc, [doc["code"]])["pass@1"] == 1
    for cheat in KNOWN["cheats"]:
        assert code_scorers.grade_mbpp(doc, [f"{doc['code']}\n{cheat}"])["pass@1"] == 0


@pytest.mark.parametrize("text", KNOWN["not apart"])
def test_tests_that_cannot_be_kept_apart_give_no_grade(text: str) -> None:
    outcome = code_scorers.Tests(text, "").run("def f(x):\n    return 2", 5, apart=False)
    assert outcome.verdict == "judge_error"
    for tests in (code_scorers.Tests("assert", ""), code_scorers.Tests("", "def f(")):
        assert code_scorers.verdict_of("f = 1", tests) == "judge_error", "they are no Python"


def test_a_busy_machine_moves_no_tests_into_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = sandbox.ProgramOutcome("timeout", "", 0.0)
    monkeypatch.setattr(code_scorers.Tests, "run", lambda *given: busy)
    assert code_scorers.calibrate(code_scorers.Tests("assert f(1) == 1", "busy"))[1]


@pytest.mark.drill  # a minute, and the data never changes
def test_four_items_of_mbpp_and_none_of_humaneval_run_by_pieces(real_data: Path) -> None:
    of_items: list[tuple[int | str, code_scorers.Tests]] = []
    for doc in lines(real_data / MBPP):
        text = "\n".join(["", doc["test_setup_code"], *doc["test_list"], ""])
        of_items.append((doc["task_id"], code_scorers.Tests(text, doc["code"])))
    for doc in lines(real_data / "humaneval/HumanEval.jsonl"):
        text, name = f"\n{doc['test']}\ncheck({doc['entry_point']})\n", doc["entry_point"]
        reference = doc["prompt"] + doc["canonical_solution"]
        of_items.append((doc["task_id"], code_scorers.Tests(text, reference, (name,))))
    found = [name for name, tests in of_items if not code_scorers.calibrate(tests)[1]]
    assert found == [367, 533, 601, 927], "367 is the one of the test split"


@pytest.mark.parametrize(("settings", "text", "budget"), KNOWN["budgets"])
def test_the_budget_of_a_task_is_followed_under_any_of_its_names(settings, text, budget) -> None:
    asked: list[int] = []
    model = lm(lambda prompt, budget, stop: asked.append(budget) or "a. b")
    assert model.generate_until([Instance("generate_until", {}, ("x", settings), 0)]) == [text]
    assert asked == [budget]


@pytest.mark.parametrize("settings", KNOWN["not followed"], ids=str)
def test_a_generation_setting_that_is_not_followed_is_refused(settings: dict[str, Any]) -> None:
    model = lm(lambda prompt, budget, stop: "")
    with pytest.raises(DllmBenchError, match=f"{next(iter(settings))}=.*would be ignored"):
        model.generate_until([Instance("generate_until", {}, ("x", settings), 0)])


# --- gold answers of every task, on real items ----------------------------------------------------

ALL = os.environ.get("DLLM_BENCH_ALL_ITEMS") == "1"
TEXTS, PROGRAMS, FOREIGN = (None, None, None) if ALL else (300, 8, 150)
SPLITS, CHANCE, WRONG_GOLD = (KNOWN[name] for name in ("splits", "chance", "wrong gold"))
ABSENT = ("sudoku_dream", "countdown_dream")  # see test_prompts.py
TASKS = [task for task in task_names() if task_file(task)["output_type"] == "generate_until"]
"""Tasks whose answers are texts."""
DAILY = ("gsm8k", "humaneval", "mbpp")


@pytest.mark.parametrize("task", [*DAILY, *covering(9, [t for t in TASKS if t not in DAILY])])
def test_gold_is_right_and_foreign_answers_are_not(task: str, real_data: Path) -> None:
    if task in ABSENT:
        pytest.skip(f"no items of {task} in {real_data}")
    file = task_file(task)
    primary = f"{file['metric_list'][0]['metric']},{file['filter_list'][0]['name']}"
    split = SPLITS.get(file["dataset_kwargs"]["source"], "test")
    limit = PROGRAMS if file.get("unsafe_code") else TEXTS
    data = {"split": split, "limit": limit, "data_dir": str(real_data)}
    asked = helpers.lm_eval_benchmark(task, primary, **data)
    texts = helpers.gold(asked)
    scores = asked.score(texts)
    lucky = asked.score(dict(list(helpers.foreign(texts).items())[:FOREIGN]))
    for metric in scores[next(iter(texts))].metrics:
        wrong = {key for key, score in scores.items() if score.metrics[metric] != 1}
        known = {**WRONG_GOLD.get(task, {}), **WRONG_GOLD.get(metric, {})}
        assert wrong == set(known) & set(texts), metric
        share = sum(score.metrics[metric] for score in lucky.values()) / len(lucky)
        assert share <= CHANCE.get(task, 0.02), metric


@pytest.mark.parametrize(
    ("dataset", "postprocess"),
    covering(2, [*product(("humaneval_plus", "mbpp_plus"), ("evalplus", "assembled", "lopa"))]),
)
def test_canonical_solutions_pass_base_and_plus_and_foreign_ones_do_not(
    dataset: str, postprocess: str, real_data: Path
) -> None:
    pytest.importorskip("evalplus", reason="needs the extra [code]")
    asked = helpers.evalplus_benchmark(
        dataset, limit=PROGRAMS and PROGRAMS // 2, postprocess=postprocess, data_dir=str(real_data)
    )
    scores = asked.score(helpers.gold(asked))
    wrong = {key for key, score in scores.items() if score.metrics != {"base": 1, "plus": 1}}
    assert wrong == {*OF_NEW_SUM, *WRONG_GOLD.get(f"{dataset} {postprocess}", ())} & set(scores)
    assert helpers.mean(asked.score(helpers.foreign(helpers.gold(asked)))) == 0


# --- each published way to grade, on texts for which the ways differ ------------------------------


ANSWERS: dict[str, Any] = read_yaml(Path(__file__).with_name("answers.yaml"))


@pytest.mark.parametrize(
    ("read", "texts", "found"),
    [(r, texts, found) for r, cases in ANSWERS["read"].items() for *texts, found in cases],
)
def test_what_is_read_of_texts(read: str, texts: list[str], found: Any) -> None:
    module, _, name = read.partition(".")
    assert getattr(globals()[module], name)(*texts) == found


@pytest.mark.parametrize(("one", "other", "same"), ANSWERS["equal"])
def test_opencompass_s_equality(one: str, other: str, same: bool) -> None:
    assert math_answers.same(one, other) is same and math_answers.same(other, one) is same


def test_math_verify_sees_what_strings_do_not() -> None:
    assert math_answers.verified("so $\\boxed{\\sqrt{3}/2}$", "$\\boxed{\\frac{\\sqrt 3}{2}}$")
    assert not math_answers.same("\\frac{\\sqrt 3}{2}", "\\sqrt{3}/2")
    assert not math_answers.verified("$\\boxed{3}$", "$\\boxed{2}$")


@pytest.mark.parametrize("text", ["ANSWER: **A**", "ANSWER: (A)", "ANSWER: $\\boxed{A}$"])
def test_marks_around_a_letter(text: str) -> None:
    doc = {"answer": 0}
    ((bare,),) = text_scorers.without_marks([[text]], [doc])
    assert text_scorers.mmlu_letter(doc, [text]) == {"accuracy": 0.0}
    assert text_scorers.mmlu_letter(doc, [bare]) == {"accuracy": 1.0}


@pytest.mark.parametrize(("text", "restored"), ANSWERS["first_indent"])
def test_a_lost_first_indent(text: str, restored: bool) -> None:
    assert code_answers.with_first_indent(text, "f") == ("    " if restored else "") + text


@pytest.mark.parametrize(("text", "minerva", "boxed"), ANSWERS["mathematics"])
def test_readings_of_mathematics(text, minerva, boxed) -> None:
    item = {"solution": "We get $\\boxed{\\frac{1}{2}}$."}
    assert [*text_scorers.math_minerva(item, [text]).values()] == minerva
    assert [*text_scorers.math_boxed(item, [text]).values()] == boxed


@pytest.mark.parametrize(
    ("grader", "text", "value"),
    [(name, *case) for name, graded in ANSWERS["graded"].items() for case in graded["texts"]],
)
def test_right_answers_of_graders(grader: str, text: str, value: int) -> None:
    graded = ANSWERS["graded"][grader]
    assert getattr(text_scorers, grader)(graded["item"], [text])[graded["metric"]] == value


@pytest.mark.parametrize(("answers", "text", "exact", "f1", "lenient"), ANSWERS["squad"])
def test_readings_of_squad(answers, text, exact, f1, lenient) -> None:
    doc = {"answers": answers, "plausible": [] if answers else ["1066"]}
    strict = text_scorers.squad_v2(doc, [text])
    assert (strict["exact"], strict["f1"]) == (exact, pytest.approx(f1))
    assert text_scorers.squad_v2_lenient(doc, [text])["score"] == lenient


@pytest.mark.parametrize(
    ("category", "rule", "index", "gold", "right", "wrong"), ANSWERS["korbench"]
)
def test_korbench_s_matchers(category, rule, index, gold, right, wrong) -> None:
    item = {"category": category, "rule_id": rule, "index": str(index), "answer": gold}
    scores = [korbench.score(item, [text]) for text in (right, wrong, "")]
    assert scores == [{"accuracy": 1}, {"accuracy": 0}, {"accuracy": 0}]


def test_an_end_that_does_not_parse_is_dropped() -> None:
    start = "def f():\n    return 1\n\n"
    assert code_answers.trim_unparsable_end(start + "That is it.") == start
    assert code_answers.trim_unparsable_end("def f(:") == "def f(:"
    long = "def f():\n" + "    x = 1\n" * 2 * code_answers.MAX_LINES + "    return x"
    assert code_answers.trim_unparsable_end(long) == long + "\n"


TWO = "First:\n```python\na = 1\n```\nthen\n```\nb = 2\n```\n"


def test_fenced_blocks() -> None:
    assert code_answers.livecodebench_code(TWO, last=False) == "a = 1"
    assert code_answers.livecodebench_code(TWO, last=True) == "b = 2"
    assert code_answers.livecodebench_code("```python\na = 1", last=True) == ""
    assert code_answers.opencompass_code(TWO) == "a = 1\n"
    assert code_answers.opencompass_code("    return 1\n") == "    return 1\n"


@pytest.mark.parametrize(("postprocess", "line"), [("diffucoder", 1), ("lopa", 2)])
def test_each_way_to_a_program_reads_its_own_fence(postprocess: str, line: int) -> None:
    answer = "    return 1\n```\nor\n```python\n    return 2\n```\n"
    program = evalplus.made_program(answer, postprocess, "def f():\n", "f")
    assert [n for n in (1, 2) if f"return {n}" in program] == [line]


PROMPT = 'import math\n\ndef helper(x):\n    return x\n\ndef f(x):\n    """Doc."""\n'


def test_lopa_s_way_to_a_program() -> None:
    """The fenced code follows the prompt; names that are not reached, and prose, are dropped."""
    answer = (
        "Sure!\n```python\ndef g(x):\n    print(x)\n\ndef f(x):\n    return helper(x) + C\nC = 3\n"
        "def h(x):\n    return 0\n"
    )
    program = code_answers.lopa_program(PROMPT, answer + "```\nDone, def g is not used.")
    assert program == PROMPT + "\n" + answer.split("```python\n")[1]
    kept = code_answers.lopa_sanitize(program, "f")
    space: dict[str, Any] = {}
    exec(kept, space)
    assert space["f"](4) == 7
    assert {"helper", "C", "math", "g", "h"} & set(space) == {"helper", "C", "math"}
    assert code_answers.lopa_program(PROMPT, "    return 2\n") == PROMPT + "\n    return 2\n"


def test_the_longest_span_that_parses() -> None:
    lines = ["words of", "a model", "x = 1", "", "y = 2", "and more words"]
    assert code_answers.longest_parsing_span(lines) == "x = 1\n\ny = 2"
    assert code_answers.longest_parsing_span(["no code ("]) == ""
    assert code_answers.lopa_sanitize("not ( code", "f") == ""
    many = ["x = 1"] * (code_answers.MAX_LINES + 5)
    assert code_answers.lopa_sanitize("\n".join(many), "f").count("\n") < code_answers.MAX_LINES


@pytest.mark.parametrize(("printed", "wanted", "same"), ANSWERS["printed"])
def test_printed_lines_are_compared(printed: str, wanted: str, same: bool) -> None:
    assert livecodebench.same_output(printed, wanted) is same


def test_livecodebench_asks_for_the_starter_code_or_for_standard_input() -> None:
    answer = "```\n\n### Answer: (use the provided format with backticks)\n\n"
    for given, code, task in (
        ("class Solution:", "class Solution:", "You will use the following starter code to write"),
        ("", "# YOUR CODE HERE", "Read the inputs from stdin solve the problem and write"),
    ):
        asked = livecodebench.prompt({"question": "Q", "starter_code": given})
        assert asked.startswith(f"### Question:\nQ\n\n### Format: {task}")
        assert asked.endswith(f"\n```python\n{code}\n{answer}")


CASES = '[["1 2", "3"], ["5 6", "11"]]'
CALLS = '[["[1, 2]\\n2", "[2, 4]"], ["[]\\n1", "[]"]]'
METHOD = "class Solution:\n    def scale(self, xs: List[int], n):\n        "


@pytest.mark.parametrize(
    ("function", "verdict", "code"),
    [
        (function, verdict, code.replace("{scale}", METHOD))
        for function, verdicts in ANSWERS["livecodebench"].items()
        for verdict, codes in verdicts.items()
        for code in codes
    ],
)
def test_verdicts_of_livecodebench(function: str, verdict: str, code: str) -> None:
    tests = CALLS if function else CASES
    found = livecodebench.score({"function": function, "tests": tests}, [code])
    assert found["pass@1"] == (verdict == "passed")
    assert found["crashed"] == (verdict in ("crashed", "memory"))


def test_an_endless_method_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livecodebench, "TEST_S", 1)
    code = METHOD + "\n        while True: pass"
    found = livecodebench.score({"function": "scale", "tests": CALLS}, [code])
    assert found == {"pass@1": 0, "timeout": 1, "crashed": 0}
