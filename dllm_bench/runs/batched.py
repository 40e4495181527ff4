"""A run that decodes several requests at a time (`batch=8`): the same samples in less time.

Up to `spec.batch` requests share a forward, in each process of the run. When one ends, the next
takes its place; samples are stored in the order in which requests end. Batched and unbatched
decoding produce identical text (except for sampled drafts whose length depends on the batch), so an
interrupted run only decodes the missing samples. Requests have no individual timings; requests and
tokens per second are those of all requests together. How requests share a forward is in
`decoding/batching`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from dllm_bench.core.decoder import BatchedDecoder
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.trace import Trace
from dllm_bench.runs import runner
from dllm_bench.runs.dependencies import Loaded
from dllm_bench.store.record import BatchSpan, SampleRecord
from dllm_bench.store.spec import RunSpec


def check(spec: RunSpec) -> None:
    """Refuse settings that batches do not support, before anything is loaded."""
    if spec.batch < 1:
        raise DllmBenchError(f"batch is {spec.batch}; decode 1 request at a time, or more.")
    if spec.baseline:
        raise DllmBenchError(
            f"batch={spec.batch} decodes requests together, and a baseline is timed request by "
            "request; leave out decoder@baseline, or batch."
        )
    if spec.hardware.shares_requests:
        raise DllmBenchError(
            f"batch={spec.batch} is decoded by one process, and hardware={spec.hardware.name} "
            "asks for several that decode a request together; choose hardware without them "
            "(each replica has a batch of its own), or batch=1."
        )
    mode = spec.model.compile
    if mode != "none":
        raise DllmBenchError(
            f"batch={spec.batch} has shapes that are not compiled, and the run asks for "
            f"compile={mode}; set hardware.compile=none, or batch=1."
        )


@dataclass
class BatchedRunSession(runner.RunSession):
    """One session of one run, several requests at a time."""

    @property
    def many(self) -> BatchedDecoder:
        """The decoder, which takes several requests."""
        return cast(BatchedDecoder, self.decoder)

    def _warm_up(self, warmups: Sequence[Request]) -> None:
        ready = (self._ready(self.decoder, request) for request in warmups)
        list(self.many.generate_stream(self._checked_denoiser, ready, self.spec.batch))

    def _samples(
        self, missing: Sequence[tuple[int, Request]], session: int
    ) -> Iterator[SampleRecord]:
        """Decode requests, given with their index in the run; yields samples as they finish."""
        started: dict[str, tuple[Request, float, float]] = {}
        clock = self.deps.clock
        zero = clock() if self.opened.zero_s is None else self.opened.zero_s

        def waiting() -> Iterator[Request]:
            for _, request in missing:
                started[request.id] = request, self.deps.now(), clock() - zero
                yield self._ready(self.decoder, request)

        generations = self.many.generate_stream(self.loaded.denoiser, waiting(), self.spec.batch)
        for generation in generations:
            request, started_at, began_s = started.pop(generation.request_id)
            sample = untimed_sample(request, generation, self.loaded, started_at, session)
            yield replace(sample, span=BatchSpan(began_s, clock() - zero))


def untimed_sample(
    request: Request, generation: Generation, loaded: Loaded, started_at: float, session: int = 0
) -> SampleRecord:
    """Return the record of a request without durations, for forwards that requests share or that
    were measured."""
    rows = [replace(row, ms=0.0) for row in generation.trace.forwards]
    untimed = replace(generation, trace=Trace(rows))
    decoded = runner.read(request, untimed, loaded, None)
    return runner.sample_record(request, decoded, loaded, started_at, session)
