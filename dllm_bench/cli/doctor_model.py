"""`dllm-bench doctor MODEL`: check one checkpoint, from its files to a forward on one prompt.

Each check gives a line or two. The first error, which loading would raise too, ends the report,
because later checks would fail for the same reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import torch

from dllm_bench.cli.common import OK, REQUIRED_MISSING, Line
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.load import Inspection, device_of, inspect_checkpoint, load_model
from dllm_bench.models.sources import (
    checkpoint_folder,
    checkpoint_sources,
    content_hash,
    hub_cache,
    manifest_problems,
    read_manifest,
)
from dllm_bench.models.spec import ModelSpec
from dllm_bench.runs.runner import FiniteLogits
from dllm_bench.serving.client import Client
from dllm_bench.store.groups import ModelGroup, RunConfig
from dllm_bench.store.inputs import (
    GIBIBYTE,
    WEIGHTS_SHARE,
    engine_of,
    memory_bytes,
    model_here,
    model_spec,
)

POSITIONS = 2048  # length of the canvas for which the size of keys and values is given
PROMPT = "The answer to 2 + 3 is"


def model_lines(config: RunConfig) -> Iterator[Line]:
    """Yield the report for the model and hardware groups of a composed configuration."""
    name = config.model.name
    try:
        if config.model.is_served:
            yield OK, name, server_text(config.model)
            return
        missing = list(missing_lines(model_spec(config.model)))
        if missing:
            yield from missing
            return
        spec = model_spec(model_here(config))
        checkpoint = inspect_checkpoint(spec)
        yield from file_lines(spec, checkpoint)
        yield from architecture_lines(checkpoint)
        yield from text_lines(checkpoint)
        yield from memory_and_forward(spec, checkpoint)
    except DllmBenchError as error:
        yield REQUIRED_MISSING, name, str(error)


def missing_lines(spec: ModelSpec) -> Iterator[Line]:
    """Yield a line for the base model and for the LoRA adapter if they are not on this machine."""
    for source, revision, is_lora in checkpoint_sources([spec]):
        try:
            checkpoint_folder(source, revision)
        except DllmBenchError as error:
            yield REQUIRED_MISSING, f"{spec.name} lora" if is_lora else spec.name, str(error)


def server_text(model: ModelGroup) -> str:
    """Say that the server answers and which models it lists; raise if it does not answer."""
    with closing(Client(engine_of(model))) as client:
        names = ", ".join(client.model_names())
    return f"{model.url} answers; it lists {names or 'no models'}: choose with model.name=NAME"


def file_lines(spec: ModelSpec, checkpoint: Inspection) -> Iterator[Line]:
    """Yield the files, their sizes and the commits they come from."""
    size = sum(checkpoint.files.values()) / GIBIBYTE
    where = ", ".join(str(folder) for folder in checkpoint.folders.values())
    yield OK, "files", f"{len(checkpoint.files)} with weights, {size:.3f} GiB, in {where}"
    pinned = {spec.path: spec.revision, spec.lora: spec.lora_revision}
    for source, commit in checkpoint.commits.items():
        if commit is None:
            yield OK, "revision", f"{source} is not a snapshot of the hub; its content is hashed"
        elif pinned[source]:
            yield OK, "revision", f"{source} at {commit}, pinned"
        else:
            key = "model.revision" if source == spec.path else "model.lora_revision"
            yield OK, "revision", f"{source} at {commit}; pin it with {key}={commit}"
    yield OK, "content", f"sha256 {content_hash(spec)[:12]}"
    for source in checkpoint.folders:
        yield manifest_line(source)


def manifest_line(source: str) -> Line:
    """Compare the files with the manifest that `prefetch` wrote, if there is one."""
    cache = hub_cache()
    entry = read_manifest(cache).get(source)
    if entry is None:
        text = f"none lists {source}, so its files cannot be compared with the published ones"
        return OK, "manifest", text
    problems = manifest_problems(cache, entry)
    if problems:
        text = f"{source}: {'; '.join(problems)}; fetch it again with dllm-bench prefetch"
        return REQUIRED_MISSING, "manifest", text
    return OK, "manifest", f"{source}: {len(entry['files'])} files are as they were downloaded"


def architecture_lines(checkpoint: Inspection) -> Iterator[Line]:
    """Report adapter, form of attention, number of parameters and dtypes."""
    opened = checkpoint.opened
    form = opened.attention_form.replace("_", "-")
    block = f" over blocks of {opened.spec.block}" if opened.spec.block else ""
    shift = "row i predicts position i + 1" if opened.shifted else "row i predicts position i"
    yield OK, "architecture", f"{opened.adapter}, {form} attention{block}, {shift}"
    stored = ", ".join(f"{count} {dtype}" for dtype, count in sorted(checkpoint.stored.items()))
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    yield OK, "tensors", f"{stored}; {checkpoint.parameters:,} parameters, run in {dtype}"


def text_lines(checkpoint: Inspection) -> Iterator[Line]:
    """Report the special token ids with their texts, and the chat template."""
    yield OK, "special ids", ", ".join(f"{r} {text}" for r, text in checkpoint.named_ids().items())
    if checkpoint.text.tokenizer is None:
        text = "no tokenizer files next to the weights; requests need text"
        yield REQUIRED_MISSING, "tokenizer", text
    elif checkpoint.text.chat:
        yield OK, "chat template", f"sha256 {str(checkpoint.text.template_sha256)[:12]}"
    else:
        bos = "with BOS" if checkpoint.text.bos else "as they are"
        yield OK, "chat template", f"not used; plain prompts {bos}"


def memory_and_forward(spec: ModelSpec, checkpoint: Inspection) -> Iterator[Line]:
    """Yield the memory needed and available; then, if the model fits, a forward."""
    device, available = memory_of(spec)
    weights = checkpoint.weight_bytes / GIBIBYTE
    cache = checkpoint.cache_bytes(POSITIONS) / GIBIBYTE
    need = f"weights {weights:.2f} GiB, {cache:.3f} GiB of K/V per {POSITIONS} positions"
    text = f"{need}; {device} has {available / GIBIBYTE:.1f} GiB"
    fits = checkpoint.weight_bytes + checkpoint.cache_bytes(POSITIONS) <= WEIGHTS_SHARE * available
    yield OK if fits else REQUIRED_MISSING, "memory", text
    if fits:
        yield OK, "forward", forward_text(spec, checkpoint.opened.attention_form)


def memory_of(spec: ModelSpec) -> tuple[str, int]:
    """Return the model's device and its total memory in bytes."""
    device = device_of(spec)
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device)), memory_bytes(str(device))
    return "this machine", memory_bytes(str(device))


