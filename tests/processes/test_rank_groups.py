"""Several processes decode a request to the tokens of one process, and send no more than needed.

Token for token, forward for forward and winner for winner, whatever the pieces remember, with fewer
and with more branches than processes; the bytes are those docs/parallel.md names. A job and its
result are sent between processes, so both are plain values of importable classes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dllm_bench import parallel
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Option, Request
from dllm_bench.decoding.defaults import Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.launch.workers import PRELOAD
from dllm_bench.methods.branches import Lookahead, SelfDraft
from dllm_bench.methods.caches import BlockCache, DualCache, NoCache
from dllm_bench.methods.common import Blocks, Confidence, Eos, NegEntropy, Pipeline, Threshold
from dllm_bench.methods.dream import Sampled
from dllm_bench.methods.history import Credit
from dllm_bench.parallel import RankGroup, decoded, encoded
from dllm_bench.store.groups import Hardware
from tests.helpers import tiny_denoiser

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
FINAL = {
    name: case if case.guidance else replace(case, cache=BlockCache())
    for name, case in CASES.items()
}
SOME = ("lopa", "one lookahead", "guided")  # more branches than three processes, fewer, two rows
REQUEST = Request("dist", tuple(range(3, 14)), 32, seed=5)
Found = tuple[Generation, list[int]]


class CountedSums:
    """torch.distributed, with the bytes of every sum over the processes."""

    def __init__(self) -> None:
        self.sent = list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, values: Tensor, group: dist.ProcessGroup) -> None:
        self.sent.append(values.nbytes)
        dist.all_reduce(values, group=group)


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
            parallel.dist = counted = CountedSums()
            found[name] = ranks.generate(decoder, model, self.request), counted.sent
        parallel.dist = dist
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


@pytest.mark.parametrize(
    ("hardware", "decoders"),
    [
        (TWO, CASES),
        (Hardware({"branch_parallel": 3}), {name: CASES[name] for name in SOME}),
        (NO_COMMITS, {name: FINAL[name] for name in SOME}),
    ],
    ids=["two", "three", "two without commits"],
)
def test_branches_on_several_processes_decode_what_one_does(hardware, decoders, tmp_path) -> None:
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


@pytest.mark.parametrize(
    ("branches", "names"),
    [(1, ("lopa", "dual")), pytest.param(2, ("lopa",), marks=pytest.mark.exhaustive)],
)
def test_a_model_that_is_split_decodes_what_a_whole_one_does(branches, names, tmp_path) -> None:
    short = replace(REQUEST, max_new_tokens=16)
    job = Decode({name: CASES[name] for name in names}, "llada", short)
    expected = alone(job)
    hardware = Hardware({"branch_parallel": branches, "tensor_parallel": 2})
    for found in on_all_ranks(hardware, job, tmp_path):
        assert {name: facts(generation) for name, (generation, _) in found.items()} == expected


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"reference": ()},
        {"reference": (7, 8), "pinned": ((0, 5), (2, 9))},
        {"options": (Option((1, 2), (3,)), Option((1,), (4, 5)))},
    ],
)
def test_a_request_is_announced_in_numbers(fields) -> None:
    request = replace(REQUEST, id="announced", **fields)
    assert decoded(encoded(request)) == request
