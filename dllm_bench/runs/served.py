"""A run on a served engine: same requests, store, grades and record, but the server decodes.

`model.concurrency` requests are in flight at any time, each in a thread; one thread stores the
samples. Values that the server does not report (ids, forwards) stay empty. The run's identity
follows from `inputs.resolve_served`; HTTP is in `serving/client`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, cast

from dllm_bench.benchmarks.items import cut_at_stop
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.trace import Trace
from dllm_bench.metrics.sample_stats import UNREPORTED
from dllm_bench.runs import runner
from dllm_bench.serving.client import Answer, Client
from dllm_bench.serving.served_model import prompt_of, warmup_prompt
from dllm_bench.store import provenance
from dllm_bench.store.record import SampleRecord, ServedSample, Session, prompt_sha256

SEEDS = 2**31  # servers read a seed into 32 or 64 bits
COUNTED = ("committed", "emitted")  # counts of a sample that equal the server's new tokens
UNSTATED = "a served engine (model.engine does not say which)"


@dataclass
class ServedRunSession(runner.RunSession):
    """One session of a served run, with several requests in flight."""

    began: float = 0.0  # the client's clock at the session's start

    @property
    def client(self) -> Client:
        """The client of the server, which takes the place of a loaded model."""
        return cast(Client, self.loaded)

    def decode(self, passes: int | None = None) -> list[SampleRecord]:
        try:
            return super().decode(passes)
        finally:
            self.client.close()

    def _note(self) -> str | None:
        """Return no warning: the server decodes, with whatever attention it uses."""
        return None

    def _begin(self, requests: Sequence[Request]) -> int:
        """Warm up every connection with other prompts than the run's, and store the session's
        start."""
        warmups = requests[: runner.WARMUPS]
        server, model = self.client.describe(), self.client.model
        self._check_server(server)
        count = max(len(warmups), model.concurrency)
        asked = [self._warmup(warmups[i % len(warmups)], i) for i in range(count)]
        with ThreadPoolExecutor(model.concurrency) as pool:
            list(pool.map(self.client.complete, asked))
        here = provenance.environment_of(self.spec)
        device = model.engine or UNSTATED
        environment = {**here, "device": device, "client": here["cpu"], "server": server}
        index = self.opened.begin(Session(self.deps.now(), count, environment))
        self.opened.note(f"session {index}: {len(self.opened.samples)} samples were done")
        self.began = self.client.clock()
        return index

    def _check_server(self, server: Mapping[str, Any]) -> None:
        """Refuse to resume on another server, as far as servers describe themselves."""
        earlier = [session.environment.get("server") for session in self.opened.sessions]
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

        with ThreadPoolExecutor(self.client.model.concurrency) as pool:
            futures = [pool.submit(ask, *one) for one in missing]
            try:
                for done in as_completed(futures):
                    if sample := done.result():
                        yield sample
            finally:
                pool.shutdown(cancel_futures=True)
        if failures:
            raise failures[0]

    def _sample(self, request: Request, turn: int, session: int) -> SampleRecord:
        """Send one request; returns its answer as a sample."""
        started_at = self.deps.now()
        seeded = replace(request, seed=runner.seed_of(self.spec, request) % SEEDS)
        answer = self.client.complete(seeded)
        text = cut_at_stop(answer.text, request.stop)
        for problem in answer.problems:
            self.opened.note(f"{request.id}: {problem}")
        reported = answer.tokens
        tokens = self.client.tokens_in(answer.text) if reported is None else reported
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
            served=self._served(answer, retokenised=reported is None and tokens is not None),
            prompt=request.prompt,
        )

    def _served(self, answer: Answer, retokenised: bool) -> ServedSample:
        return ServedSample(
            ttft_s=answer.ttft_s,
            began_s=answer.began - self.began,
            ended_s=answer.ended - self.began,
            tries=answer.tries,
            prompt_tokens=answer.prompt_tokens,
            retokenised=retokenised,
            finish=answer.finish,
            problems=list(answer.problems),
        )


def ends(finish: str, is_cut: bool) -> dict[str, int]:
    """Return reasons for the end of a text, as in `SampleRecord.cut`; all indices are 0, without
    ids.

    A server reports "stop" for an end token and for a stop string alike.
    """
    stopped = is_cut or finish != "length"
    return {"length": 0, **({"stop": 0} if stopped else {})}
