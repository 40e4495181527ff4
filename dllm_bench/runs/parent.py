"""How an autoregressive model reads the texts of a run (`model@parent=NAME`).

Meant for open text, which has no right answer: the parent is the model that a diffusion model was
adapted from. After a sample is decoded, outside of the clock, the parent computes the probability
of each token given all before it. Repetition is probable too, so trigrams are counted beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.trace import GIVEN, ForwardKind
from dllm_bench.runs.dependencies import Loaded
from dllm_bench.store.record import SampleRecord

PROBE = "Ten birds, 3.5 km away: it's a test.\n"
"""Text that model and parent must encode alike."""


@dataclass(frozen=True)
class Parent:
    """The model that reads the texts."""

    loaded: Loaded
    name: str

    def check(self, model: Loaded) -> None:
        """Refuse a parent that sees later tokens or has another tokenizer than the run's model."""
        if getattr(self.loaded.denoiser, "attention_form", None) != "causal":
            raise DllmBenchError(
                f"model@parent={self.name} sees tokens after the one it predicts, so it gives no "
                "probability of a text; choose an autoregressive model."
            )
        if self.loaded.encode(PROBE) != model.encode(PROBE):
            raise DllmBenchError(
                f"model@parent={self.name} has another tokenizer than the run's model; choose the "
                "model that this one was adapted from."
            )

    def read(self, sample: SampleRecord, request: Request) -> SampleRecord:
        """Return the sample with the counts that the metrics `quality/…` need."""
        ids = emitted(sample, self.loaded.denoiser.special.mask)
        trigrams = list(zip(ids, ids[1:], ids[2:], strict=False))
        counts = {"trigrams": len(trigrams), "distinct_trigrams": len(set(trigrams))}
        return replace(sample, counts={**sample.counts, **counts, **self.likelihood(request, ids)})

    @torch.inference_mode()
    def likelihood(self, request: Request, ids: Sequence[int]) -> dict[str, float]:
        """Return −log p of T tokens after the prompt, in nats, and how many of them are the most
        probable token of their position. One forward of the whole text.
        """
        if not ids:
            return {"parent_nats": 0.0, "parent_choices": 0}
        denoiser, first = self.loaded.denoiser, len(request.prompt_ids)
        tokens_L = torch.tensor((*request.prompt_ids, *ids), device=denoiser.device)
        plan = ForwardPlan(ForwardKind.VERIFY, (0, len(tokens_L)), (first, len(tokens_L)), (0, 0))
        plan = replace(plan, attention="block_causal", block=1)
        logits_TV = denoiser.forward(tokens_L[None], plan, denoiser.new_cache(len(tokens_L)))[0]
        wanted_T = tokens_L[first:]
        nats_T = torch.nn.functional.cross_entropy(logits_TV.float(), wanted_T, reduction="none")
        choices_T = logits_TV.argmax(-1) == wanted_T
        return {"parent_nats": nats_T.sum().item(), "parent_choices": int(choices_T.sum())}


def emitted(sample: SampleRecord, mask: int) -> list[int]:
    """Return the decoded tokens before the first reason to stop, which the column `emitted`
    counts."""
    end = min([*sample.cut.values(), len(sample.ids)])
    decoded = zip(sample.ids[:end], sample.born[:end], strict=True)
    return [token for token, born in decoded if token != mask and born != GIVEN]
