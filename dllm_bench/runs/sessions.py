"""Sessions that decode in another way than one timed request at a time.

Batches (`batch=8`): up to `spec.batch` requests share a forward, in each process of the run. When
one ends, the next takes its place; samples are stored in the order in which requests end. Batched
and unbatched decoding produce identical text (except for sampled drafts whose length depends on the
batch), so an interrupted run only decodes the missing samples. Requests have no individual timings;
requests and tokens per second are those of all requests together. How requests share a forward is
in `decoding/batching`.

Measured cache error (`measure_kl=true`): after every forward of the decoder, the model computes the
same canvas again with everything fed and nothing read from a cache. The two distributions are
compared, by their KL divergence, at each masked position that the forward predicts. The decoder
uses the cached one, so the tokens equal those of a run without the measurement. The additional
forwards are not in the trace, and samples have no timings.

Served engines: same requests, store, grades and record, but the server decodes. `model.concurrency`
requests are in flight at any time, each in a thread; one thread stores the samples. Values that the
server does not report (ids, forwards) stay empty. The run's identity follows from
`inputs.resolve_served`; HTTP is in `serving/client`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from dllm_bench.benchmarks.items import cut_at_stop
from dllm_bench.core.decoder import BatchedDecoder
from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.trace import Trace
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.metrics.sample_stats import UNREPORTED
from dllm_bench.runs import runner
from dllm_bench.serving.client import Client
from dllm_bench.serving.served_model import prompt_of, warmup_prompt
from dllm_bench.store import provenance
from dllm_bench.store.groups import setting_in
from dllm_bench.store.record import BatchSpan, SampleRecord, ServedSample, prompt_sha256
from dllm_bench.store.spec import RunSpec

# --- batches --------------------------------------------------------------------------------------


def check_batched(spec: RunSpec) -> None:
    """Refuse settings that batches do not support, before anything is loaded."""
    if spec.baseline:
        raise DllmBenchError(
            f"batch={spec.batch} decodes requests together, and a baseline is timed request by "
            "request; leave out decoder@baseline, or batch."
        )
    if spec.hardware.group_size > 1:
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

    decoder: BatchedDecoder

    def _warm_up(self, warmups: Sequence[Request]) -> None:
        ready = (self._ready(self.decoder, request) for request in warmups)
        list(self.decoder.generate_stream(self._checked_denoiser, ready, self.spec.batch))

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

        batched, batch = self.decoder.generate_stream, self.spec.batch
        for generation in batched(self.loaded.denoiser, waiting(), batch):
            request, started_at, began_s = started.pop(generation.request_id)
            sample = runner.sample_record(request, generation, self.loaded, started_at, session)
            yield replace(sample, span=BatchSpan(began_s, clock() - zero))


# --- measured cache error -------------------------------------------------------------------------


def check_measured(spec: RunSpec) -> None:
    """Refuse settings that the measurement does not support, before anything is loaded."""
    if spec.batch != 1 or spec.hardware.group_size > 1 or spec.model.is_served:
        raise DllmBenchError(
            "measure_kl=true compares the forwards of one request in one process, and the run has "
            f"batch={spec.batch}, hardware={spec.hardware.name} and "
            f"model={spec.model.name}; choose batch=1, hardware without workers that decode a "
            "request together, and a model that is not served."
        )
    if spec.baseline:
        raise DllmBenchError(
            "measure_kl=true gives samples no times, and a baseline is there to compare times; "
            "leave out decoder@baseline, or measure_kl."
        )
    if smoothing := setting_in(spec.decoder, "smoothing"):
        raise DllmBenchError(
            "measure_kl=true feeds positions again that the cache leaves out, and "
            f"decoder.smoothing={smoothing} knows no mean embeddings of them; set "
            "decoder.smoothing=0, or leave out measure_kl."
        )


@dataclass
class MeasuredDenoiser:
    """A model that makes every forward twice, as planned and uncached, and returns the planned
    one's logits."""

    denoiser: Denoiser
    nats: float = 0.0  # KL(uncached || cached), summed over `rows`
    rows: int = 0  # masked positions that a forward predicted, each forward counted

    picks_rows = False  # all rows, so that the masked ones are found by their position

    def __getattr__(self, name: str) -> Any:
        return getattr(self.denoiser, name)

    @torch.inference_mode()
    def forward(self, tokens_KL: Tensor, plan: ForwardPlan, kv: KVCache) -> Tensor:
        """Run `Denoiser.forward` and add the divergence of the masked rows."""
        length = tokens_KL.shape[1]
        whole = uncached(plan, min(kv.length, length))
        exact_KRV = self.denoiser.forward(tokens_KL, whole, self.denoiser.new_cache(length))
        logits_KRV = self.denoiser.forward(tokens_KL, plan, kv)  # last, so `keep` has its K/V
        masked_KR = predicted_masks(tokens_KL, plan, self.denoiser.special.mask)
        each_M = kl(exact_KRV[masked_KR], logits_KRV[:, : masked_KR.shape[1]][masked_KR])
        self.nats += each_M.sum().item()
        self.rows += len(each_M)
        return logits_KRV


