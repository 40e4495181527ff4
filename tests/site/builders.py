"""Made-up results for the tests of the report: a small table, runs of every state, a figure.

Texts, names and tokens hold markup that would change a page if it were not escaped. The samples
have everything the viewer shows: lookahead branches, a stall, blocks, an end; drafts accepted,
rejected, not verified.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.core.trace import AGAIN_MASKED, Change, Forward, ForwardKind, Trace
from dllm_bench.site import build as site_module
from dllm_bench.site.build import SiteBuilder
from dllm_bench.site.texts import TextSource
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import SAMPLES, Store
from tests.sample_stats import stored_sample
from tests.tables import builders

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;'\"\u2028\u202e"
WORDS = [HOSTILE, "four", " and", " two", " is six", "\n", "<end>", " sev", "en"]
END = 6
SPECULATIVE = {"_target_": "decoder.speculative", "draft": {"n": 4}}
LOOKAHEADS = {"schedule": {"block": 4}, "explore": {"k": 2}}
SAMPLES_PER_RUN = 45  # three scripts
PREFILL = Forward(ForwardKind.PREFILL, branches=1, fed=20, cached=0, ms=5.0)


def lookaheads(name: str) -> SampleRecord:
    """Ten positions in blocks of four, three forwards: base, forced, second of two lookaheads."""
    denoise = Forward(ForwardKind.DENOISE, branches=3, fed=8, cached=12, ms=2.5)
    trace = Trace([PREFILL, replace(denoise, winner=2, forced=1), replace(denoise, winner=1)])
    ids, born = [1, 2, 3, 4, 5, *[END] * 4, 0], [0, 1, 2, 2, 0, 0, 2, 2, 2, -1]
    return sample(name, ids, born, {"eos": 5, "length": 10}, trace)


def revisions(name: str) -> SampleRecord:
    """Return 3 positions, 4 forwards: one is overwritten, one masked again and decoded anew."""
    changes = [[], [(0, 1, 0, 2), (1, 2, 0, AGAIN_MASKED)], [], []]
    forward = Forward(ForwardKind.DENOISE, 1, fed=3, cached=0, ms=1.0)
    rows = [replace(forward, changes=tuple(Change(*one) for one in made)) for made in changes]
    return sample(name, [2, 3, 4], [1, 2, 3], {"length": 3}, Trace(rows))


def drafts(name: str) -> SampleRecord:
    """Return a round of 4 drafts: 3 verified, 2 accepted, then a token of the target's."""
    verify = Forward(ForwardKind.VERIFY, 1, fed=4, cached=20, ms=3.0, proposed=3, accepted=2)
    verify = replace(verify, drafted=(2, 3, 1, 4), survival=(2.0, 0.0, -2.0, -4.0))
    trace = Trace([PREFILL, Forward(ForwardKind.DRAFT, 1, fed=4, cached=20, ms=1.0), verify])
    return sample(name, [1, 2, 3, END], [0, 2, 2, 2], {"eos": 3, "length": 4}, trace)


def sample(
    name: str, ids: list[int], born: list[int], cut: dict[str, int], trace: Trace
) -> SampleRecord:
    return stored_sample(ids, born, trace, id=name, cut=cut, text=f"four and two {HOSTILE}")


def fill(root: Path) -> dict[str, RunRecord]:
    """Results with runs of the small table and two of their own; the sealed ones by name."""
    builders.every_state(root / "runs", builders.TINY)
    store = Store(root / "runs")
    of_table, *others = store.records()
    for record in (of_table, *others[:-1]):  # the last has no samples, these their first alone
        first = lookaheads(record.columns["id"][0]).to_line() + "\n"
        (store.path(record.spec) / SAMPLES).write_text(first, encoding="utf-8")
    n = SAMPLES_PER_RUN
    specs = (
        replace(of_table.spec, decoder=LOOKAHEADS, label="lookahead", seed=1),
        replace(of_table.spec, decoder=SPECULATIVE, label=HOSTILE, seed=2),
    )
    one, two = (builders.record_of(s, right=r, n=n) for s, r in zip(specs, (30, 15), strict=True))
    two.columns["rounds"] = [[[3, 2, 3]]] * n
    two.columns["survival"] = [[[2.0, 0.0, -2.0, -4.0]]] * n
    two.columns["right"] = [[2]] * n
    one.columns["id"][3] = two.columns["id"][3] = two.columns["verdict"][3] = HOSTILE
    builders.seal(store, one, [lookaheads(name) for name in one.columns["id"]])
    builders.seal(store, two, [drafts(name) for name in two.columns["id"]])
    figure = root / "figures" / "embedded" / "small" / "figure1"
    figure.parent.mkdir(parents=True)
    figure.with_suffix(".svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    rows = f"series,x,y,run\nours,1,2.5,{one.identity_hash}\n{HOSTILE[:20]},2,3,{'0' * 64}\n"
    figure.with_suffix(".csv").write_text(rows)
    return {"table": of_table, "lookahead": one, "drafts": two}


def make(root: Path, out: Path | None = None, **settings: Any) -> list[str]:
    """Return the site of these results; tokens by `WORDS`, the one table the small one."""
    out = out or root / "site"
    with pytest.MonkeyPatch().context() as patched:
        patched.setattr(RunSpec, "from_config", staticmethod(builders.spec_of))
        patched.setattr(site_module, "names_of", lambda kind: ["small/table1"] * (kind == "table"))
        patched.setattr(site_module, "load_table", lambda name: builders.small_table())
        patched.setattr(site_module, "load_profile", lambda name: builders.TINY)
        patched.setattr(TextSource, "decode", lambda self, spec: lambda ids: WORDS[ids[0]])
        store = Store(root / "runs")
        return list(SiteBuilder(store, out, "embedded", builders.compose, **settings).build())
