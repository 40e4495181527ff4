"""A team: the processes of one run, and how the first one has the others do the same.

`join` makes the groups: processes lie on a mesh of branches × tensors, tensor neighbours beside
each other. Process 0 announces each request, in numbers, on a channel of its own;
`AnnouncingDecoder` is a decoder that does so, `follow` the life of the other processes. All of
them take the same steps.
Starting the processes, and noticing that one died, is the business of launch/run_one.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dllm_bench.core.decoder import Decoder
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.parallel.branch import BranchWorkerGroup
from dllm_bench.parallel.tensor import shard

BRANCH, TENSOR = "branch", "tensor"
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
IDLE = timedelta(days=7)  # between two requests a process waits as long as it takes
OVER, PREPARE, GENERATE = range(3)


@dataclass(frozen=True)
class ParallelLayout:
    """How the processes of a run divide their work, and how long one waits for another."""

    branches: int = 1
    tensors: int = 1
    commits: bool = True
    timeout_s: float = 120.0

    @property
    def processes(self) -> int:
        return self.branches * self.tensors


@dataclass(frozen=True)
class RankGroup:
    """One process among those of a run."""

    layout: ParallelLayout
    mesh: DeviceMesh
    channel: dist.ProcessGroup
    workers: BranchWorkerGroup

    @classmethod
    def join(cls, layout: ParallelLayout, rank: int, meeting: Path, device: str) -> RankGroup:
        """Meet the others through the file `meeting`; every process of the run calls this."""
        if os.path.isdir("/sys/class/net/lo"):  # one machine: its own loopback does
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        kind = device.partition(":")[0]
        dist.init_process_group(
            BACKENDS[kind],
            init_method=meeting.absolute().as_uri(),
            rank=rank,
            world_size=layout.processes,
            timeout=timedelta(seconds=layout.timeout_s),
        )
        shape, names = (layout.branches, layout.tensors), (BRANCH, TENSOR)
        mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
        channel = dist.new_group(backend="gloo", timeout=IDLE)
        return cls(layout, mesh, channel, BranchWorkerGroup(mesh.get_group(BRANCH), layout.commits))

    def split(self, denoiser: Denoiser) -> None:
        """Split the model over the tensor dimension of the mesh."""
        if self.layout.tensors == 1:
            return
        if not isinstance(denoiser, TransformerDenoiser):
            raise TypeError(f"Cannot split a {type(denoiser).__name__}.")
        shard(denoiser, self.mesh[TENSOR])

    def generate(self, decoder: Decoder, model: Denoiser, request: Request) -> Generation:
        """This process's part in decoding `request`."""
        if self.layout.branches > 1 and isinstance(decoder, MaskedDecoder):
            return decoder.generate(model, request, self.workers)
        return decoder.generate(model, request)

    def announce(self, what: int, which: int = 0, request: Request | None = None) -> None:
        """Process 0 says what all do next, with which decoder: two broadcasts of numbers."""
        numbers = [] if request is None else encoded(request)
        for message in ([what, which, len(numbers)], numbers):
            dist.broadcast(torch.tensor(message, dtype=torch.int64), src=0, group=self.channel)

    def receive(self) -> tuple[int, int, Request | None]:
        """What process 0 announced."""
        head = torch.zeros(3, dtype=torch.int64)
        dist.broadcast(head, src=0, group=self.channel)
        what, which, length = head.tolist()
        numbers = torch.zeros(length, dtype=torch.int64)
        dist.broadcast(numbers, src=0, group=self.channel)
        return what, which, decoded(numbers.tolist()) if length else None

    def follow(self, decoders: Sequence[Decoder], model: Denoiser) -> None:
        """Do what process 0 announces until it says that all is done, and part."""
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
        """Process 0 says that all is done, and parts."""
        self.announce(OVER)
        dist.destroy_process_group()


def encoded(request: Request) -> list[int]:
    """What decoding needs of a request, as numbers; its text is not part of it."""
    reference = request.reference
    known = -1 if reference is None else len(reference)
    head = [request.max_new_tokens, request.seed, known]
    return [*head, *(reference or ()), *request.prompt_ids]


def decoded(numbers: list[int]) -> Request:
    """Inverse of `encoded`."""
    new, seed, known, *ids = numbers
    reference = None if known < 0 else tuple(ids[:known])
    prompt = tuple(ids[max(known, 0) :])
    return Request("announced", prompt, new, seed=seed, reference=reference)


@dataclass(frozen=True)
class AnnouncingDecoder:
    """The decoder of process 0: what it does is announced, so that all do it.

    which: its index among the decoders of those who follow.
    """

    decoder: Decoder
    ranks: RankGroup
    which: int = 0

    def prepare(self, model: Denoiser, request: Request) -> Request:
        self.ranks.announce(PREPARE, self.which, request)
        return self.decoder.prepare(model, request)

    def generate(self, model: Denoiser, request: Request) -> Generation:
        self.ranks.announce(GENERATE, self.which, request)
        return self.ranks.generate(self.decoder, model, request)