def uncached(plan: ForwardPlan, held: int) -> ForwardPlan:
    """Return a plan of the same rows that feeds all visible positions, and neither reads from nor
    stores to the cache.

    held: the cache holds [0, held). Positions that the cache left out of the forward are fed too.
    """
    feed, added_KFH = (0, max(plan.feed[1], held)), plan.added_KFH
    if added_KFH is not None:
        at_F = replace(plan, added=None).positions(added_KFH.device)
        every_KLH = added_KFH.new_zeros(len(added_KFH), feed[1], added_KFH.shape[2])
        added_KFH = every_KLH.index_copy(1, at_F, added_KFH[:, : len(at_F)])
    return replace(
        plan,
        feed=feed,
        added_KFH=added_KFH,
        store=(0, 0),
        added=None,
        feature_layers=(),
        sets=None,
        probe=None,
        recompute=None,
    )


def predicted_masks(tokens_KL: Tensor, plan: ForwardPlan, mask: int) -> Tensor:
    """Return which of `plan.rows` are masked and predicted by a fed position, bool (K, R)."""
    masked_KR = tokens_KL[:, slice(*plan.rows)] == mask
    if plan.scored_M is None:
        return masked_KR
    scored_R = torch.zeros_like(masked_KR[0]).index_fill_(0, plan.scored_M, True)
    return masked_KR & scored_R


def kl(exact_MV: Tensor, cached_MV: Tensor) -> Tensor:
    """Return KL(exact || cached) of each row of logits, in nats, float32 (M,)."""
    cached_MV = cached_MV.float().log_softmax(-1).clamp_min(torch.finfo(torch.float32).min)
    # finite, because 0 · log 0 of an impossible token is 0
    return kl_div(cached_MV, exact_MV.float().softmax(-1), reduction="none").sum(-1)


@dataclass
class MeasuredRunSession(runner.RunSession):
    """One session of a run whose forwards are compared with uncached ones."""

    def _sample(self, request: Request, turn: int, session: int) -> SampleRecord:
        """Decode one request, and store the divergence of its forwards."""
        if not isinstance(self.decoder, MaskedDecoder):
            raise DllmBenchError(
                "measure_kl=true measures the cache of a masked decoder, and the run has "
                f"{type(self.decoder).__name__}; choose another decoder, or leave out measure_kl."
            )
        started_at = self.deps.now()
        model = MeasuredDenoiser(self.loaded.denoiser)
        ready = self._ready(self.decoder, request)
        generation = self.decoder.generate(cast("Denoiser", model), ready)
        sample = runner.sample_record(request, generation, self.loaded, started_at, session)
        measured = {"kl_nats": model.nats, "kl_rows": model.rows}
        return replace(sample, counts={**sample.counts, **measured})


# --- served engines -------------------------------------------------------------------------------

SEEDS = 2**31  # servers read a seed into 32 or 64 bits
COUNTED = ("committed", "emitted")  # counts of a sample that equal the server's new tokens
UNSTATED = "a served engine (model.engine does not say which)"


