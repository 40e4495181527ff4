"""Read the files of data sets as they were published into rows, one per item, in file order.

A row holds the fields that the task files name and nothing else (KOR-Bench hints, for example, are
left out). Nothing is corrected: errors of a data set are kept.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import zlib
from pathlib import Path
from typing import Any

from dllm_bench.benchmarks.items import data_file, read_jsonl
from dllm_bench.benchmarks.tasks import TEXTS
from dllm_bench.core.errors import DllmBenchError

Row = dict[str, Any]
MOST_BYTES = 2**30  # of the hidden tests of a problem
PLANNING_SHOTS = 8  # as in Dream's eval_planning.py


def read_math(file: Path) -> list[Row]:
    """Read MATH: problem and worked solution."""
    return [{key: row[key] for key in ("problem", "solution")} for row in read_jsonl(file)]


def read_squad(file: Path) -> list[Row]:
    """Read SQuAD 2.0 as published: articles of paragraphs of questions."""
    articles = json.loads(file.read_text(encoding="utf-8"))["data"]
    return [
        convert_squad({**question, "title": article["title"], "context": paragraph["context"]})
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def convert_squad(row: Row) -> Row:
    """Return one question; `plausible` are the likely but wrong spans of a question without an
    answer."""
    spans = row["answers"]  # a list of spans in the original file, columns on the hub
    texts = spans["text"] if isinstance(spans, dict) else [span["text"] for span in spans]
    plausible = [span["text"] for span in row.get("plausible_answers") or []]
    kept = {key: row[key] for key in ("title", "context", "question")}
    return {"number": row["id"], **kept, "answers": texts, "plausible": plausible}


def read_drop(file: Path) -> list[Row]:
    """Read DROP as published (.json) or in the form of simple-evals (.jsonl)."""
    if file.suffix == ".jsonl":
        return [_simple_evals_drop(row) for row in read_jsonl(file)]
    passages = json.loads(file.read_text(encoding="utf-8")).values()
    return [
        convert_drop({**pair, "passage": entry["passage"]})
        for entry in passages
        for pair in entry["qa_pairs"]
    ]


def _simple_evals_drop(row: Row) -> Row:
    """Return one question of simple-evals, which joins the spans of an answer beyond separation."""
    passage, _, question = row["context"].removeprefix("Passage: ").partition("\nQuestion: ")
    answers = [[text] for text in row["ref_text"].split("|")]
    return {"passage": passage, "question": question.removesuffix("\nAnswer:"), "answers": answers}


def convert_drop(row: Row) -> Row:
    """Return one question with every accepted answer, each a list of spans, without repetitions."""
    validated = row.get("validated_answers") or []
    if isinstance(validated, dict):  # columns on the hub
        columns = zip(*validated.values(), strict=True)
        validated = [dict(zip(validated, values, strict=True)) for values in columns]
    spans = [_drop_spans(answer) for answer in (row["answer"], *validated)]
    answers = [one for i, one in enumerate(spans) if one not in spans[:i]]
    return {"passage": row["passage"], "question": row["question"], "answers": answers}


def _drop_spans(answer: Row) -> list[str]:
    """Return an answer as spans: its number, its spans, or its date, whichever it has."""
    date = answer["date"]
    if answer["number"] != "":
        return [str(answer["number"])]
    if answer["spans"]:
        return list(answer["spans"])
    return [" ".join(date.get(key, "") for key in ("day", "month", "year")).strip()]


def read_mmlu_with_examples(file: Path) -> list[Row]:
    """Read MMLU, each question after the five of its subject in dev.jsonl, as lm-eval writes
    them."""
    examples: dict[str, str] = {}
    for row in read_jsonl(beside(file, "dev.jsonl")):
        asked = f"{mmlu_question(row)} {'ABCD'[row['answer']]}\n\n"
        examples[row["subject"]] = examples.get(row["subject"], "") + asked
    return [{**row, "examples": examples[row["subject"]]} for row in read_jsonl(file)]


def beside(file: Path, name: str) -> Path:
    """Return another file of the same folder of the data directory; DllmBenchError without it."""
    return data_file(str(file.parents[1]), f"{file.parent.name}/{name}", file.parent.name)


def mmlu_question(row: Row) -> str:
    """Return a question with its four choices, up to the answer."""
    choices = (f"{letter}. {text}" for letter, text in zip("ABCD", row["choices"], strict=True))
    return "\n".join([row["question"].strip(), *choices, "Answer:"])


def read_sudoku(file: Path) -> list[Row]:
    """Read Dream's 4x4 Sudokus: input and output, after the file's first eight as examples."""
    return after_examples(read_jsonl(file), "Input:\n{input}\nOutput:\n{output}")


def read_countdown(file: Path) -> list[Row]:
    """Read Dream's Countdown: numbers and equations, after the file's first eight as examples.

    The instruction counts the numbers, as published.
    """
    rows = after_examples(read_jsonl(file), "Input: {input}\nOutput: {output}")
    return [{**row, "instruction": TEXTS["countdown"][row["input"].count(",")]} for row in rows]


def after_examples(rows: list[Row], form: str) -> list[Row]:
    """Return the rows after the first eight, which each has as its `examples`."""
    examples = "\n\n".join(form.format(**row) for row in rows[:PLANNING_SHOTS])
    kept = [{key: row[key] for key in ("input", "output")} for row in rows[PLANNING_SHOTS:]]
    return [{**row, "examples": examples} for row in kept]


def convert_arc(row: Row) -> Row:
    """Convert ARC, as published or on the hub: question, texts of the choices, index of the right
    one."""
    nested = isinstance(row["question"], dict)
    question = row["question"]["stem"] if nested else row["question"]
    listed = row["question"]["choices"] if nested else None
    choices = row["choices"] if listed is None else {k: [c[k] for c in listed] for k in listed[0]}
    gold = choices["label"].index(row["answerKey"])
    return {"number": row["id"], "question": question, "choices": choices["text"], "gold": gold}


def convert_hellaswag(row: Row) -> Row:
    """Convert HellaSwag as lm-eval asks it: activity and context, four endings, index of the right
    one."""
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    endings = [plain_caption(text) for text in row["endings"]]
    return {"query": plain_caption(context), "choices": endings, "gold": int(row["label"])}


def plain_caption(text: str) -> str:
    """Return a text of HellaSwag without WikiHow's bracketed titles and double spaces, as in
    lm-eval."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def convert_piqa(row: Row) -> Row:
    """Convert PIQA: a goal, two solutions, index of the right one."""
    return {"goal": row["goal"], "choices": [row["sol1"], row["sol2"]], "gold": int(row["label"])}


