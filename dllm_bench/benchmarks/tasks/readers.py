"""Files of the data sets as they were published -> rows, one per item, in the file's order.

A row holds what the task files name and nothing else (KOR-Bench hints, for example, stay out).
Nothing is corrected on the way: what a data set has wrong it has wrong here too.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

from dllm_bench.benchmarks.items import read_jsonl
from dllm_bench.core.errors import DllmBenchError

Row = dict[str, Any]
KORBENCH = ("cipher", "counterfactual", "logic", "operation", "puzzle")


def math(file: Path) -> list[Row]:
    """MATH: problem and worked solution."""
    return [{key: row[key] for key in ("problem", "solution")} for row in read_jsonl(file)]


def squad(file: Path) -> list[Row]:
    """SQuAD 2.0's own form: articles, paragraphs, questions."""
    articles = json.loads(file.read_text(encoding="utf-8"))["data"]
    return [
        squad_row({**question, "title": article["title"], "context": paragraph["context"]})
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def squad_row(row: Row) -> Row:
    """One question; `plausible` are the wrong but likely spans of one without an answer."""
    spans = row["answers"]  # a list of spans in the original, columns on the hub
    texts = spans["text"] if isinstance(spans, dict) else [span["text"] for span in spans]
    plausible = [span["text"] for span in row.get("plausible_answers") or []]
    kept = {key: row[key] for key in ("title", "context", "question")}
    return {"number": row["id"], **kept, "answers": texts, "plausible": plausible}


def drop(file: Path) -> list[Row]:
    """DROP in its own form (.json) or in that of simple-evals (.jsonl)."""
    if file.suffix == ".jsonl":
        return [_drop_simple(row) for row in read_jsonl(file)]
    passages = json.loads(file.read_text(encoding="utf-8")).values()
    return [
        drop_row({**pair, "passage": entry["passage"]})
        for entry in passages
        for pair in entry["qa_pairs"]
    ]


def _drop_simple(row: Row) -> Row:
    """Several spans of one answer are joined in this form and cannot be told apart any more."""
    passage, _, question = row["context"].removeprefix("Passage: ").partition("\nQuestion: ")
    answers = [[text] for text in row["ref_text"].split("|")]
    return {
        "passage": passage,
        "question": question.removesuffix("\nAnswer:"),
        "answers": answers,
    }


def drop_row(row: Row) -> Row:
    """One question with every accepted answer, each a list of spans; repetitions are left out."""
    further = row.get("validated_answers") or []
    if isinstance(further, dict):  # columns on the hub
        further = [
            dict(zip(further, one, strict=True)) for one in zip(*further.values(), strict=True)
        ]
    spans = [_drop_spans(answer) for answer in (row["answer"], *further)]
    answers = [one for i, one in enumerate(spans) if one not in spans[:i]]
    return {"passage": row["passage"], "question": row["question"], "answers": answers}


def _drop_spans(answer: Row) -> list[str]:
    date = answer["date"]
    if answer["number"] != "":
        return [str(answer["number"])]
    if answer["spans"]:
        return list(answer["spans"])
    return [" ".join(date.get(key, "") for key in ("day", "month", "year")).strip()]


def korbench(file: Path) -> list[Row]:
    """All five categories beside the named file: question, its rule, answer."""
    return [row for category in KORBENCH for row in _category(file.parents[1] / category)]


def _category(folder: Path) -> list[Row]:
    for name in ("rule.jsonl", "sample.jsonl"):
        if not (folder / name).is_file():
            raise DllmBenchError(
                f"KOR-Bench needs {folder.name}/{name} beside its other categories, and it is "
                "absent; add it to the data directory."
            )
    rules = {row["idx"]: row["rule_content"] for row in read_jsonl(folder / "rule.jsonl")}
    return [
        {
            "number": f"{folder.name}/{row['idx']}",
            "category": folder.name,
            "index": row["idx"],
            "rule": rules[row["rule_id"]],
            **{key: row[key] for key in ("rule_id", "question", "answer")},
        }
        for row in read_jsonl(folder / "sample.jsonl")
    ]


def livecodebench(file: Path) -> list[Row]:
    """Question, starter code, name of the function if there is one, and all tests as JSON."""
    return [livecodebench_row(row) for row in read_jsonl(file)]


def livecodebench_row(row: Row) -> Row:
    """One problem; hidden tests are read where the file has them."""
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
    """Plain JSON, or JSON in a pickled string, compressed, as the lite files have it."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        packed = zlib.decompress(base64.b64decode(text))
        found = json.loads(_PlainUnpickler(io.BytesIO(packed)).load())
    return list(found)


class _PlainUnpickler(pickle.Unpickler):
    """Reads builtin values only; a pickle that names a class is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise DllmBenchError(
            f"A LiveCodeBench file wants to load {module}.{name}, which plain tests never do; "
            "fetch the file again from its publisher."
        )
