"""Embedded models as objects, and prompts, shared by the tests of the Python interface."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from typing import Any

from torch import Tensor

import dllm_bench as db
from dllm_bench.models.load import LoadedModel

PROMPTS = ["Question: Tom has 3 apples and buys 4 more. How many apples?\nAnswer:", "2 + 2 ="]
GAPS = "Tom has 3 apples and buys <|mask|><|mask|> more, so he has <|mask|><|mask|> apples."


@lru_cache
def loaded(name: str) -> LoadedModel:
    return db.load_model(name)


def transformers_object(name: str) -> Any:
    """Return an embedded model as transformers itself would load it, in training mode."""
    model = loaded(name)
    config = deepcopy(model.denoiser.module.config)
    del config.is_causal
    config.mask_token_id, config.eos_token_id = model.special.mask, model.special.eos
    module = type(model.denoiser.module)(config)
    module.load_state_dict(model.denoiser.module.state_dict())
    return module.train()


def logits(ids: Tensor) -> Tensor:
    """tiny-llada as a function of ids."""
    found: Tensor = loaded("tiny-llada").denoiser.module(input_ids=ids, use_cache=False).logits
    return found


def wrapped(model: Any, **settings: Any) -> LoadedModel:
    """Return an object wrapped with tiny-llada's tokenizer."""
    given = {"mask_token": "<|mask|>", **settings}
    return db.wrap(model, loaded("tiny-llada").text.tokenizer, **given)
