"""A run that measures the error of its cache (`measure_kl=true`): the KL divergence from uncached
forwards.

After every forward of the decoder, the model computes the same canvas again with everything fed and
nothing read from a cache. The two distributions are compared at each masked position that the
forward predicts. The decoder uses the cached one, so the tokens equal those of a run without the
measurement. The additional forwards are not in the trace, and samples have no timings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.runs import runner
from dllm_bench.runs.batched import untimed_sample
from dllm_bench.store.groups import setting_in
from dllm_bench.store.record import SampleRecord
from dllm_bench.store.spec import RunSpec


def check(spec: RunSpec) -> None:
    """Refuse settings that the measurement does not support, before anything is loaded."""
    workers = spec.hardware.shares_requests
    if spec.batch != 1 or workers or spec.model.is_served:
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
        logits_KRV = self.denoiser.forward(tokens_KL, plan, kv)
        exact_KRV = self.denoiser.forward(tokens_KL, whole, self.denoiser.new_cache(length))
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
        sample = untimed_sample(request, generation, self.loaded, started_at, session)
        return replace(
            sample, counts={**sample.counts, "kl_nats": model.nats, "kl_rows": model.rows}
        )
