"""Reading of a trained filter: the learning curve beside the weights that a run was made with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256

from dllm_bench.figures.readings import SeriesPoint, Settings, StoredRun
from dllm_bench.paths import place_of

CURVE, WEIGHTS = "curve.jsonl", "filter.safetensors"


def filter_loss(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """Loss by epoch on the rows trained on and on those held out (Learn2PD, figure 8); nothing
    where the weights there are not those of the run.
    """
    head = run.record.spec.decoder["select"]["first"]["head"]
    folder = place_of(str(head["source"]))
    if not (folder / CURVE).exists():
        return
    if sha256((folder / WEIGHTS).read_bytes()).hexdigest() != head.get("sha256"):
        return
    for line in (folder / CURVE).read_text(encoding="utf-8").splitlines():
        point = json.loads(line)
        for series in ("train", "validation"):
            yield SeriesPoint(point["epoch"], point[series], series=series)
