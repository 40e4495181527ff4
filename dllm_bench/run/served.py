"""A run on a served engine: the same requests, store, grades and record; the server decodes.

`model.concurrency` requests are in flight at any time, in as many threads; samples are stored by
the one that asked for the run. What the server does not tell (ids, forwards) stays empty. Which run
it is follows from `inputs.resolve_served`; speaking HTTP is `serving/client`'s.
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
from dllm_bench.run import runner
from dllm_bench.serving.client import AnsweredRequest, Client
from dllm_bench.serving.served_model import prompt_of, warmup_prompt
from dllm_bench.store import provenance
from dllm_bench.store.record import SampleRecord, ServedSample, Session

SEEDS = 2**31  # servers read a seed into 32 or 64 bits
COUNTED = ("committed", "emitted")  # facts that are the server's count of new tokens
UNSTATED = "a served engine (model.engine does not say which)"


@dataclass
class ServedRunSession(runner.RunSession):
    """One session of one run, by several requests at a time. began: the clock at its start."""

    began: float = 0.0

    @property
    def client(self) -> Client:
        """What stands in the place of a loaded model."""
        return cast(Client, self.loaded)

    def decode(self) -> list[SampleRecord]:
        try:
            return super().decode()
        finally:
            self.client.close()

    def _begin(self, warmups: Sequence[Request]) -> int:
        """Warm up every connection with prompts that nobody asks later, and note the session."""
        told, engine = self.client.describe(), self.client.model
        self._check_server(told)
        count = max(len(warmups), engine.concurrency)
        asked = [self._warmup(warmups[i % len(warmups)], i) for i in range(count)]
        with ThreadPoolExecutor(engine.concurrency) as pool:
            list(pool.map(self.client.complete, asked))
        here = provenance.environment()
        facts = {**here, "device": engine.engine or UNSTATED, "client": here["cpu"], "server": told}
        index = self.opened.begin(Session(self.deps.now(), count, facts))
        self.opened.note(f"session {index}: {len(self.opened.samples)} samples were done")
        self.began = self.client.clock()
        return index

    def _check_server(self, told: Mapping[str, Any]) -> None:
        """One run is of one server, as far as servers say what they are."""
        earlier = [session.environment.get("server") for session in self.opened.sessions]
        if earlier and earlier[-1] != told:
            raise DllmBenchError(
                f"{self.opened.folder} was begun on a server that said {earlier[-1]}, this one "
                f"says {told}; go on with that one, or tell the two apart with model.engine=NAME."
            )

    def _warmup(self, request: Request, turn: int) -> Request:
        ids = warmup_prompt(prompt_of(request), f"Warm-up {turn + 1}. ")
        return replace(request, prompt_ids=tuple(ids))

    def _samples(
        self, missing: Sequence[tuple[int, Request]], session: int
    ) -> Iterator[SampleRecord]:
        """Samples as they are finished; after a failure nothing more is asked, and those in flight
        still come.
        """
        failures: list[Exception] = []

        def ask(turn: int, request: Request) -> SampleRecord | None:
            if failures:
                return None
            try:
                return self._sample(request, turn, session)
            except Exception as error:
                failures.append(error)  # in the thread that would ask the next one otherwise
                return None

        with ThreadPoolExecutor(self.client.model.concurrency) as pool:
            asked = [pool.submit(ask, *one) for one in missing]
            try:
                for done in as_completed(asked):
                    if sample := done.result():
                        yield sample
            finally:
                pool.shutdown(cancel_futures=True)
        if failures:
            raise failures[0]

    def _sample(self, request: Request, turn: int, session: int) -> SampleRecord:
        """Ask one request and write down what came."""
        started_at = self.deps.now()
        seeded = replace(request, seed=runner.seed_of(self.spec, request) % SEEDS)
        asked = self.client.complete(seeded)
        answer = asked.answer
        text = cut_at_stop(answer.text, request.stop)
        told = answer.tokens
        tokens = self.client.tokens_in(answer.text) if told is None else told
        return SampleRecord(
            id=request.id,
            prompt_sha256=runner.prompt_hash(request),
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
            served=self._served(asked, retokenised=told is None and tokens is not None),
        )

    def _served(self, asked: AnsweredRequest, retokenised: bool) -> ServedSample:
        answer = asked.answer
        return ServedSample(
            ttft_s=answer.ttft_s,
            began_s=asked.began - self.began,
            ended_s=asked.ended - self.began,
            tries=asked.tries,
            prompt_tokens=answer.prompt_tokens,
            retokenised=retokenised,
            finish=answer.finish,
        )


def ends(finish: str, is_cut: bool) -> dict[str, int]:
    """Reasons for the end, in the form of an index in the ids, of which there are none.

    A server says "stop" of an end token and of a stop string alike.
    """
    stopped = is_cut or finish != "length"
    return {"length": 0, **({"stop": 0} if stopped else {})}