def read_piqa(file: Path) -> list[Row]:
    """Read PIQA as published: the labels are in a second file (`valid-labels.lst`)."""
    labels = beside(file, f"{file.stem}-labels.lst").read_text(encoding="utf-8").split()
    pairs = zip(read_jsonl(file), labels, strict=True)
    return [convert_piqa({**row, "label": label}) for row, label in pairs]


def convert_winogrande(row: Row) -> Row:
    """Convert WinoGrande as lm-eval asks it: two beginnings up to the blank, the ending, the right
    one."""
    before, _, after = row["sentence"].partition("_")
    choices = [before + row[f"option{number}"] for number in (1, 2)]
    return {"choices": choices, "ending": after.strip(), "gold": int(row["answer"]) - 1}


def read_korbench(file: Path) -> list[Row]:
    """Return all five categories, whose folders are next to that of `file`: question, rule,
    answer."""
    rows: list[Row] = []
    for category in TEXTS["korbench"]:
        named = (beside(file.parent, f"{category}/{name}.jsonl") for name in ("rule", "sample"))
        rules, samples = map(read_jsonl, named)
        contents = {row["idx"]: row["rule_content"] for row in rules}
        rows += [
            {
                "number": f"{category}/{row['idx']}",
                "category": category,
                "index": row["idx"],
                "rule": contents[row["rule_id"]],
                **{key: row[key] for key in ("rule_id", "question", "answer")},
            }
            for row in samples
        ]
    return rows


def convert_livecodebench(row: Row) -> Row:
    """Return one problem, with its hidden tests if the file has them."""
    tests = json.loads(row["public_test_cases"])
    hidden = _hidden_tests(row.get("private_test_cases") or "[]")
    return {
        "number": row["question_id"],
        "question": row["question_content"],
        "starter_code": row["starter_code"],
        "function": json.loads(row["metadata"]).get("func_name") or "",
        "date": str(row["contest_date"])[:10],
        "tests": json.dumps([[test["input"], test["output"]] for test in tests + hidden]),
    }


def _hidden_tests(text: str) -> list[Row]:
    """Read tests from plain JSON, or from JSON in a compressed pickled string (the lite files)."""
    try:
        return list(json.loads(text))
    except json.JSONDecodeError:
        packed = zlib.decompressobj().decompress(base64.b64decode(text), MOST_BYTES)
        return list(json.loads(_PlainUnpickler(io.BytesIO(packed)).load()))


class _PlainUnpickler(pickle.Unpickler):
    """Reads builtin values only and refuses a pickle that names a class or function."""

    def find_class(self, module: str, name: str) -> Any:
        raise DllmBenchError(
            f"A LiveCodeBench file would load {module}.{name}, but plain tests load nothing; "
            "download the file again from its publisher."
        )
