"""Several processes that decode one request: branch parallelism and tensor parallelism.

`RankGroup.join` makes the process groups: the processes lie on a mesh of branches x tensors, with
tensor neighbours next to each other. Process 0 announces each request as numbers on a channel of
its own: `AnnouncingDecoder` is its decoder, and `follow` is the loop of the other processes. All
take the same steps. launch/ starts the processes and notices when one dies.

Branches (LoPA, arXiv 2512.16229, §3.3): branch k goes to worker k mod size. There are two exchanges
a round: the ratings of all branches (a number each), and the winner's scores (token, probability
and confidence per window position) with what a score remembers. From these every worker makes the
same next branches. Branches that are drafts are rated after their commit, so the winner's canvas
is sent, too, and how many positions the stall rule has committed in each draft. K/V are kept by one
of two protocols: "winner" stores the own branch's first and then overwrites it with the winner's,
by one all-reduce; "none" relies on block-causal attention, under which the K/V that are kept are
the same in all branches. Left out: overlap of an exchange with the next forward.

Tensors: torch's own plans, applied to the transformers module of a denoiser. Projections to the
heads and to the MLP's hidden layer are split by output, those back by input, so that a layer costs
two sums over the processes. `lm_head` is split over the vocabulary and its logits are gathered;
every process holds the whole embedding and all norms, and the K/V of its own heads. Left out:
experts, quantised and compiled models, unmerged adapters, and reading only a share of a checkpoint
(each process reads all of it, then drops the rest).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Linear
from torch.profiler import record_function

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, WorkerGroup
from dllm_bench.core.decoder import Condition, Decoder, DecoderSummary, needing
from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Option, Request
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.core.transfer import selected
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.models.kv import PositionCache
from dllm_bench.models.layers import module_layers
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.store.groups import Hardware

# --- branches -------------------------------------------------------------------------------------

EXCHANGE, COMMIT = "branch exchange", "branch commit"  # names in a profile


class BranchWorkerGroup(WorkerGroup):
    """The workers of a process group, `size` of them; this one is `rank`.

    commits: whether the winner's K/V are sent (the protocol "winner").
    """

    def __init__(self, group: dist.ProcessGroup, commits: bool) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.commits = commits
        if not commits:  # every worker keeps K/V of its own branch
            self.needs = {"hardware.commit=none": needing({"cache": Condition.FINAL_KV})}
        self._branches = 1
        self._before: dict[MemoKey[Tensor], Tensor] = {}  # memo before this worker's scores

    def divide(
        self, branches: DecodeState, window: Window, plan: ForwardPlan
    ) -> tuple[DecodeState, Window, ForwardPlan]:
        """Return every size-th branch. All workers get equally many; a branch may go to two of
        them."""
        self._branches = branches.branches
        turns = torch.arange(-(-self._branches // self.size), device=branches.tokens_KL.device)
        index = (self.rank + self.size * turns) % self._branches
        own = branches.take(index)
        self._before = own.memo.tensors()
        plan = replace(plan, **selected(plan, ("visible_K", "added_KFH"), index))
        return own, window.take(index), plan

    def gather(self, rating_K: Tensor) -> Tensor:
        if self._branches == 1:
            return rating_K
        rating_XX = rating_K.new_zeros(len(rating_K), self.size)  # branches of a worker, workers
        rating_XX[:, self.rank] = rating_K
        return self._sum(rating_XX.flatten()[: self._branches])

    def keep(self, kv: KVCache, plan: ForwardPlan, winner: Tensor) -> None:
        kv.keep(plan, winner // self.size)  # this worker's branch with the winner's index
        if not self.commits or self._branches == 1 or not plan.stores:
            return
        assert isinstance(kv, PositionCache)  # of the denoisers of this package
        with record_function(COMMIT):
            packed = self._winners(winner, kv.packed(plan))
            dist.all_reduce(packed.view(torch.uint8), group=self.group)
            kv.unpack(plan, packed)

    def collect_winner(
        self, winner: Tensor, branches: DecodeState, own: DecodeState, scores: Scores, drafts: bool
    ) -> tuple[DecodeState, Scores]:
        if self._branches == 1:
            return own, scores
        memo = own.memo.tensors()
        learned = {key: v for key, v in memo.items() if self._before.get(key) is not v}
        each = {id(value): value for value in scores.tensors().values()}
        canvas = [own.tokens_KL, own.born_KL] if drafts else []
        rows = iter(self._of_winner(winner, [*each.values(), *learned.values(), *canvas]))
        scores = scores.map(lambda _: next(rows))
        state = branches.pick(winner)
        for key in learned:
            state.memo[key] = next(rows)
        if drafts:
            state = replace(state, canvas_2KL=torch.stack([*rows]))
        state.memo.update(own.memo.numbers())
        return state, scores

    def _of_winner(self, winner: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the winner's row (1, …) of per-branch tensors, from the worker that computed it.

        A tensor that is given twice (a probability that is the confidence) is sent once.
        """
        turn = (winner // self.size).reshape(1)
        own = {id(value): shrunk(value.index_select(0, turn)) for value in values}
        packed = torch.cat([row.contiguous().flatten().view(torch.uint8) for row in own.values()])
        parts = self._sum(self._winners(winner, packed)).split([row.nbytes for row in own.values()])
        rows = {
            key: part.clone().view(row.dtype).view(row.shape)
            for (key, row), part in zip(own.items(), parts, strict=True)
        }
        return [rows[id(value)].to(value.dtype) for value in values]

    def _winners(self, winner: Tensor, packed: Tensor) -> Tensor:
        """Return the values (X,) on the worker that computed the winner, zeros on all others: their
        sum over the workers is the winner's, bit for bit, and the host need not know who that is.
        """
        packed.view(torch.uint8).mul_(winner % self.size == self.rank)
        return packed

    def _sum(self, values: Tensor) -> Tensor:
        """Copy the values of the only worker where they are not 0 to every worker, bit for bit."""
        with record_function(EXCHANGE):
            dist.all_reduce(values.view(torch.uint8), group=self.group)
        return values


def shrunk(values: Tensor) -> Tensor:
    """Convert int64 to int32: token ids, positions and counters fit."""
    return values.int() if values.dtype == torch.int64 else values


# --- tensors --------------------------------------------------------------------------------------

BY_OUTPUT = "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj".split()
BY_INPUT = ["self_attn.o_proj", "mlp.down_proj"]


def shard(denoiser: TransformerDenoiser, mesh: DeviceMesh) -> None:
    """Split the module of `denoiser` over a mesh of one dimension, in place."""
    check(denoiser, mesh.size())
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in BY_OUTPUT}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in BY_INPUT}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    denoiser.layers = module_layers(denoiser.module)  # the collectives are in the module's hooks
    parallelize_module(denoiser.module, mesh, plan, src_data_rank=None)
    denoiser.parts = mesh.size()
    denoiser.chooses_rows = False  # each process would choose by the V of its own heads


