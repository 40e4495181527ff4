"""One prompt through every door: the command line, Python, lm-eval and transformers agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import AutoModelForCausalLM

import dllm_bench as db
from dllm_bench.api.compose import compose
from dllm_bench.api.custom_generate import generate_with
from dllm_bench.api.lm_eval_model import DllmBenchLM, generator
from dllm_bench.cli.main import main
from dllm_bench.core.request import Generation, Request
from dllm_bench.registry import describe
from dllm_bench.store.inputs import benchmark_of
from dllm_bench.store.record import SampleRecord
from dllm_bench.store.store import Store, read_samples
from tests.api.models import loaded, transformers_object
from tests.tiers import covering

NEW = 64
DECODERS = {
    **dict.fromkeys("vanilla fast_dllm_dual credit lopa_dream hierarchy".split(), "tiny-llada"),
    "fast_dllm_dream": "tiny-dream-instruct",
    **dict.fromkeys(("ar", "ngram_speculative"), "tiny-qwen3"),
}
ATTENTION = {"tiny-qwen3": {"attention": "causal"}, "tiny-dream-instruct": {"shifted": True}}
SETTINGS = ("benchmark=minigsm", f"benchmark.max_new_tokens={NEW}", "hardware=cpu", "limit=1")


def by_command(model: str, decoder: str, folder: Path) -> SampleRecord:
    """Return the first sample of `dllm-bench run`."""
    choice = (f"model={model}", f"decoder={decoder}", f"paths.results={folder}")
    assert main(["run", *choice, *SETTINGS]) == 0
    (run,) = Store(folder / "runs").folders()
    return next(iter(read_samples(run).values()))


def first_request(model: str) -> tuple[Any, Request]:
    """Return the benchmark's first prompt, a text or a chat, and its request."""
    tasks = benchmark_of(compose([f"model={model}", *SETTINGS])["benchmark"])
    request = next(iter(tasks.requests(loaded(model).encode)))
    chat = request.prompt.startswith("[{")
    return json.loads(request.prompt) if chat else request.prompt, request


def by_lm_eval(model: str, decoder: str, prompt: Any, request: Request) -> tuple[str, Generation]:
    """lm-eval's answer to the prompt, and what was decoded for it."""
    generate = generator([f"model={model}", f"decoder={decoder}", *SETTINGS])
    lm, made, kind = DllmBenchLM(generate), list[Generation](), type(generate.decoder)
    decoded = kind.generate
    text = prompt if isinstance(prompt, str) else lm.apply_chat_template(prompt)
    settings = {"until": list(request.stop), "max_gen_toks": NEW}
    asked = Instance("generate_until", {}, (text, settings), 0)
    with patch.object(kind, "generate", lambda *given: made.append(decoded(*given)) or made[-1]):
        return lm.generate_until([asked], disable_tqdm=True)[0], made[0]


def by_transformers(model: str, decoder: str, request: Request, folder: Path) -> Generation:
    """`model.generate` of a checkpoint on disk, with the exported decoder."""
    transformers_object(model).save_pretrained(folder / "model")
    module = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert main(["export", "custom-generate", decoder, "--to", str(folder / "door")]) == 0
    ids = torch.tensor([request.prompt_ids])
    output = module.generate(
        ids,
        custom_generate=str(folder / "door"),
        trust_remote_code=True,
        max_new_tokens=NEW,
        tokenizer=loaded(model).text.tokenizer,
        return_dict_in_generate=True,
        **ATTENTION.get(model, {}),
    )
    new = output.sequences[0, ids.shape[1] :].tolist()
    assert new == list(output.generations[0].ids[: len(new)])
    return output.generations[0]


@pytest.mark.parametrize("decoder", covering(6, DECODERS))
def test_every_door_gives_the_same_text_tokens_and_forwards(decoder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    model = DECODERS[decoder]
    prompt, request = first_request(model)
    run = by_command(model, decoder, tmp_path / "results")
    (ours,) = db.generate(loaded(model), [prompt], decoder, NEW, stop=request.stop)
    text, *others = by_lm_eval(model, decoder, prompt, request)
    others.append(by_transformers(model, decoder, request, tmp_path))
    assert run.text.strip() and run.text == ours.text == text
    assert run.ids == ours.sample.ids and len(run.trace["kind"]) == len(ours.trace)
    assert all((list(made.ids), len(made.trace)) == (run.ids, len(ours.trace)) for made in others)


def test_a_batch_of_padded_prompts_gives_the_rows_of_single_ones() -> None:
    module, model = transformers_object("tiny-llada").eval(), loaded("tiny-llada")
    plain, pad = describe(db.decoder("fast_dllm")), model.special.eos
    rows = [model.encode(text) for text in ("Tom has 3 apples.", "What is 2 + 5 in words?")]
    width = max(map(len, rows))
    padded = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    settings = {"max_new_tokens": NEW, "tokenizer": model.text.tokenizer}
    both = generate_with(module, plain, padded, attention_mask=seen, **settings)
    for row, whole in zip(rows, both.tolist(), strict=True):
        new = generate_with(module, plain, torch.tensor([row]), **settings)[0].tolist()[len(row) :]
        assert whole[width : width + len(new)] == new
