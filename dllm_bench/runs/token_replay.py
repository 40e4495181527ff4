"""Token replay: decode stored samples again and record each token's probability at every forward.

The first samples of a sealed run are decoded a second time with the same seed, and therefore to the
same tokens (this is checked; a sample with other tokens is skipped). Wrappers of the decoder's
pieces record, for every masked position, the probability and rank of its final token, and whether
the candidate was already that token. The result is stored in a separate file (`evolution.npz`) for
the per-token figures; the run's record is unchanged. Decoders with several branches per forward,
and decoders that revise tokens or insert positions, are not supported.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar
from zipfile import ZipFile

import numpy as np
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Reads, Round, Score, Scores, Stop, StopFlags
from dllm_bench.core.decoder import Condition, Conditions, Decoder
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.defaults import Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.numerics import read_logits, top1
from dllm_bench.models.text import library_errors_named
from dllm_bench.runs.dependencies import REAL, Dependencies
from dllm_bench.runs.runner import ready
from dllm_bench.store.archive import REPLAYS as FILE
from dllm_bench.store.files import write_atomic
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store, file_of_run, read_samples

MAX_BYTES = 256 * 2**20  # limit of the arrays of one run
UNSEEN = -1  # rank_SP and found_SP of a position without scores in a forward


@dataclass(frozen=True)
class TokenReplay:
    """One sample: arrays of forwards S by new positions P, filled where a position is masked."""

    id: str  # id of the request
    chance_SP: Any
    """float32: probability of the final token in the distribution that decides; NaN if unknown."""
    rank_SP: Any  # int32: rank of the final token in that distribution, from 1; else `UNSEEN`
    found_SP: Any
    """int8: whether the candidate was the final token, beyond the open blocks too; or `UNSEEN`."""


ARRAYS = [field.name for field in fields(TokenReplay)[1:]]
"""Names of its arrays."""


class TokenLog:
    """The arrays of a `TokenReplay` while its request is decoded.

    ids: (P,) the final tokens; forwards: how many there is room for.
    """

    def __init__(self, request: Request, ids: Sequence[int], forwards: int) -> None:
        self.ids, self.prompt, shape = ids, len(request.prompt_ids), (forwards, len(ids))
        self.chance_SP = np.full(shape, np.nan, dtype=np.float32)
        self.rank_SP = np.full(shape, UNSEEN, dtype=np.int32)
        self.found_SP = np.full(shape, UNSEEN, dtype=np.int8)

    def span(self, start: int, width: int) -> tuple[slice, slice]:
        """Return where the `width` canvas positions from `start` on overlap the text: (columns of
        the log, indices within those positions).
        """
        first = max(start - self.prompt, 0)
        last = min(start - self.prompt + width, len(self.ids))
        return slice(first, last), slice(first + self.prompt - start, last + self.prompt - start)


@dataclass(frozen=True)
class LoggedScore(Score):
    """Logs probability and rank of the final tokens in the distribution that `inner` reads."""

    inner: Score
    log: TokenLog = field(compare=False)

    @property
    def gives(self) -> Conditions:
        return self.inner.gives - {Condition.ROW_BY_ROW}

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        columns, places = self.log.span(window.start, window.width)
        logits_WV = logits_KWV[-1, places].float()
        final_1W = state.tokens_KL.new_tensor(self.log.ids[columns])[None]
        own_W1 = logits_WV.gather(-1, final_1W.mT)
        masked_W = window.of(state.masked_KL)[-1, places].cpu().numpy()
        chance_W = read_logits(logits_WV[None], ids_KW=final_1W).probability_KW[0].cpu().numpy()
        rank_W = ((logits_WV > own_W1).sum(-1) + 1).cpu().numpy()
        self.log.chance_SP[state.forwards, columns][masked_W] = chance_W[masked_W]
        self.log.rank_SP[state.forwards, columns][masked_W] = rank_W[masked_W]
        return self.inner(logits_KWV, state, window)


@dataclass(frozen=True)
class LoggedStop(Stop):
    """Logs which candidates are final tokens, beyond the open blocks too."""

    inner: Stop
    log: TokenLog = field(compare=False)

    reads_rows: ClassVar[Reads] = "fed"

    def ended(self, branches: DecodeState) -> StopFlags:
        return self.inner.ended(branches)

    def on_commit(self, round: Round) -> None:
        """Log which candidates are right; the inner rule acts after this."""
        state, window, forward = round.state, round.window, round.state.forwards
        ids_1A = torch.cat([round.scores.ids_KW, top1(round.ahead_KXV)[0]], 1)
        columns, places = self.log.span(window.start, ids_1A.shape[1])
        final_A = ids_1A.new_tensor(self.log.ids[columns])
        stop = columns.stop + self.log.prompt
        born_A = state.born_KL[-1, columns.start + self.log.prompt : stop]
        waited_A = ((born_A < 0) | (born_A == forward)).cpu().numpy()
        found_A = (ids_1A[-1, places] == final_A).cpu().numpy()
        self.log.found_SP[forward, columns][: len(waited_A)][waited_A] = found_A[waited_A]


def with_logged_score(score: Score, log: TokenLog) -> Score:
    """Return the score with its innermost one wrapped, whose logits hold the evidence of earlier
    steps."""
    if score.reads_rows == "masked":  # reads the logits as they come, whatever it is made of
        return LoggedScore(score, log)
    inner = {f.name: getattr(score, f.name) for f in fields(score)}  # type: ignore[arg-type]
    for name, piece in inner.items():
        if isinstance(piece, Score):
            return replace(score, **{name: with_logged_score(piece, log)})  # type: ignore[type-var]
    return LoggedScore(score, log)


def replay(
    decoder: MaskedDecoder, model: Denoiser, request: Request, ids: Sequence[int]
) -> TokenReplay | None:
    """Decode `request` to the tokens it had before; None if other tokens come out."""
    log = TokenLog(request, ids, 2 * len(ids) + 2)
    score, stop = with_logged_score(decoder.score, log), LoggedStop(decoder.stop, log)
    generation = replace(decoder, score=score, stop=stop).generate(model, request)
    if list(generation.ids) != list(ids):
        return None
    steps = slice(len(generation.trace))
    return TokenReplay(request.id, *(getattr(log, name)[steps] for name in ARRAYS))


def replayable(decoder: Decoder, run: str) -> MaskedDecoder:
    """Return the decoder of a run; DllmBenchError unless each of its tokens has one position and
    one forward that decided it.
    """
    why = (
        "its decoder fills no canvas, or several at once; choose a masked decoder that explores "
        "one candidate"
    )
    if isinstance(decoder, MaskedDecoder):
        if Condition.NO_CHANGES not in decoder.revise.gives:
            why = (
                f"{type(decoder.revise).__name__} changes committed tokens, so a position has no "
                "single forward that decided it; choose a decoder with decoder/revise=none, or "
                "read the changes in the sample's trace"
            )
        elif Condition.FIXED_CANVAS not in decoder.schedule.gives:
            why = (
                f"{type(decoder.schedule).__name__} inserts positions, so a token has no single "
                "position; choose a decoder with another schedule, or read the insertions in the "
                "sample's trace"
            )
        elif isinstance(decoder.explore, Greedy):
            return decoder
    raise DllmBenchError(f"The tokens of {run} cannot be replayed: {why}.")


def record_replays(spec: RunSpec, store: Store, samples: int, deps: Dependencies = REAL) -> Path:
    """Replay the first samples of a sealed run and store the result in its folder.

    Raises DllmBenchError if a forward of the decoder holds several branches, if it revises tokens,
    inserts positions or fills no canvas, and if no sample has the tokens it had.
    """
    folder, stored = store.path(spec), read_samples(store.path(spec))
    decoder = replayable(deps.decoder(spec), spec.folder)
    deps.prepare(spec)
    loaded = deps.model(spec)
    requests = islice(deps.benchmark(spec).requests(loaded.encode), samples)
    replays = [
        replay(
            decoder, loaded.denoiser, ready(spec, decoder, loaded, request), stored[request.id].ids
        )
        for request in requests
        if request.id in stored
    ]
    kept = [one for one in replays if one is not None]
    if not kept:
        raise DllmBenchError(
            f"Decoded again, no sample of {spec.folder} has the tokens it had; run it again on "
            "this machine under another results directory."
        )
    return write_replays(folder / FILE, kept)


def write_replays(path: Path, replays: Sequence[TokenReplay]) -> Path:
    """Store replays in one file, atomically, and return its path."""
    arrays: dict[str, Any] = {"ids": np.array([one.id for one in replays])}
    for index, one in enumerate(replays):
        arrays |= {f"{index}.{name}": getattr(one, name) for name in ARRAYS}
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    return write_atomic(path, content.getvalue())


def read_replays(folder: Path) -> list[TokenReplay]:
    """Return the replays stored in a run's folder; empty if there are none."""
    content = file_of_run(folder, FILE)
    if content is None:
        return []
    todo = "move it away, and `dllm-bench figure NAME --run` records them again"
    with library_errors_named(f"{folder / FILE} holds no token replays", todo):
        with ZipFile(io.BytesIO(content)) as packed:
            if sum(one.file_size for one in packed.infolist()) > MAX_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_BYTES >> 20} MiB")
        with np.load(io.BytesIO(content)) as arrays:
            return [
                TokenReplay(str(key), *(arrays[f"{index}.{name}"] for name in ARRAYS))
                for index, key in enumerate(arrays["ids"])
            ]
