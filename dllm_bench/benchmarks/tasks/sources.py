"""Items of the lm-eval tasks: ours from the generator, the others from original files or the hub.

`rows` gives plain dictionaries with a stable `id`; `dataset` is what the task yaml names as
`custom_dataset`, so that lm-eval's own evaluator sees the same items in the same order. Few-shot
examples are the first of a split that is never graded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.benchmarks.embedded import generated as mini
from dllm_bench.benchmarks.embedded import minigsm, minimath, miniread, minirule
from dllm_bench.benchmarks.items import (
    choose_items,
    data_file,
    downloads_allowed,
    read_jsonl,
    require_cache_or_server,
    require_known,
)
from dllm_bench.benchmarks.tasks import readers
from dllm_bench.core.errors import DllmBenchError

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]
HUB = "huggingface.co"
MINIGSM_SIZE = 1000
DEFAULT_SHOTS = 8  # on lm-eval's own command line; no table asks for more
SHOTS = "shots"  # lm-eval's name here for the split few-shot examples come from
MBPP_SPLITS: Mapping[str, range] = {
    "prompt": range(2, 11),
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
}
"""Split -> task ids; item 1 of the prompt split is left out, the usual three shots are 2, 3, 4."""
MATH_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory",
    "prealgebra", "precalculus",
)  # fmt: skip


@dataclass(frozen=True)
class Hub:
    """Where the hub has a split: repository, configurations (read one after the other), split."""

    repository: str
    configs: Sequence[str | None] = (None,)
    split: str = "test"


@dataclass(frozen=True)
class Source:
    """Where a set's items are: split -> files in a data directory, and the same on the hub.

    The first file that is there is read. parts: file that holds only a part of the split -> the
    part's name, which the ids then carry. read: file -> rows; row: a row of the hub -> the same;
    splits: split -> the numbers in it; draw: what makes the problems of a set of our own.
    """

    files: Mapping[str, Sequence[str]]
    hub: Mapping[str, Hub]
    read: Callable[[Path], list[Row]] = read_jsonl
    row: Callable[[Row], Row] = dict
    number: Callable[[int, Row], Any] = lambda i, row: row.get("number", i)
    splits: Mapping[str, range] | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    draw: mini.Draw | None = None


SOURCES: Mapping[str, Source] = {
    "minigsm": Source({}, {}),
    "minimath": Source({}, {}, draw=minimath.draw),
    "miniread": Source({}, {}, draw=miniread.span),
    "miniread_count": Source({}, {}, draw=miniread.count),
    "minirule": Source({}, {}, draw=minirule.free),
    "minirule_choice": Source({}, {}, draw=minirule.choice),
    "gsm8k": Source(
        {
            "test": ["gsm8k/test.jsonl"],
            "train": ["gsm8k/train.jsonl"],
            "cot": ["gsm8k/cot_8shot.jsonl"],
        },
        {split: Hub("openai/gsm8k", ("main",), split) for split in ("test", "train")},
    ),
    "math": Source(
        {
            "test": ["math/test.jsonl"],
            "math500": ["math500/test.jsonl"],
            "minerva": ["math500/minerva_4shot.jsonl"],
        },
        {
            "test": Hub("EleutherAI/hendrycks_math", MATH_SUBJECTS),
            "math500": Hub("HuggingFaceH4/MATH-500"),
        },
        read=readers.math,
    ),
    "humaneval": Source(
        {"test": ["humaneval/HumanEval.jsonl"]}, {"test": Hub("openai/openai_humaneval")}
    ),
    "mbpp": Source(
        {split: ["mbpp/mbpp.jsonl"] for split in MBPP_SPLITS},
        {split: Hub("google-research-datasets/mbpp", ("full",), split) for split in MBPP_SPLITS},
        number=lambda i, row: int(row["task_id"]),
        splits=MBPP_SPLITS,
    ),
    "mmlu": Source(
        {"test": ["mmlu/test.jsonl"]},
        {"test": Hub("cais/mmlu", ("all",))},
        number=lambda i, row: f"{row['subject']}/{i}",
    ),
    "squad_v2": Source(
        {
            "dev": ["squad_v2/dev-v2.0.json", "squad_v2/dev-v2.0.Normans-Rhine.json"],
            "train": ["squad_v2/train-v2.0.json"],
        },
        {
            "dev": Hub("rajpurkar/squad_v2", split="validation"),
            "train": Hub("rajpurkar/squad_v2", split="train"),
        },
        read=readers.squad,
        row=readers.squad_row,
        parts={"squad_v2/dev-v2.0.Normans-Rhine.json": "Normans-Rhine"},
    ),
    "drop": Source(
        {
            "dev": ["drop/drop_dataset_dev.json", "drop/drop_v0_dev.jsonl",
                    "drop/drop_v0_dev.first1000.jsonl"],
            "train": ["drop/drop_dataset_train.json", "drop/drop_v0_train.jsonl"],
            "fixture": ["drop/allennlp_fixture_drop.json"],
        },
        {
            "dev": Hub("EleutherAI/drop", split="validation"),
            "train": Hub("EleutherAI/drop", split="train"),
        },
        read=readers.drop,
        row=readers.drop_row,
        parts={"drop/drop_v0_dev.first1000.jsonl": "first1000"},
    ),
    "korbench": Source({"test": ["korbench/cipher/sample.jsonl"]}, {}, read=readers.korbench),
    "livecodebench": Source(
        {
            "v6": ["livecodebench/test6.jsonl"],
            "release_v1": ["livecodebench/test.jsonl",
                           "livecodebench/release_v1_400_public_tests.jsonl"],
        },
        {},
        read=readers.livecodebench,
        parts={"livecodebench/release_v1_400_public_tests.jsonl": "public"},
    ),
}  # fmt: skip


def splits(source: str) -> tuple[str, ...]:
    """Splits of a set."""
    return tuple(SOURCES[source].files) or ("test", "train")


def check(source: str, split: str, data_dir: str | None) -> None:
    """Raise if the items cannot be had; reads nothing."""
    require_known(f"split of {source!r}", split, splits(source))
    files = SOURCES[source].files
    if not files:
        return
    if data_dir is not None:
        _file(source, split, data_dir)
        return
    hub = _hub(source, split)
    folder = hub_cache() / ("datasets--" + hub.repository.replace("/", "--"))
    require_cache_or_server(source, HUB, folder, files[split][0])


def hub_cache() -> Path:
    """Where the hub's client keeps what it fetched."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()