@dataclass
class ServedRunSession(runner.RunSession):
    """One session of a served run, with several requests in flight."""

    loaded: Client  # of the server, in place of a loaded model
    began: float = 0.0  # the client's clock at the session's start

    def decode(self, passes: int | None = None) -> list[SampleRecord]:
        try:
            return super().decode(passes)
        finally:
            self.loaded.close()

    def _note(self) -> str | None:
        """Return no warning: the server decodes, with whatever attention it uses."""
        return None

    def _begin(self, requests: Sequence[Request]) -> int:
        """Warm up every connection with other prompts than the run's, and store the session's
        start."""
        warmups = requests[: runner.WARMUPS]
        server, model = self.loaded.describe(), self.loaded.model
        self._check_server(server)
        count = max(len(warmups), model.concurrency)
        asked = [self._warmup(warmups[i % len(warmups)], i) for i in range(count)]
        with self._threads() as pool:
            list(pool.map(self.loaded.complete, asked))
        self.loaded.tokens_in("")  # reads the tokenizer before the clock starts
        here = provenance.environment_of(self.spec)
        device = model.engine or UNSTATED
        environment = {**here, "device": device, "client": here["cpu"], "server": server}
        index = self._store_session(count, environment)
        self.began = self.loaded.clock()
        return index

    @contextmanager
    def _threads(self) -> Iterator[ThreadPoolExecutor]:
        """Yield a pool with a thread per request in flight; an exception in the block, as Ctrl-C
        raises it, ends these requests."""
        with ThreadPoolExecutor(self.loaded.model.concurrency) as pool:
            try:
                yield pool
            except BaseException:
                self.loaded.stop()
                pool.shutdown(cancel_futures=True)
                raise

    def _check_server(self, server: Mapping[str, Any]) -> None:
        """Refuse to resume on another server, as far as servers describe themselves."""
        known = (session.environment.get("server") for session in self.opened.sessions)
        earlier = [one for one in known if one is not None]  # a damaged session has none
        if earlier and earlier[-1] != server:
            raise DllmBenchError(
                f"{self.opened.folder} was begun on a server that described itself as "
                f"{earlier[-1]}, but this one is {server}; use the earlier server, or name the "
                "engine with model.engine=NAME."
            )

    def _warmup(self, request: Request, turn: int) -> Request:
        ids = warmup_prompt(prompt_of(request), f"Warm-up {turn + 1}. ")
        return replace(request, prompt_ids=tuple(ids))

    def _samples(
        self, missing: Sequence[tuple[int, Request]], session: int
    ) -> Iterator[SampleRecord]:
        """Decode requests, given with their index in the run; yields samples as they finish.

        After a failure no further request is sent; the ones in flight are still yielded.
        """
        failures: list[Exception] = []

        def ask(turn: int, request: Request) -> SampleRecord | None:
            if failures:
                return None
            try:
                return self._sample(request, turn, session)
            except Exception as error:
                failures.append(error)  # at once, so that no thread sends another request
                return None

        with self._threads() as pool:
            for done in as_completed([pool.submit(ask, *one) for one in missing]):
                if sample := done.result():
                    yield sample
        if failures:
            raise failures[0]

    def _sample(self, request: Request, turn: int, session: int) -> SampleRecord:
        """Send one request; returns its answer as a sample."""
        started_at = self.deps.now()
        seeded = replace(request, seed=runner.seed_of(self.spec, request) % SEEDS)
        answer = self.loaded.complete(seeded)
        text = cut_at_stop(answer.text, request.stop)
        for problem in answer.problems:
            self.opened.note(f"{request.id}: {problem}")
        is_reported = answer.tokens is not None
        tokens = answer.tokens if is_reported else self.loaded.tokens_in(answer.text)
        served = ServedSample(
            ttft_s=answer.ttft_s,
            began_s=answer.began - self.began,
            ended_s=answer.ended - self.began,
            tries=answer.tries,
            prompt_tokens=answer.prompt_tokens,
            retokenised=not is_reported and tokens is not None,
            finish=answer.finish,
            problems=list(answer.problems),
        )
        return SampleRecord(
            id=request.id,
            prompt_sha256=prompt_sha256(request),
            ids=[],
            born=[],
            cut=ends(answer.finish, text != answer.text),
            text=text,
            raw=answer.text if answer.text != text else None,
            trace=Trace().columns(),
            counts={**dict.fromkeys(UNREPORTED), **dict.fromkeys(COUNTED, tokens)},
            seconds=answer.seconds,
            first_step_s=answer.ttft_s,
            started_at=started_at,
            session=session,
            served=served,
            prompt=request.prompt,
        )


def ends(finish: str, is_cut: bool) -> dict[str, int]:
    """Return reasons for the end of a text, as in `SampleRecord.cut`; all indices are 0, without
    ids.

    A server reports "stop" for an end token and for a stop string alike.
    """
    return {"length": 0, **({"stop": 0} if is_cut or finish != "length" else {})}


# --- the session of a run -------------------------------------------------------------------------


def session_class(spec: RunSpec) -> type[runner.RunSession]:
    """Return the session class of a run: one request at a time, with measured cache error, in
    batches, or by a server."""
    if spec.measure_kl:
        return MeasuredRunSession
    if spec.model.is_served:
        return ServedRunSession
    return BatchedRunSession if spec.batch != 1 else runner.RunSession


def check_session(spec: RunSpec) -> None:
    """Refuse settings that do not go together, before anything is loaded."""
    if spec.measure_kl:
        check_measured(spec)
    if session_class(spec) is BatchedRunSession:
        check_batched(spec)
