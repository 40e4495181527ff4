"""What drafters learn from: rows of text, and the target's features and hidden states for them.

The target runs in the same step as the drafter; nothing is cached on disk but its own texts. Rows
are prompts of minigsm and minicode (train splits) with the target's own answers, sampled as
DeepSpec does or greedy, or with the gold ones. Prompts are never supervised, the end token is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request, first_end
from dllm_bench.decoding.draft.controls import NoDraft
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.models.load import LoadedModel
from dllm_bench.models.transformer import EMBEDDING_TAP, FULL_ATTENTION, TransformerDenoiser
from dllm_bench.training.drafter_blocks import Rows

Report = Callable[[str], None]
TASKS = ("minigsm", "minicode")
REPORT_EVERY_S = 5.0


@dataclass(frozen=True)
class Text:
    """Tokens of a prompt and its answer, the end token last."""

    ids: tuple[int, ...]
    prompt: int


@torch.no_grad()
def read(
    target: TransformerDenoiser, ids_BS: Tensor, answer_BS: Tensor, feature_layers: Sequence[int]
) -> Rows:
    """Features of the tapped layers and normalised last states, all rows at once."""
    model, length = target.module.model, ids_BS.shape[1]
    if set(getattr(model.config, "layer_types", None) or [FULL_ATTENTION]) != {FULL_ATTENTION}:
        raise DllmBenchError(
            "The target has layers that see part of the text only, which training of drafters "
            "does not support; choose a target whose layers see the whole text."
        )
    causal_SS = torch.ones(length, length, dtype=torch.bool, device=ids_BS.device).tril()
    hidden_BSD = model.embed_tokens(ids_BS)
    rotation = model.rotary_emb(hidden_BSD, torch.arange(length, device=ids_BS.device)[None])
    tapped = {EMBEDDING_TAP: hidden_BSD}
    for index, layer in enumerate(model.layers):
        hidden_BSD = layer(
            hidden_BSD, attention_mask=causal_SS[None, None], position_embeddings=rotation
        )
        tapped[index] = hidden_BSD
    features_BSC = torch.cat([tapped[tap] for tap in feature_layers], dim=-1)
    return Rows(ids_BS, answer_BS, features_BSC.float(), model.norm(hidden_BSD).float())


def batch(texts: Sequence[Text], end: int) -> tuple[Tensor, Tensor]:
    """Token ids (B, S), filled with the end token, and the positions of answers."""
    length = max(len(text.ids) for text in texts)
    ids_BS = torch.full((len(texts), length), end)
    answer_BS = torch.zeros(len(texts), length, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids_BS[row, : len(text.ids)] = torch.tensor(text.ids)
        answer_BS[row, text.prompt : len(text.ids)] = True
    return ids_BS, answer_BS


def gold(loaded: LoadedModel, found: Sequence[tuple[str, str]]) -> list[Text]:
    """Prompts with their gold answers."""
    encode, end = loaded.text.encode, loaded.special.eos
    rows = []
    for prompt, answer in found:
        ids = encode(prompt)
        rows.append(Text((*encode(prompt + answer), end), len(ids)))
    return rows


def own(
    loaded: LoadedModel,
    requests: Sequence[Request],
    temperature: float,
    file: Path,
    report: Report = print,
) -> list[Text]:
    """Prompts with the target's own answers; what `file` holds already is not decoded again."""
    decoder, special = SpeculativeDecoder(NoDraft(), temperature=temperature), loaded.special
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    lines = [line for line in lines if line.endswith("\n")]  # the last one may be cut short
    file.write_text("".join(lines))
    done = [Text(tuple(row["ids"]), row["prompt"]) for row in map(json.loads, lines)]
    started = told = time.monotonic()
    with file.open("a") as stream:
        for index in range(len(done), len(requests)):
            prompt, limit = requests[index].prompt_ids, requests[index].max_new_tokens
            ids = decoder.generate(loaded.denoiser, requests[index]).ids[:limit]  # type: ignore[arg-type]
            stop = first_end(ids, special)
            done.append(Text(prompt + (ids if stop is None else ids[: stop + 1]), len(prompt)))
            stream.write(json.dumps({"ids": done[-1].ids, "prompt": len(prompt)}) + "\n")
            stream.flush()
            if (now := time.monotonic()) - told > REPORT_EVERY_S:
                told = now
                rate = (now - started) / (index + 1 - len(lines))
                eta_s = rate * (len(requests) - index - 1)
                report(f"answer {index + 1} of {len(requests)}, ETA {eta_s:.0f} s")
    return done[: len(requests)]