def check(denoiser: TransformerDenoiser, parts: int) -> None:
    """Raise DllmBenchError for a model that cannot be split."""
    module = denoiser.module
    if type(denoiser) is not TransformerDenoiser:
        raise DllmBenchError(
            f"Tensor parallelism over {parts} processes cannot split compiled layers; set "
            "hardware.compile=none."
        )
    for layer in module.model.layers:
        linear = {name for name, part in layer.named_modules() if type(part) is Linear}
        if missing := sorted({*BY_OUTPUT, *BY_INPUT} - linear):
            raise DllmBenchError(
                f"Tensor parallelism splits plain linear layers, and this model "
                f"({type(module).__name__}) has none called {', '.join(missing)}; use a dense "
                "model, not quantised, with its adapter merged."
            )
    config = module.config
    heads = {config.num_attention_heads, config.num_key_value_heads}
    if any(count % parts for count in heads):
        raise DllmBenchError(
            f"Tensor parallelism over {parts} processes splits the heads evenly, and this model "
            f"has {config.num_attention_heads} heads and {config.num_key_value_heads} K/V heads; "
            "choose a divisor of both."
        )


# --- the processes of a run -----------------------------------------------------------------------

BRANCH, TENSOR = "branch", "tensor"
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
IDLE = timedelta(days=7)  # time limit of the channel: processes may wait long for the next request
OVER, PREPARE, GENERATE = range(3)
ANNOUNCED = "prompt_ids max_new_tokens seed reference pinned options".split()
"""Fields of a request that the other processes get."""


