"""Where the items of the lm-eval tasks come from: the package, original files or the hub.

The hub is that of Hugging Face. `rows` gives plain dictionaries with a stable `id`. `dataset` is
what the task files name as `custom_dataset`, so that lm-eval's own evaluator sees the same items in
the same order. Few-shot examples are the first of a split that is never graded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.benchmarks.embedded import SENTENCES, FrozenTask
from dllm_bench.benchmarks.items import (
    Item,
    choose_items,
    data_file,
    downloads_allowed,
    naming_file,
    read_jsonl,
    require_cache_or_server,
    require_fields,
)
from dllm_bench.benchmarks.tasks import readers, text_scorers
from dllm_bench.benchmarks.tasks.readers import Row
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import expanded, hub_cache, read_yaml
from dllm_bench.registry import require_known

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "huggingface.co"
DEFAULT_SHOTS = 8
"""Most few-shot examples on lm-eval's own command line; no table uses more."""
SHOTS = "shots"
"""Name of the few-shot split in the dataset that lm-eval gets."""
EMBEDDED = (
    "minigsm", "minimath", "miniread", "miniread_count", "minirule", "minirule_choice",
    "minirule_range", "ministory", "minigsm_free",
)  # fmt: skip
GENERATED: Mapping[str, FrozenTask] = {
    **{name: FrozenTask(name) for name in EMBEDDED},
    "miniparallel": FrozenTask("miniparallel", splits=tuple(text_scorers.FAMILIES)),
    "sentences": SENTENCES,
}
"""Item sets of this project."""


@dataclass(frozen=True)
class PublishedSet:
    """An entry of published_sets.yaml, which says what the fields are."""

    files: Mapping[str, Sequence[str]]
    hub: Mapping[str, Mapping[str, Any]]
    convert: Callable[[Row], Row] = dict
    read: Callable[[Path], list[Row]] | None = None
    number: str = ""
    numbers: Mapping[str, tuple[int, int]] | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    partial_files: Mapping[str, str] = field(default_factory=dict)

    def rows(self, file: Path) -> list[Row]:
        """Return the items of an original file."""
        return self.read(file) if self.read else [self.convert(row) for row in read_jsonl(file)]

    def number_of(self, place: int, row: Row) -> Any:
        """Return the last part of an item's id."""
        named = {**row, "i": place}
        return self.number.format_map(named) if self.number else row.get("number", place)

    def has(self, split: str, number: Any) -> bool:
        """Return whether the item of a number belongs to a split of the file."""
        if self.numbers is None:
            return True
        first, last = self.numbers[split]
        return first <= int(number) <= last


def _published_set(entry: Mapping[str, Any]) -> PublishedSet:
    given = entry.get("hub", {}).items()
    hub = {split: {"split": split, "configs": (None,), **where} for split, where in given}
    named = {key: getattr(readers, entry[key]) for key in ("convert", "read") if key in entry}
    return PublishedSet(**{**entry, **named, "hub": hub})


PUBLISHED = {
    name: _published_set(entry)
    for name, entry in read_yaml(Path(__file__).parents[1] / "published_sets.yaml").items()
}


def splits(source: str) -> tuple[str, ...]:
    """Return the splits of an item set."""
    return GENERATED[source].splits if source in GENERATED else tuple(PUBLISHED[source].files)


def check(source: str, split: str, data_dir: str | None) -> None:
    """Raise DllmBenchError if the items are not available; reads nothing."""
    require_known(f"split of {source!r}:", split, splits(source))
    if source in GENERATED:
        return
    if data_dir is not None:
        _original_file(source, split, data_dir)
        return
    name = str(_hub_split(source, split)["repository"])
    folder = hub_cache() / f"datasets--{name.replace('/', '--')}"
    require_cache_or_server(source, HUB, folder, PUBLISHED[source].files[split][0])


def _original_file(source: str, split: str, data_dir: str) -> tuple[Path, str]:
    """Return (file of a split, name of the split in ids); a partial file adds its name to the
    split's."""
    published = PUBLISHED[source]
    names, root = published.files[split], expanded(data_dir)
    name = next((name for name in names if (root / name).is_file()), names[0])
    file, part = data_file(data_dir, name, source), published.partial_files.get(name)
    return file, f"{split}.{part}" if part else split