def forward_text(spec: ModelSpec, form: str) -> str:
    """Load the model, predict the position after a prompt, and return the duration and the token.

    `form` is the form of attention. Raises if a logit is not finite.
    """
    started = time.perf_counter()
    model = load_model(spec)
    loaded_s = time.perf_counter() - started
    denoiser, tokenizer = FiniteLogits(model.denoiser, spec.name), model.text.tokenizer
    prompt = model.encode([{"role": "user", "content": PROMPT}] if spec.chat else PROMPT)
    tokens_1L = torch.tensor([[*prompt, denoiser.special.mask]], device=denoiser.device)
    length = len(prompt) + 1
    plan = first_plan(form, length)
    logits_V = denoiser.forward(tokens_1L, plan, denoiser.new_cache(length))[0, 0].float()
    best = int(logits_V.argmax())
    token = tokenizer.convert_ids_to_tokens(best) if tokenizer else best
    return (
        f"loaded in {loaded_s:.1f} s; after {len(prompt)} prompt tokens it predicts {token!r} "
        f"with probability {float(logits_V.softmax(0)[best]):.2f}"
    )


def first_plan(form: str, length: int) -> ForwardPlan:
    """Return a plan that feeds all positions and predicts the last one: a mask in a block of its
    own."""
    plan = ForwardPlan(ForwardKind.PREFILL, (0, length), (length - 1, length), (0, 0))
    if form == "full":
        return plan
    origin = length - 1 if form == "block_causal" else 0
    return replace(plan, attention="block_causal", block=1, origin=origin)