@dataclass(frozen=True)
class RankGroup:
    """The processes of a run, from the view of one of them."""

    mesh: DeviceMesh  # branches x tensors
    channel: dist.ProcessGroup  # for announcements
    workers: BranchWorkerGroup  # this process and those that share its branches

    @classmethod
    def join(cls, hardware: Hardware, rank: int, meeting: Path) -> RankGroup:
        """Connect to the other processes through the file `meeting`; all of them call this."""
        if os.path.isdir("/sys/class/net/lo"):  # all on one machine: the loopback is enough
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        kind = hardware.device.partition(":")[0]
        dist.init_process_group(
            BACKENDS[kind],
            init_method=meeting.absolute().as_uri(),
            rank=rank,
            world_size=hardware.group_size,
            timeout=timedelta(seconds=hardware.timeout_s),
        )
        shape, names = (hardware.branch_parallel, hardware.tensor_parallel), (BRANCH, TENSOR)
        mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
        channel = dist.new_group(backend="gloo", timeout=IDLE)
        workers = BranchWorkerGroup(mesh.get_group(BRANCH), commits=hardware.commit == "winner")
        return cls(mesh, channel, workers)

    def split(self, denoiser: Denoiser) -> None:
        """Split the model over the tensor dimension of the mesh."""
        if self.mesh[TENSOR].size() == 1:
            return
        assert isinstance(denoiser, TransformerDenoiser)  # of a loaded model
        shard(denoiser, self.mesh[TENSOR])

    def generate(self, decoder: Decoder, model: Denoiser, request: Request) -> Generation:
        """Do this process's part in decoding `request`."""
        if self.workers.size > 1 and isinstance(decoder, MaskedDecoder):
            return decoder.generate(model, request, self.workers)
        return decoder.generate(model, request)

    def announce(self, what: int, which: int = 0, request: Request | None = None) -> None:
        """Tell the other processes what to do next and with which decoder, in two broadcasts.

        Called by process 0.
        """
        numbers = [] if request is None else encoded(request)
        for message in ([what, which, len(numbers)], numbers):
            dist.broadcast(torch.tensor(message, dtype=torch.int64), src=0, group=self.channel)

    def receive(self) -> tuple[int, int, Request | None]:
        """Return what to do, with which decoder and request, as announced by process 0."""
        head = torch.zeros(3, dtype=torch.int64)
        dist.broadcast(head, src=0, group=self.channel)
        what, which, length = head.tolist()
        numbers = torch.zeros(length, dtype=torch.int64)
        dist.broadcast(numbers, src=0, group=self.channel)
        return what, which, decoded(numbers.tolist()) if length else None

    def follow(self, decoders: Sequence[Decoder], model: Denoiser) -> None:
        """Do what process 0 announces until it announces the end; then leave the group."""
        while True:
            what, which, request = self.receive()
            if request is None:
                break
            decoder = decoders[which]
            torch.manual_seed(request.seed)
            if what == PREPARE:
                decoder.prepare(model, request)
            else:
                self.generate(decoder, model, request)
        dist.destroy_process_group()

    def leave(self) -> None:
        """Announce the end and leave the group; called by process 0."""
        self.announce(OVER)
        dist.destroy_process_group()


def encoded(request: Request) -> list[int]:
    """Return a request as numbers, without its id and text, which decoding does not need."""
    return list(json.dumps([getattr(request, name) for name in ANNOUNCED]).encode())


def decoded(numbers: list[int]) -> Request:
    """Make a request from the numbers that `encoded` returned."""
    values = dict(zip(ANNOUNCED, _tuples(json.loads(bytes(numbers))), strict=True))
    options = tuple(Option(*one) for one in values.pop("options"))
    return Request("announced", **values, options=options)


def _tuples(plain: Any) -> Any:
    """Return plain data with lists, at any depth, as tuples."""
    return tuple(map(_tuples, plain)) if isinstance(plain, list) else plain


@dataclass(frozen=True)
class AnnouncingDecoder:
    """The decoder of process 0: it announces every call, so that all processes make it."""

    decoder: Decoder
    ranks: RankGroup
    which: int = 0  # index of `decoder` among the decoders of the other processes

    def summary(self) -> DecoderSummary:
        return self.decoder.summary()

    def prepare(self, model: Denoiser, request: Request) -> Request:
        self.ranks.announce(PREPARE, self.which, request)
        return self.decoder.prepare(model, request)

    def generate(self, model: Denoiser, request: Request) -> Generation:
        self.ranks.announce(GENERATE, self.which, request)
        return self.ranks.generate(self.decoder, model, request)