def _file(source: str, split: str, data_dir: str) -> tuple[Path, str]:
    """(the file a split is read from, the split's name in ids); a part names itself."""
    made = SOURCES[source]
    names, root = made.files[split], Path(data_dir).expanduser()
    found = next((name for name in names if (root / name).is_file()), names[0])
    file, part = data_file(data_dir, found, source), made.parts.get(found)
    return file, f"{split}.{part}" if part else split


def _hub(source: str, split: str) -> Hub:
    found = SOURCES[source].hub.get(split)
    if found is None:
        raise DllmBenchError(
            f"Benchmark {source!r} reads its split {split!r} from original files only; name a "
            f"directory that holds {SOURCES[source].files[split][0]} with paths.data=DIR."
        )
    return found


@cache
def rows(source: str, split: str, data_dir: str | None) -> list[Row]:
    """All items of a split in the original order, each with its `id`."""
    made = SOURCES[source]
    if made.draw:
        return mini.rows(source, made.draw, split)
    if not made.files:
        return _minigsm(split)
    label = split
    if data_dir is None:
        found = _hub_rows(source, split)
    else:
        file, label = _file(source, split, data_dir)
        found = made.read(file)
        if label != split:
            logging.getLogger(__name__).warning("%s: only a part is there, %s", source, file.name)
    numbered = [(made.number(i, row), row) for i, row in enumerate(found)]
    if made.splits is not None:
        numbered = [(n, row) for n, row in numbered if n in made.splits[split]]
    return [{**row, "id": f"{source}/{label}/{n}"} for n, row in numbered]


def _minigsm(split: str) -> list[Row]:
    return [
        {"id": p.task_id, "question": p.question, "answer": p.answer}
        for p in minigsm.generate(split, MINIGSM_SIZE)
    ]


def _hub_rows(source: str, split: str) -> list[Row]:
    """The rows the hub has, or its client keeps here where nothing may be asked of it."""
    found = _had(source, split, downloads_allowed())
    if isinstance(found, str):
        raise DllmBenchError(found)
    return found


@cache
def _had(source: str, split: str, asks: bool) -> list[Row] | str:
    """The rows, or why there are none: a hub out of reach is asked once, it takes half a minute."""
    import datasets

    hub, made = _hub(source, split), SOURCES[source]
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or not asks
    try:
        loaded = [datasets.load_dataset(hub.repository, c, split=hub.split) for c in hub.configs]
    except (OSError, ValueError) as error:
        mend = f"name a directory that holds {made.files[split][0]} with paths.data=DIR"
        found = f"Benchmark {source!r} has no data directory and {hub.repository}"
        if not asks:
            return f"{found} is not in the hub's cache; {mend}, or have it fetched by `--run`."
        return f"{found} could not be had from the hub ({type(error).__name__}); {mend}."
    finally:
        datasets.config.HF_HUB_OFFLINE = before
    return [made.row(dict(row)) for part in loaded for row in part]


def shots(source: str, split: str | None, count: int, data_dir: str | None) -> list[Row]:
    """The first `count` few-shot examples."""
    if count == 0:
        return []
    found = rows(source, split, data_dir)[:count] if split else []
    if len(found) < count:
        raise DllmBenchError(
            f"Benchmark {source!r} was asked for {count} few-shot examples and has {len(found)}; "
            "set shots lower."
        )
    return found


def _some_shots(source: str, split: str | None, data_dir: str | None) -> list[Row]:
    """The examples that are there, none where their file is absent."""
    with suppress(DllmBenchError):
        return rows(source, split, data_dir)[:DEFAULT_SHOTS] if split else []
    return []


def _dataset(
    source: str,
    shots_from: str | None = None,
    split: str = "test",
    limit: int | None = None,
    repeats: int = 1,
    data_dir: str | None = None,
    shots_count: int | None = None,
) -> dict[str, Dataset]:
    """The chosen items as lm-eval's split "test", few-shot examples as "shots".

    shots_count None: as many as there are, up to eight. A task without examples gets an item in
    their place, since lm-eval wants the split to exist.
    """
    from datasets import Dataset

    items = choose_items(rows(source, split, data_dir), limit, repeats)
    if shots_count is None:
        examples = _some_shots(source, shots_from, data_dir)
    else:
        examples = shots(source, shots_from, shots_count, data_dir)
    return {"test": Dataset.from_list(items), SHOTS: Dataset.from_list(examples or items[:1])}


def _tolerant(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without the settings it does not know."""
    known = signature(function).parameters
    return lambda **given: function(**{name: given[name] for name in known if name in given})


dataset = _tolerant(_dataset)
"""What the task files name; lm-eval adds the yaml's path and all of `--model_args`."""
