"""Several processes decode a request to the tokens of one process, and send no more than needed.

Jobs and results are sent between processes, so both are plain values of importable classes. A
process that is killed or asleep costs no finished sample: one sentence names it, and the run goes
on with the same or another number of processes to the record of an undisturbed one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Option, Request
from dllm_bench.decoding.defaults import Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.launch import local
from dllm_bench.launch.workers import PRELOAD
from dllm_bench.methods.branches import Lookahead, SelfDraft
from dllm_bench.methods.caches import BlockCache, DualCache, NoCache
from dllm_bench.methods.common import Blocks, Confidence, Eos, NegEntropy, Pipeline, Threshold
from dllm_bench.methods.dream import Sampled
from dllm_bench.methods.history import Credit
from dllm_bench.parallel import RankGroup, decoded, encoded
from dllm_bench.runs.dependencies import Dependencies
from dllm_bench.runs.progress import Observer
from dllm_bench.store.groups import Hardware
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import SAMPLES, Store
from tests.helpers import tiny_denoiser
from tests.pieces import Table
from tests.resume import fakes
from tests.tiers import covering

pytestmark = [pytest.mark.xdist_group("dist"), pytest.mark.timeout(400)]
PATIENCE_S = 120.0  # for a machine with much other work

Job = Callable[[RankGroup], Any]
TWO = Hardware({"branch_parallel": 2})
NO_COMMITS = Hardware({"branch_parallel": 2, "commit": "none"})


def on_all_ranks(hardware: Hardware, job: Job, folder: Path) -> list[Any]:
    """Return the result of `job` in each process; the exception of one is raised here."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    started = []
    for rank in range(hardware.group_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(hardware, rank, folder, job, theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        answers = [pipe.recv() if pipe.poll(PATIENCE_S) else TimeoutError() for _, pipe in started]
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _serve(hardware: Hardware, rank: int, folder: Path, job: Job, pipe: Connection) -> None:
    """Do the job in a new process and send its result."""
    torch.set_num_threads(1)
    try:
        answer: Any = job(RankGroup.join(hardware, rank, folder / "meeting"))
    except Exception as error:
        answer = error
    with suppress(BrokenPipeError):
        pipe.send(answer)
    dist.destroy_process_group()


LOPA = MaskedDecoder(
    NegEntropy(), Threshold(0.6, True), Pipeline(8, 0.1, 0.5), BlockCache("full"), Lookahead(3)
)
CASES = {
    "lopa": LOPA,
    "one lookahead": replace(LOPA, explore=Lookahead(1), stop=Eos()),
    "weighed": replace(LOPA, explore=Lookahead(4, alpha=0.5, fraction=0.5)),
    "greedy": replace(LOPA, explore=Greedy()),
    "guided": replace(LOPA, cache=NoCache(), guidance=1.0),
    "credit": replace(LOPA, score=Credit(Confidence(), alpha=2.0), schedule=Blocks(16)),
    "dual": replace(LOPA, schedule=Blocks(8), cache=DualCache(2)),
    "drawn": replace(LOPA, score=Sampled(Confidence(), temperature=0.7), cache=BlockCache()),
    "drafts": replace(LOPA, schedule=Blocks(8), explore=SelfDraft(4)),
}
SOME = ("lopa", "one lookahead", "guided")  # more branches than three processes, fewer, two rows
FINAL = {name: replace(CASES[name], cache=BlockCache()) for name in SOME[:2]}
FINAL["guided"] = CASES["guided"]
REQUEST = Request("dist", tuple(range(3, 14)), 32, seed=5)
Found = tuple[Generation, list[int]]


@dataclass(frozen=True)
class Decode:
    """Every decoder in turn on the same tiny model; with the bytes of its sums over processes."""

    decoders: dict[str, MaskedDecoder]
    layout: str = "dream"
    request: Request = REQUEST

    def __call__(self, ranks: RankGroup) -> dict[str, Found]:
        model, found = tiny_denoiser(self.layout, seed=1), {}
        ranks.split(model)
        for name, decoder in self.decoders.items():
            with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums:
                generation = ranks.generate(decoder, model, self.request)
            found[name] = generation, [call.args[0].nbytes for call in sums.mock_calls]
        return found


def facts(generation: Generation) -> dict[str, Any]:
    """Return all of it but times, and what a process moves as its own branches grow."""
    columns = generation.trace.columns()
    for name in ("ms", "moved"):
        columns.pop(name, None)
    return {"ids": generation.ids, "born": generation.born, **columns}


def alone(job: Decode) -> dict[str, Any]:
    model = tiny_denoiser(job.layout, seed=1)
    return {name: facts(d.generate(model, job.request)) for name, d in job.decoders.items()}


GROUPS = {  # number of processes -> their hardware, and what they decode
    "two": (TWO, CASES),
    "three": (Hardware({"branch_parallel": 3}), {name: CASES[name] for name in SOME}),
    "two without commits": (NO_COMMITS, FINAL),
}


@pytest.mark.parametrize("group", covering(len(GROUPS), GROUPS, often=1))
def test_branches_on_several_processes_decode_what_one_does(group, tmp_path) -> None:
    hardware, decoders = GROUPS[group]
    expected = alone(Decode(decoders))
    assert max(expected["lopa"]["branches"]) == 4 and max(expected["lopa"]["winner"]) > 0
    for found in on_all_ranks(hardware, Decode(decoders), tmp_path):
        assert {name: facts(generation) for name, (generation, _) in found.items()} == expected


def test_a_round_sends_a_number_a_branch_and_three_a_position(tmp_path: Path) -> None:
    """One block of 32, so the window is known; rounds of one branch send nothing."""
    decoder = replace(LOPA, schedule=Blocks(None), cache=NoCache())
    finishing = replace(LOPA, schedule=Blocks(8, sees_future=False))
    decoders = {"window": decoder, "credit": replace(decoder, score=Confidence()), "kv": finishing}
    for found in on_all_ranks(TWO, Decode(decoders), tmp_path):
        for name, numbers in (("window", 3), ("credit", 2)):  # a probability that ranks goes once
            generation, sent = found[name]
            branches = [forward.branches for forward in generation.trace.forwards]
            assert sent == [size for k in branches if k > 1 for size in (4 * k, 4 * numbers * 32)]
        _, sent = found["kv"]
        model = tiny_denoiser("dream", seed=1).module.config
        heads = model.num_key_value_heads * model.hidden_size // model.num_attention_heads
        block = 4 * 2 * model.num_hidden_layers * heads * 8  # keys and values of a finished block
        committed = [size for size in sent if size >= block]
        assert {size // block for size in committed} == {1} and len(committed) >= 2


def test_without_commits_approximate_keys_and_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DllmBenchError, match=r"commit=none needs a cache with K/V that are final"):
        on_all_ranks(NO_COMMITS, Decode({"lopa": LOPA}), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("branches", "names"), [(1, ("lopa", "dual")), (2, ("lopa",))])
def test_a_model_that_is_split_decodes_what_a_whole_one_does(branches, names, tmp_path) -> None:
    short = replace(REQUEST, max_new_tokens=16)
    job = Decode({name: CASES[name] for name in names}, "llada", short)
    expected = alone(job)
    hardware = Hardware({"branch_parallel": branches, "tensor_parallel": 2})
    for found in on_all_ranks(hardware, job, tmp_path):
        assert {name: facts(generation) for name, (generation, _) in found.items()} == expected


def test_a_request_is_announced_in_numbers() -> None:
    request = replace(REQUEST, id="announced")
    known = replace(request, reference=(7, 8), pinned=((0, 5), (2, 9)))
    scored = replace(request, options=(Option((1, 2), (3,)), Option((1,), (4, 5))))
    for one in (request, replace(request, reference=()), known, scored):
        assert decoded(encoded(one)) == one


# --- a process that is lost while others wait for it in a collective ------------------------------


N, FATAL = 6, 30  # samples; the forward in which the second process is lost
WAITS_S, LESS_S = 20.0, 5.0  # for another process; for the one that is lost
DECODER = replace(CASES["lopa"], schedule=Pipeline(4, 0.5, 0.5), select=Threshold(1.0, strict=True))
PAIR = {"branch_parallel": 2, "timeout_s": WAITS_S}


class Dies(Table):
    """The second process is killed in a forward, as the kernel does when memory is out."""

    forwards = 0

    def forward(self, tokens_KL: Any, plan: Any, kv: Any) -> Any:
        self.forwards += 1
        if self.forwards == FATAL and dist.get_rank() == 1:
            self.lose()
        return super().forward(tokens_KL, plan, kv)

    def lose(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Sleeps(Dies):
    """It falls asleep instead, for much longer than the others wait."""

    def lose(self) -> None:
        time.sleep(600)


@dataclass
class Words:
    """A model of 96 tokens whose text is their numbers."""

    denoiser: Table = field(default_factory=Table)

    def encode(self, text: Any) -> list[int]:
        return [3 + ord(c) % 60 for c in str(text)]

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))

    def attention_warning(self, attention: str, block: int) -> str | None:
        return None


def deps(model: type[Table] = Table) -> Dependencies:
    return fakes.deps(model=Words(model()), decoder=DECODER)


def spec(**hardware: Any) -> RunSpec:
    plain = fakes.spec(N)
    return replace(plain, hardware={**plain.hardware, **hardware})


ASLEEP = pytest.param(Sleeps, "Process 0 of 2 .*failed", marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("model", "sentence"), [(Dies, "Process 1 of 2 .*exit code -9"), ASLEEP])
def test_a_lost_process_is_named_and_the_run_goes_on(model, sentence, tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(DllmBenchError, match=sentence):
        local.run(spec(**PAIR | {"timeout_s": LESS_S}), store=store, deps=deps(model))
    kept = (store.path(spec(**PAIR)) / SAMPLES).read_text().splitlines()
    assert 0 < len(kept) < N
    replicas = 1 if model is Dies else 2
    logger = Mock(Observer)
    record = local.run(spec(**PAIR, replicas=replicas), store=store, deps=deps(), logger=logger)
    assert [name for name, *_ in logger.mock_calls][-2:] == ["finish", "close"]
    assert (store.path(spec(**PAIR)) / SAMPLES).read_text().splitlines()[: len(kept)] == kept
    alone = local.run(spec(), store=store, deps=deps())
    assert fakes.timeless(record)["columns"] == fakes.timeless(alone)["columns"]
