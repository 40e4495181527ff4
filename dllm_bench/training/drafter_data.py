"""Training data of drafters: texts with answers, and the target model's hidden states for them.

The target runs in the same step as the drafter, so hidden states are never stored; only the answers
it generated are. Texts are prompts of embedded tasks (train splits) with the target's own
answers, sampled as DeepSpec does or greedy, or with the gold answers. The loss never reads prompt
tokens; it does read the end token.

Shapes: B texts, L positions of a text, H hidden size, C width of the features (H times the number
of feature layers).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request, first_end
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.methods.drafting import NoDraft
from dllm_bench.models.load import LoadedModel
from dllm_bench.models.transformer import EMBEDDING_TAP, FULL_ATTENTION, TransformerDenoiser
from dllm_bench.store.files import Appender, whole_lines, write_atomic
from dllm_bench.training.prompts import Pair
from dllm_bench.training.reports import Countdown, Report


@dataclass(frozen=True)
class TrainingText:
    """One text to learn from."""

    ids: tuple[int, ...]
    """Tokens of the prompt and of the answer, the end token last."""
    prompt: int
    """Number of prompt tokens."""


@dataclass(frozen=True)
class TargetRows:
    """A batch of texts and what the target computed for them in one forward."""

    ids_BL: Tensor
    answer_BL: Tensor
    """Positions of the answer: only these are anchors or predicted."""
    features_BLC: Tensor
    """Outputs of the feature layers, concatenated, float32."""
    last_BLH: Tensor
    """Normalised last hidden states, float32."""


@torch.no_grad()
def target_rows(
    target: TransformerDenoiser, ids_BL: Tensor, answer_BL: Tensor, feature_layers: Sequence[int]
) -> TargetRows:
    """Run the target once over whole texts and keep the outputs of `feature_layers`."""
    model, length = target.module.model, ids_BL.shape[1]
    if set(getattr(model.config, "layer_types", None) or [FULL_ATTENTION]) != {FULL_ATTENTION}:
        raise DllmBenchError(
            "The target has layers that see part of the text only, which training of drafters "
            "does not support; choose a target whose layers see the whole text."
        )
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=ids_BL.device).tril()
    hidden_BLH = model.embed_tokens(ids_BL)
    rotation = model.rotary_emb(hidden_BLH, torch.arange(length, device=ids_BL.device)[None])
    outputs = {EMBEDDING_TAP: hidden_BLH}
    for index, layer in enumerate(model.layers):
        hidden_BLH = layer(
            hidden_BLH, attention_mask=causal_LL[None, None], position_embeddings=rotation
        )
        outputs[index] = hidden_BLH
    features_BLC = torch.cat([outputs[tap] for tap in feature_layers], dim=-1)
    return TargetRows(ids_BL, answer_BL, features_BLC.float(), model.norm(hidden_BLH).float())


def padded(texts: Sequence[TrainingText], end: int) -> tuple[Tensor, Tensor]:
    """(ids_BL, answer_BL): texts filled up with the end token, and their answer positions."""
    length = max(len(text.ids) for text in texts)
    ids_BL = torch.full((len(texts), length), end)
    answer_BL = torch.zeros(len(texts), length, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids_BL[row, : len(text.ids)] = torch.tensor(text.ids)
        answer_BL[row, text.prompt : len(text.ids)] = True
    return ids_BL, answer_BL


def gold_texts(loaded: LoadedModel, pairs: Sequence[Pair]) -> list[TrainingText]:
    """Prompts with their gold answers."""
    encode, end = loaded.text.encode, loaded.special.eos
    return [
        TrainingText((*encode(prompt + answer), end), len(encode(prompt)))
        for prompt, answer in pairs
    ]


def generated_texts(
    loaded: LoadedModel,
    requests: Sequence[Request],
    temperature: float,
    file: Path,
    report: Report = print,
) -> list[TrainingText]:
    """Prompts with the target's own answers; answers that `file` already holds are not decoded
    again, and each new answer is appended to it.
    """
    decoder = SpeculativeDecoder(NoDraft(), temperature=temperature)
    lines = _complete_lines(file)
    texts = [TrainingText(tuple(row["ids"]), row["prompt"]) for row in map(json.loads, lines)]
    countdown = Countdown(len(requests), len(texts))
    with closing(Appender(file)) as stream:
        for index in range(len(texts), len(requests)):
            prompt, limit = requests[index].prompt_ids, requests[index].max_new_tokens
            ids = decoder.generate(loaded.denoiser, requests[index]).ids[:limit]  # type: ignore[arg-type]
            end = first_end(ids, loaded.special)
            texts.append(
                TrainingText(prompt + (ids if end is None else ids[: end + 1]), len(prompt))
            )
            stream.append(json.dumps({"ids": texts[-1].ids, "prompt": len(prompt)}))
            if countdown.due(index + 1):
                report(f"answers: {index + 1} of {len(requests)}, {countdown.eta(index + 1)}")
    return texts[: len(requests)]


def _complete_lines(file: Path) -> list[bytes]:
    """The lines of a file that may not exist; a last line cut short by a kill is removed."""
    lines = whole_lines(file)
    write_atomic(file, b"".join(line + b"\n" for line in lines))
    return lines
