"""What is noted of a text's tokens while it is decoded once more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dllm_bench.api.compose import compose
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.runs import token_replay
from dllm_bench.runs.runner import ready
from dllm_bench.runs.token_replay import TokenReplay
from dllm_bench.store.inputs import decoder_of
from dllm_bench.store.store import SAMPLES, Store
from tests.helpers import tiny_denoiser
from tests.resume import fakes
from tests.sample_stats import stored_sample

NEW, BLOCK = 16, 8
REQUEST = Request("item-0", tuple(range(5, 12)), NEW)


def decoder(*overrides: str) -> Any:
    """Return a composed decoder with blocks of 8."""
    return decoder_of(compose([*overrides, f"decoder.schedule.block={BLOCK}"])["decoder"])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_denoiser("llada", seed=3)


@pytest.fixture(scope="module")
def vanilla(model) -> tuple[Generation, TokenReplay]:
    """Return a text of one token per forward, and what was noted of it."""
    own = decoder("decoder=vanilla")
    before = own.generate(model, REQUEST)
    return before, token_replay.replay(own, model, REQUEST, before.ids)


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
    shape = (len(before.trace), len(before.ids))
    assert {a_SP.shape for a_SP in (found.chance_SP, found.rank_SP, found.found_SP)} == {shape}
    for position, born in ((p, born) for p, born in enumerate(before.born) if born >= 0):
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


SPEC = fakes.spec(1)


def store_of(root: Path, one: Generation) -> Store:
    """Return a store of a run with one sample."""
    store = Store(root)
    with store.open(SPEC) as run:
        run.expect(1)
        line = stored_sample(one.ids, one.born, one.trace, id=REQUEST.id, cut=one.cut).to_line()
        (run.folder / SAMPLES).write_text(f"{line}\n")
    return store


def recorded(own: MaskedDecoder, model: Any, store: Store) -> Path:
    """Record the replays with this model, already loaded, and a benchmark of one request."""
    held = SimpleNamespace(denoiser=model, encode=lambda text: [])
    one = SimpleNamespace(requests=lambda encode: [REQUEST])
    return token_replay.record_replays(
        SPEC, store, 4, fakes.deps(model=held, decoder=own, benchmark=one)
    )


def test_what_is_written_is_read(tmp_path, vanilla, model) -> None:
    before, again = vanilla
    store = store_of(tmp_path, before)
    folder = store.path(SPEC)
    assert token_replay.read_replays(folder) == []
    assert recorded(decoder("decoder=vanilla"), model, store) == folder / token_replay.FILE
    [found] = token_replay.read_replays(folder)
    assert found.id == REQUEST.id
    np.testing.assert_array_equal(found.chance_SP, again.chance_SP)
    np.testing.assert_array_equal(found.found_SP, again.found_SP)


def test_a_decoder_that_draws_has_the_random_numbers_of_the_run(tmp_path, model) -> None:
    own = decoder("decoder=diffucoder")
    drawn = own.generate(model, ready(SPEC, own, SimpleNamespace(denoiser=model), REQUEST))
    assert recorded(own, model, store_of(tmp_path, drawn)).is_file()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vanilla", "no sample of letters/fake"),  # it decodes another text
        ("lopa_dream", "explores one candidate"),
        ("llada21", "Edit changes committed tokens"),
    ],
)
def test_refusals_are_sentences(name, words, tmp_path, vanilla, model) -> None:
    before = vanilla[0]
    store = store_of(tmp_path, replace(before, ids=(1, *before.ids[1:])))
    with pytest.raises(DllmBenchError, match=words):
        recorded(decoder(f"decoder={name}"), model, store)