def _hub_split(source: str, split: str) -> Mapping[str, Any]:
    hub = PUBLISHED[source].hub.get(split)
    if hub is None:
        raise DllmBenchError(
            f"Benchmark {source!r} reads its split {split!r} from original files only; name a "
            f"directory that holds {PUBLISHED[source].files[split][0]} with paths.data=DIR."
        )
    return hub


@cache
def rows(source: str, split: str, data_dir: str | None) -> list[Row]:
    """Return all items of a split in the original order, each with its `id`."""
    require_known(f"split of {source!r}:", split, splits(source))
    if source in GENERATED:
        return GENERATED[source].items(split)
    published, label = PUBLISHED[source], split
    if data_dir is None:
        read = _load_from_hub(source, split, downloads_allowed())
        if isinstance(read, str):
            raise DllmBenchError(read)
    else:
        file, label = _original_file(source, split, data_dir)
        with naming_file(file):
            read = published.rows(file)
        require_fields(file, read, published.fields)
        if label != split:
            logging.getLogger(__name__).warning(
                "%s: only a part of split %s is in the data directory, %s", source, split, file.name
            )
    numbered = [(published.number_of(i, row), row) for i, row in enumerate(read)]
    return [
        {**row, "id": f"{source}/{label}/{n}"} for n, row in numbered if published.has(split, n)
    ]


@cache
def _load_from_hub(source: str, split: str, download: bool) -> list[Row] | str:
    """Return the rows, without `download` from the hub's cache alone, or why there are none.

    The reason is cached too: it takes half a minute to find out that the hub cannot be reached.
    """
    import datasets

    hub, published = _hub_split(source, split), PUBLISHED[source]
    offline_before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline_before or not download
    name, part = hub["repository"], hub["split"]
    try:
        loaded = [datasets.load_dataset(name, config, split=part) for config in hub["configs"]]
    except (OSError, ValueError) as error:
        advice = f"name a directory that holds {published.files[split][0]} with paths.data=DIR"
        problem = f"Benchmark {source!r} has no data directory and {name}"
        if not download:
            return f"{problem} is not in the hub's cache; {advice}, or download it with `--run`."
        return f"{problem} could not be loaded from the hub ({type(error).__name__}); {advice}."
    finally:
        datasets.config.HF_HUB_OFFLINE = offline_before
    return [published.convert(dict(row)) for part in loaded for row in part]


def shots(source: str, split: str | None, count: int, data_dir: str | None) -> list[Row]:
    """Return the first `count` few-shot examples; DllmBenchError if there are fewer."""
    if count == 0:
        return []
    examples = rows(source, split, data_dir)[:count] if split else []
    if len(examples) < count:
        raise DllmBenchError(
            f"Benchmark {source!r} was asked for {count} few-shot examples and has "
            f"{len(examples)}; set shots lower."
        )
    return examples


def _dataset(
    source: str,
    shots_from: str | None = None,
    split: str = "test",
    limit: int | None = None,
    repeats: int = 1,
    data_dir: str | None = None,
    shots_count: int | None = None,
    items: Sequence[Item] | None = None,
) -> dict[str, Dataset]:
    """Return the chosen items as lm-eval's split "test", few-shot examples as "shots".

    shots_count: None takes as many as there are, up to eight. A task without examples gets an item
    in their place, because lm-eval requires the split to exist. items: the items, so that no file
    is read for them.
    """
    from datasets import Dataset

    if items is None:
        items = choose_items(rows(source, split, data_dir), limit, repeats)
    chosen = [dict(item) for item in items]
    examples: list[Row] = []
    if shots_count is not None:
        examples = shots(source, shots_from, shots_count, data_dir)
    elif shots_from:
        with suppress(DllmBenchError):  # their file may be absent
            examples = rows(source, shots_from, data_dir)[:DEFAULT_SHOTS]
    with naming_file(Path(data_dir or source)):
        return {"test": Dataset.from_list(chosen), SHOTS: Dataset.from_list(examples or chosen[:1])}


def _ignoring_unknown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, called without the keyword arguments it does not have."""
    known = signature(function).parameters
    return lambda **given: function(**{name: given[name] for name in known if name in given})


dataset = _ignoring_unknown(_dataset)
"""What the task files name; lm-eval adds the path of the yaml and everything in `--model_args`."""
