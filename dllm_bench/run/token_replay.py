"""How a text came to be: what was said of its tokens at every forward, from a second decoding.

A sealed run's first samples are decoded once more, with the same seed and so to the same tokens
(checked; a sample that comes out differently is left out). Listeners around two pieces note, for
every position not yet decoded, the probability and rank of the token it ended with, and whether the
candidate was already that token. The run's speed and identity stay what they were. Stored apart
(`evolution.npz`). Left out: decoders whose forwards hold several branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores, Stop, StopFlags
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.explore.greedy import Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.numerics import read_logits
from dllm_bench.run.dependencies import REAL, Dependencies
from dllm_bench.store.files import atomic_path
from dllm_bench.store.store import Store, read_samples

if TYPE_CHECKING:
    from torch import Tensor

    from dllm_bench.core.denoiser import Denoiser
    from dllm_bench.core.request import Request
    from dllm_bench.core.state import DecodeState
    from dllm_bench.store.spec import RunSpec

FILE = "evolution.npz"
UNSEEN = -1  # rank, and found, of a position that a forward says nothing of


@dataclass(frozen=True)
class TokenReplay:
    """One sample: forwards S by new positions P, of what was not decoded yet.

    chance_SP: probability of the final token in the distribution that decides, NaN where nothing
    was said; rank_SP: its rank there, from 1; found_SP: whether the candidate was that token,
    ahead of the open blocks too.
    """

    id: str
    chance_SP: Any
    rank_SP: Any
    found_SP: Any


@dataclass
class Notes:
    """What the listeners of one request heard, and of which tokens."""

    ids: Sequence[int]
    prompt: int
    chance_SP: Any
    rank_SP: Any
    found_SP: Any

    @classmethod
    def blank(cls, request: Request, ids: Sequence[int], forwards: int) -> Notes:
        """Nothing heard yet."""
        import numpy as np

        shape = (forwards, len(ids))
        chance_SP = np.full(shape, np.nan, dtype=np.float32)
        rank_SP, found_SP = (np.full(shape, UNSEEN, dtype=kind) for kind in ("int32", "int8"))
        return cls(ids, len(request.prompt_ids), chance_SP, rank_SP, found_SP)

    def span(self, start: int, width: int) -> tuple[slice, slice]:
        """Positions of a text that `width` places from canvas position `start` on hold: (columns of
        the notes, places).
        """
        first = max(start - self.prompt, 0)
        last = min(start - self.prompt + width, len(self.ids))
        return slice(first, last), slice(first + self.prompt - start, last + self.prompt - start)


@dataclass(frozen=True)
class ScoreListener(Score):
    """Notes probability and rank of the final tokens in the distribution that `inner` reads."""

    inner: Score
    notes: Notes = field(compare=False)

    @property
    def gives(self) -> frozenset[str]:  # type: ignore[override]
        return self.inner.gives

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        columns, places = self.notes.span(window.start, window.width)
        logits_WV = logits_KWV[-1, places].float()
        final_1W = state.tokens_KL.new_tensor(self.notes.ids[columns])[None]
        own_W1 = logits_WV.gather(-1, final_1W.mT)
        masked_W = window.of(state.masked_KL)[-1, places].cpu().numpy()
        chance_W = read_logits(logits_WV[None], ids_KW=final_1W).probability_KW[0].cpu().numpy()
        rank_W = ((logits_WV > own_W1).sum(-1) + 1).cpu().numpy()
        self.notes.chance_SP[state.forwards, columns][masked_W] = chance_W[masked_W]
        self.notes.rank_SP[state.forwards, columns][masked_W] = rank_W[masked_W]
        return self.inner(logits_KWV, state, window)


@dataclass(frozen=True)
class StopListener(Stop):
    """Notes which candidates are final tokens, ahead of the open blocks too."""

    inner: Stop
    notes: Notes = field(compare=False)

    reads_ahead = True

    def ended(self, branches: DecodeState) -> StopFlags:
        return self.inner.ended(branches)

    def shorten(self, state: DecodeState, seen: Scores, window: Window) -> Tensor | None:
        columns, places = self.notes.span(window.start, seen.ids_KW.shape[1])
        final_A = seen.ids_KW.new_tensor(self.notes.ids[columns])
        forward = state.forwards - 1  # the commit of this one is done
        stop = columns.stop + self.notes.prompt
        born_A = state.born_KL[-1, columns.start + self.notes.prompt : stop]
        waited_A = ((born_A < 0) | (born_A == forward)).cpu().numpy()
        found_A = (seen.ids_KW[-1, places] == final_A).cpu().numpy()
        self.notes.found_SP[forward, columns][: len(waited_A)][waited_A] = found_A[waited_A]
        if not self.inner.reads_ahead:
            three = (seen.ids_KW, seen.probability_KW, seen.confidence_KW)
            seen = Scores(*(part[:, : window.width] for part in three))
        return self.inner.shorten(state, seen, window)


def listening(decoder: MaskedDecoder, notes: Notes) -> MaskedDecoder:
    """The decoder with listeners around its innermost score and its stop rule."""
    score, stop = around(decoder.score, notes), StopListener(decoder.stop, notes)
    return replace(decoder, score=score, stop=stop)


def around(score: Score, notes: Notes) -> Score:
    """The score with a listener around the innermost one: evidence of earlier steps is in."""
    inner = {f.name: getattr(score, f.name) for f in fields(score)}  # type: ignore[arg-type]
    for name, piece in inner.items():
        if isinstance(piece, Score):
            return replace(score, **{name: around(piece, notes)})  # type: ignore[type-var]
    return ScoreListener(score, notes)


def replay(
    decoder: MaskedDecoder, model: Denoiser, request: Request, ids: Sequence[int]
) -> TokenReplay | None:
    """Decode `request` to the tokens it had before; None where they come out differently."""
    notes = Notes.blank(request, ids, 2 * len(ids) + 2)
    generation = listening(decoder, notes).generate(model, request)
    if list(generation.ids) != list(ids):
        return None
    steps = slice(len(generation.trace))
    return TokenReplay(
        request.id, notes.chance_SP[steps], notes.rank_SP[steps], notes.found_SP[steps]
    )


def record_replays(spec: RunSpec, store: Store, samples: int, deps: Dependencies = REAL) -> Path:
    """Write the evolution of the first samples of a sealed run beside them."""
    folder, stored = store.path(spec), read_samples(store.path(spec))
    decoder = deps.decoder(spec)
    if not isinstance(decoder, MaskedDecoder) or not isinstance(decoder.explore, Greedy):
        raise DllmBenchError(
            f"The tokens of {spec.folder} have no evolution: its decoder fills no canvas, or fills "
            "several at once; choose a masked decoder that explores one candidate."
        )
    deps.prepare(spec)
    loaded = deps.model(spec)
    requests = islice(deps.benchmark(spec).requests(loaded.encode), samples)
    found = [
        replay(decoder, loaded.denoiser, request, stored[request.id].ids)
        for request in requests
        if request.id in stored
    ]
    kept = [evolution for evolution in found if evolution]
    if not kept:
        raise DllmBenchError(
            f"Decoded again, no sample of {spec.folder} has the tokens it had; run it again on "
            "this machine under another results directory."
        )
    write_replays(folder / FILE, kept)
    return folder / FILE


def write_replays(path: Path, evolutions: Sequence[TokenReplay]) -> None:
    """Store evolutions, whole or not at all."""
    import numpy as np

    arrays: dict[str, Any] = {"ids": np.array([e.id for e in evolutions])}
    for index, evolution in enumerate(evolutions):
        arrays |= {f"{index}.{f.name}": getattr(evolution, f.name) for f in fields(TokenReplay)[1:]}
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_replays(folder: Path) -> list[TokenReplay]:
    """The evolutions stored beside a run's samples; none where there are none."""
    import numpy as np

    if not (folder / FILE).exists():
        return []
    with np.load(folder / FILE) as arrays:
        return [
            TokenReplay(str(key), *(arrays[f"{index}.{f.name}"] for f in fields(TokenReplay)[1:]))
            for index, key in enumerate(arrays["ids"])
        ]
