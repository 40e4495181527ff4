"""Use a decoder through transformers' own `model.generate(..., custom_generate=FOLDER)`.

`export` writes the folder: a `generate.py` that holds the decoder as data and calls
`generate_with`. Not supported, and refused: beams, several sequences per prompt, logits processors,
stopping criteria, stop strings, assistants, streamers. Sampling settings of transformers have no
effect, because a decoder has its own. A model of a class that this package cannot run layer by
layer is called as a function, without a cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any

import torch
from torch import Tensor

from dllm_bench.api.generation import PromptGenerator, decode_together, spec_of, wrap
from dllm_bench.core.decoder import Decoder
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request, first_end
from dllm_bench.models.load import LoadedModel
from dllm_bench.models.wrapped import is_supported
from dllm_bench.registry import describe, instantiate
from dllm_bench.runs.runner import ready
from dllm_bench.runs.sessions import check_batched
from dllm_bench.store.files import write_atomic

REFUSED = (
    "logits_processor stopping_criteria stop_strings prefix_allowed_tokens_fn assistant_model "
    "streamer negative_prompt_ids"
).split()
SINGLE = ("num_beams", "num_return_sequences")  # more than one of these is refused
WRAPPING = ("mask_token", "attention", "block", "shifted")  # settings of `wrap`
FOLDER = "custom_generate"
TEMPLATES = Path(__file__).with_name("templates")


def export(name: str, decoder: Decoder, folder: Path) -> list[Path]:
    """Write the folder for a decoder; returns the files."""
    code, card = ((TEMPLATES / file).read_text("utf-8") for file in ("generate.py.txt", "card.md"))
    plain = pformat(describe(decoder), sort_dicts=False)
    texts = {
        f"{FOLDER}/generate.py": code.format(name=name, decoder=plain),
        f"{FOLDER}/requirements.txt": "dllm-bench\n",
        "README.md": card.format(name=name, folder=folder),
    }
    return [write_atomic(folder / path, text) for path, text in texts.items()]


@dataclass(frozen=True)
class GenerateOutput:
    """What `return_dict_in_generate=True` gives."""

    sequences: Tensor
    """Token ids (B, L)."""
    generations: list[Generation]
    """Tokens and trace of each row."""


def generate_with(
    model: Any,
    decoder: Mapping[str, Any],
    inputs: Tensor | None = None,
    *,
    tokenizer: Any = None,
    max_new_tokens: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> Tensor | GenerateOutput:
    """Decode prompts (B, T), padded on either side, to sequences (B, T + new tokens).

    A row ends with its first end token and is then filled with padding. The settings are those of
    `dllm_bench.wrap` and of `model.generate`: `input_ids`, `attention_mask`, `generation_config`,
    `return_dict_in_generate`; sampling settings have no effect.

    Raises DllmBenchError for arguments that a decoder cannot honour.
    """
    given = settings.get("input_ids") if inputs is None else inputs
    config = settings.get("generation_config") or model.generation_config
    new = max_new_tokens or config.max_new_tokens
    wrong = [name for name in REFUSED if settings.get(name)]
    wrong += [name for name in SINGLE if settings.get(name, 1) != 1]
    wrong += ["no input_ids"] * (given is None) + ["no max_new_tokens"] * (not new)
    if wrong:
        raise DllmBenchError(
            f"custom_generate was called with {', '.join(wrong)}; give input_ids and "
            f"max_new_tokens, and leave out {', '.join((*REFUSED, *SINGLE))}."
        )
    wrapped = wrap(
        model if is_supported(model) else lambda ids: model(input_ids=ids).logits,
        tokenizer,
        **{name: settings[name] for name in WRAPPING if name in settings},
    )
    assert given is not None
    chosen: Any = instantiate(decoder, "decoder")
    spec = spec_of(wrapped, chosen, seed=seed, batch=len(given))
    check_batched(spec)
    prompts = map(tuple, _prompts(given, settings.get("attention_mask")))
    id_of = PromptGenerator(spec, chosen, wrapped).id_of
    asked = [ready(spec, chosen, wrapped, Request(id_of(ids), ids, new)) for ids in prompts]
    generations = decode_together(wrapped, chosen, asked, len(asked))
    sequences = _padded(given, generations, wrapped)
    whole = settings.get("return_dict_in_generate")
    return GenerateOutput(sequences, generations) if whole else sequences


def _prompts(ids_BT: Tensor, attention_mask_BT: Tensor | None) -> list[list[int]]:
    """Return the ids of each row without padding."""
    seen_BT = torch.ones_like(ids_BT) if attention_mask_BT is None else attention_mask_BT
    pairs = zip(ids_BT, seen_BT.bool(), strict=True)
    return [list(ids_T[seen_T].tolist()) for ids_T, seen_T in pairs]


def _padded(ids_BT: Tensor, generations: Sequence[Generation], model: LoadedModel) -> Tensor:
    """Return the prompts as they were given, each followed by its new tokens and padding (B, L)."""
    special = model.special
    rows = []
    for generation in generations:
        ids = list(generation.ids[: generation.cut["length"]])
        end = first_end(ids, special)
        rows.append(torch.tensor(ids if end is None else ids[: end + 1], dtype=torch.long))
    padding = special.eos if special.pad is None else special.pad
    new_BN = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
    return torch.cat([ids_BT, new_BN.to(ids_BT.device)], dim=1)
