"""Training data of drafters: texts with answers, and the target model's hidden states for them.

The answers that the target generated are stored. Its hidden states are computed in the step that
reads them, or stored as well (`StoredRows`). Texts are prompts of embedded tasks (train splits) or
of files, with the target's own answers, sampled as DeepSpec does or greedy, or with the gold
answers. The loss never reads prompt tokens; it does read the end token.

Shapes: B texts, L positions of a text, H hidden size, C width of the features (H times the number
of feature layers).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request, first_end
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.methods.drafting import NoDraft
from dllm_bench.models.load import LoadedModel
from dllm_bench.models.transformer import EMBEDDING_TAP, FULL_ATTENTION, TransformerDenoiser
from dllm_bench.store.files import (
    Appender,
    atomic_path,
    is_file,
    lstat,
    make_folder,
    matching,
    whole_lines,
    write_atomic,
)
from dllm_bench.training.prompts import Pair
from dllm_bench.training.reports import Countdown, Report

BATCH = 32  # requests that are answered at a time


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
    whole_BL: Tensor | None = None
    """Log of the sum of exp of the target's logits over its vocabulary, where the next token is in
    the answer, else infinite; None without a draft vocabulary."""


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


def whole_vocabulary(target: TransformerDenoiser, rows: TargetRows) -> TargetRows:
    """Return the rows with `whole_BL`."""
    wanted_BL = torch.nn.functional.pad(rows.answer_BL[:, 1:], (0, 1))
    whole_BL = rows.last_BLH.new_full(rows.ids_BL.shape, math.inf)
    logits_MV = target.head(rows.last_BLH[wanted_BL].to(target.dtype)).float()
    whole_BL[wanted_BL] = logits_MV.logsumexp(-1)
    return replace(rows, whole_BL=whole_BL)


@dataclass
class StoredRows:
    """What a target computed for texts, kept in bfloat16, one file a text.

    Rows that are not stored are rounded as well, so that training does not depend on the limit.
    """

    folder: Path
    """Of this target and these feature layers alone."""
    limit_bytes: float
    """Nothing is added to a folder of this size."""

    def __post_init__(self) -> None:
        make_folder(self.folder)
        found = map(lstat, matching(self.folder, "*.safetensors"))
        self.size = sum(one.st_size for one in found if one is not None)

    def rows(
        self, texts: Sequence[TrainingText], end: int, compute: Callable[[TrainingText], TargetRows]
    ) -> TargetRows:
        """Return the rows of a batch; `compute` gives those of one text that is not stored."""
        ids_BL, answer_BL = padded(texts, end)
        parts = [self._of_text(text, compute) for text in texts]
        names = ("features", "last", "whole")
        features, last, whole = (
            pad_sequence([part[name] for part in parts], batch_first=True).float() for name in names
        )
        return TargetRows(ids_BL, answer_BL, features, last, whole)

    def _of_text(
        self, text: TrainingText, compute: Callable[[TrainingText], TargetRows]
    ) -> dict[str, Tensor]:
        name = hashlib.sha256(f"{text.prompt} {text.ids}".encode()).hexdigest()
        file = self.folder / f"{name}.safetensors"
        if is_file(file):
            return load_file(file)
        rows = compute(text)
        assert rows.whole_BL is not None
        features, last = rows.features_BLC[0].bfloat16(), rows.last_BLH[0].bfloat16()
        part = {"features": features.cpu(), "last": last.cpu(), "whole": rows.whole_BL[0].cpu()}
        size = sum(tensor.nbytes for tensor in part.values())
        if self.size + size <= self.limit_bytes:
            self.size += size
            with atomic_path(file) as temporary:
                save_file(part, temporary)
        return part


def frequent_tokens(texts: Sequence[TrainingText], count: int) -> tuple[int, ...]:
    """Return the tokens that occur most often in the answers, ascending; equally frequent ones by
    the prompts, then by their ids, because learned vocabularies list frequent pieces first."""
    answers = Counter(token for text in texts for token in text.ids[text.prompt :])
    asked = Counter(token for text in texts for token in text.ids[: text.prompt])
    seen = sorted(answers | asked, key=lambda token: (-answers[token], -asked[token], token))[
        :count
    ]
    rest = (token for token in itertools.count() if token not in answers and token not in asked)
    return tuple(sorted([*seen, *itertools.islice(rest, count - len(seen))]))


def padded(texts: Sequence[TrainingText], end: int) -> tuple[Tensor, Tensor]:
    """Return (ids_BL, answer_BL): texts filled up with the end token, and their answer
    positions."""
    length = max(len(text.ids) for text in texts)
    ids_BL = torch.full((len(texts), length), end)
    answer_BL = torch.zeros(len(texts), length, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids_BL[row, : len(text.ids)] = torch.tensor(text.ids)
        answer_BL[row, text.prompt : len(text.ids)] = True
    return ids_BL, answer_BL


def gold_texts(loaded: LoadedModel, pairs: Sequence[Pair]) -> list[TrainingText]:
    """Return prompts with their gold answers."""
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
    """Return prompts with the target's own answers, decoded in batches of `BATCH`.

    Answers that `file` already holds are not decoded again; new ones are appended to it in the
    order of the requests, whose ids are their places.
    """
    decoder = SpeculativeDecoder(NoDraft(), temperature=temperature)
    texts = stored_texts(file)
    countdown, early = Countdown(len(requests), len(texts)), dict[int, TrainingText]()
    with closing(Appender(file)) as stream:
        for one in decoder.generate_stream(loaded.denoiser, requests[len(texts) :], BATCH):  # type: ignore[arg-type]
            place = int(one.request_id)
            prompt, limit = requests[place].prompt_ids, requests[place].max_new_tokens
            ids, end = one.ids[:limit], first_end(one.ids[:limit], loaded.special)
            answer = ids if end is None else ids[: end + 1]
            early[place] = TrainingText(prompt + answer, len(prompt))
            while text := early.pop(len(texts), None):
                texts.append(text)
                stream.append(json.dumps({"ids": text.ids, "prompt": text.prompt}))
                if countdown.due(len(texts)):
                    report(f"answers: {len(texts)} of {len(requests)}, {countdown.eta(len(texts))}")
    return texts[: len(requests)]


def stored_texts(file: Path) -> list[TrainingText]:
    """Return the texts that `generated_texts` stored in a file; a last line cut short by a kill is
    removed from it."""
    lines = whole_lines(file)
    write_atomic(file, b"".join(line + b"\n" for line in lines))
    return [TrainingText(tuple(row["ids"]), row["prompt"]) for row in map(json.loads, lines)]
