"""What is noted of a text's tokens while it is decoded once more."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dllm_bench.api.compose import compose
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.registry import instantiate
from dllm_bench.runs import token_replay
from dllm_bench.runs.dependencies import Dependencies
from dllm_bench.runs.token_replay import TokenReplay
from dllm_bench.store.record import SampleRecord
from dllm_bench.store.store import SAMPLES, Store
from tests.helpers import tiny_denoiser
from tests.resume import fakes
from tests.sample_stats import stored_sample

NEW, BLOCK = 16, 8
REQUEST = Request("item-0", tuple(range(5, 12)), NEW)


def decoder(*overrides: str) -> MaskedDecoder:
    """Return a composed decoder with blocks of 8."""
    plain = compose([*overrides, f"decoder.schedule.block={BLOCK}"])["decoder"]
    found: MaskedDecoder = instantiate({k: v for k, v in plain.items() if k != "name"}, "decoder")
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_denoiser("llada", seed=3)


@pytest.fixture(scope="module")
def vanilla(model) -> tuple[Generation, TokenReplay]:
    """Return a text of one token per forward, and what was noted of it."""
    own = decoder("decoder=vanilla")
    before = own.generate(model, REQUEST)
    found = token_replay.replay(own, model, REQUEST, before.ids)
    return before, found


DECODERS = [
    ("decoder=vanilla",),
    ("decoder=fast_dllm", "decoder.select.tau=0.3"),
    ("decoder=credit", "decoder.select.tau=0.5", "decoder/stop=filled"),
    ("decoder=fast_dllm", "decoder.select.tau=0.3", "decoder/cache=dual"),
    ("decoder=learn2pd_eotp", "decoder/select=threshold"),
    ("decoder=klass", "decoder.select.tau=0.3", "decoder.select.eps=1.0"),
    ("decoder=eb_sampler_blocks", "decoder.select.gamma=1.0"),
]


@pytest.mark.parametrize("overrides", DECODERS, ids=" ".join)
def test_listening_changes_no_token_and_sees_every_open_position(overrides, model) -> None:
    own = decoder(*overrides)
    before = own.generate(model, REQUEST)
    found = token_replay.replay(own, model, REQUEST, before.ids)
    steps, positions = len(before.trace), len(before.ids)
    assert found.chance_SP.shape == found.rank_SP.shape == found.found_SP.shape
    assert found.chance_SP.shape == (steps, positions)
    for position, born in enumerate(before.born):
        if born < 0:
            continue
        assert found.found_SP[born, position] == 1, "decoded tokens are the candidate"
        assert np.isnan(found.chance_SP[born + 1 :, position]).all()
        assert (found.found_SP[born + 1 :, position] == token_replay.UNSEEN).all()
        assert 0 < found.chance_SP[born, position] <= 1
        assert found.rank_SP[born, position] == 1, "greedy: the candidate has the first rank"


def test_chances_are_those_that_decide_and_candidates_ahead_of_the_block_are_known(vanilla) -> None:
    """With one token per forward the decoded token has the highest chance of its block."""
    before, found = vanilla
    for step in range(len(before.trace)):
        candidates = found.chance_SP[step][found.found_SP[step] == 1]
        own_chance = found.chance_SP[step, before.born.index(step)]
        assert own_chance == pytest.approx(np.nanmax(candidates))
    assert (found.found_SP[0] >= 0).all(), "the first forward sees the whole canvas"
    assert np.isnan(found.chance_SP[0, BLOCK:]).all(), "chances are of the open block"


def test_other_tokens_are_no_evolution(vanilla, model) -> None:
    own, ids = decoder("decoder=vanilla"), vanilla[0].ids
    assert token_replay.replay(own, model, REQUEST, [*ids[:-1], (ids[-1] + 1) % 50]) is None


def deps(own: object, model: object) -> Dependencies:
    """Return this model, already loaded, and a benchmark of one request."""
    held = SimpleNamespace(denoiser=model, encode=lambda text: [])
    one = SimpleNamespace(requests=lambda encode: [REQUEST])
    return fakes.deps(model=held, decoder=own, benchmark=one)


def test_what_is_written_is_read(tmp_path, vanilla, model) -> None:
    own, store, spec = decoder("decoder=vanilla"), Store(tmp_path), fakes.spec(1)
    before, again = vanilla
    stored = sample(before)
    with store.open(spec) as run:
        run.expect(1)
        (run.folder / SAMPLES).write_text(stored.to_line() + "\n")
    folder = store.path(spec)
    assert token_replay.read_replays(folder) == []
    written = token_replay.record_replays(spec, store, 4, deps(own, model))
    assert written == folder / token_replay.FILE
    [found] = token_replay.read_replays(folder)
    assert found.id == REQUEST.id
    np.testing.assert_array_equal(found.chance_SP, again.chance_SP)
    np.testing.assert_array_equal(found.found_SP, again.found_SP)


def test_refusals_are_sentences(tmp_path, vanilla, model) -> None:
    store, spec = Store(tmp_path), fakes.spec(1)
    stored = sample(vanilla[0])
    with store.open(spec) as run:
        run.expect(1)
        changed = replace(stored, ids=[1, *stored.ids[1:]])
        (run.folder / SAMPLES).write_text(changed.to_line() + "\n")
    for own, words in (
        (decoder("decoder=vanilla"), "no sample of letters/fake"),
        (decoder("decoder=lopa_dream"), "explores one candidate"),
        (decoder("decoder=llada21"), "Edit changes committed tokens"),
    ):
        with pytest.raises(DllmBenchError, match=words):
            token_replay.record_replays(spec, store, 1, deps(own, model))


def sample(before: Any) -> SampleRecord:
    """Return the generation as a run stores it."""
    return stored_sample(before.ids, before.born, before.trace, id=REQUEST.id, cut=before.cut)
