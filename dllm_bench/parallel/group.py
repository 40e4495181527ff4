"""`RankGroup`: the processes of one run, and how all of them follow the first one.

`join` makes the process groups: the processes lie on a mesh of branches x tensors, with tensor
neighbours next to each other. Process 0 announces each request as numbers on a channel of its own:
`AnnouncingDecoder` is its decoder, and `follow` is the loop of the other processes. All take the
same steps. launch/ starts the processes and notices when one dies.
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
from dllm_bench.core.decoder_summary import DecoderSummary
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.parallel.branch import BranchWorkerGroup
from dllm_bench.parallel.tensor import shard

BRANCH, TENSOR = "branch", "tensor"
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
IDLE = timedelta(
    days=7
)  # timeout of the channel: processes wait for the next request however long it takes
OVER, PREPARE, GENERATE = range(3)


@dataclass(frozen=True)
class ParallelLayout:
    """How the processes of a run divide their work."""

    branches: int = 1  # processes that share the branches of a round
    tensors: int = 1  # processes that share each tensor
    commits: bool = True  # whether the winner's K/V are sent, see `branch`
    timeout_s: float = 120.0  # how long a process waits for another within a request

    @property
    def processes(self) -> int:
        """Processes of the run."""
        return self.branches * self.tensors


@dataclass(frozen=True)
class RankGroup:
    """The processes of a run, from the view of one of them."""

    layout: ParallelLayout
    mesh: DeviceMesh  # branches x tensors
    channel: dist.ProcessGroup  # for announcements
    workers: BranchWorkerGroup  # this process and those that share its branches

    @classmethod
    def join(cls, layout: ParallelLayout, rank: int, meeting: Path, device: str) -> RankGroup:
        """Connect to the other processes through the file `meeting`; all of them call this."""
        if os.path.isdir("/sys/class/net/lo"):  # all on one machine: the loopback is enough
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
        """Process 0 tells the others what to do next and with which decoder, in two broadcasts."""
        numbers = [] if request is None else encoded(request)
        for message in ([what, which, len(numbers)], numbers):
            dist.broadcast(torch.tensor(message, dtype=torch.int64), src=0, group=self.channel)

    def receive(self) -> tuple[int, int, Request | None]:
        """What to do, with which decoder and request, as announced by process 0."""
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
        """Process 0 announces the end and leaves the group."""
        self.announce(OVER)
        dist.destroy_process_group()


def encoded(request: Request) -> list[int]:
    """A request as numbers, without its id and text, which decoding does not need."""
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
