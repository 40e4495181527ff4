"""What `dllm-bench doctor` checks with torch: one model (`doctor MODEL`) or a device (`--gpu`).

`model_lines` checks a checkpoint, from its files to a forward on one prompt. Each check gives a
line or two. The first error, which loading would raise too, ends the report, because later checks
would fail for the same reason.

`gpu_lines` checks that a CUDA device computes what the CPU computes, and how fast. Each step
reports facts and problems. The report is written after every step, so that nothing is lost if the
device crashes. Steps run in another process, because a process in which the device crashed can no
longer use it; after a failed step the next one gets a new process. With `--fake` the CPU replaces
the device, in this process: this tests the command itself, and compares batches and forwards of
fixed shapes with single requests.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dllm_bench.api import generation, random_model
from dllm_bench.api.random_model import DREAM_7B, SMALL, WARM, RoundShape, random_rounds
from dllm_bench.cli.common import OK, OPTIONAL_MISSING, REQUIRED_MISSING, Line
from dllm_bench.core.denoiser import ForwardPlan, KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding import fused
from dllm_bench.decoding.numerics import margin, read_logits
from dllm_bench.models import load, sources
from dllm_bench.models.acceleration import ROWS, FixedShapeDenoiser
from dllm_bench.models.load import Inspection, LoadedModel, inspect_checkpoint, load_model
from dllm_bench.models.spec import ModelSpec
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.paths import hub_cache, read_yaml
from dllm_bench.runs.runner import FiniteLogits
from dllm_bench.serving.client import Client
from dllm_bench.store import inputs
from dllm_bench.store.files import write_json
from dllm_bench.store.groups import RunConfig
from dllm_bench.store.inputs import GIBIBYTE, WEIGHTS_SHARE, model_here, model_spec
from dllm_bench.store.provenance import machine, packages

POSITIONS = 2048  # length of the canvas for which the size of keys and values is given
PROMPT = "The answer to 2 + 3 is"

CUDA, CPU = "cuda", "cpu"
BUDGET_S, QUICK_S = 600.0, 120.0
FAILED, PASSED, SKIPPED, NOT_RUN = "failed", "passed", "skipped", "not run"
MARKS = {FAILED: REQUIRED_MISSING, PASSED: OK, SKIPPED: OPTIONAL_MISSING, NOT_RUN: OPTIONAL_MISSING}
DECODERS, NEED_CUDA, LONG_STEPS = (
    read_yaml(Path(__file__).with_name("doctor.yaml"))[name]
    for name in ("decoders", "need_cuda", "long_steps")
)
QUICK_DECODERS = 3
NEW = 32  # tokens of a text
BATCH = 8
CLOSE = 1e-4  # probabilities closer than this may be ordered differently on different devices
LENGTHS = (8, 1001, 4613, 152_064)
LONG = 152_064  # Dream's vocabulary
PROFILED = 8  # rounds, the prefill among them
LAUNCHES = ("cudaLaunch", "cudaGraphLaunch", "cuLaunch")  # prefixes of event names in a profile
PREFIX = 1024
SHAPES = tuple(product((0, 3, 7), (32, 64, 96)))  # lookahead branches and windows of rounds
QUICK_SHAPES = ((0, 32), (7, 32), (7, 64))  # the last one: LoPA of table 4 with two open blocks
MEMORY_SHARE = 1.1  # allowed peak, relative to weights, K/V and logits
SYNCHRONISES = "synchronizing"  # in the warnings of `set_sync_debug_mode`

Found = tuple[dict[str, Any], list[str]]


# --- one model -----------------------------------------------------------------------------------


def model_lines(config: RunConfig) -> Iterator[Line]:
    """Yield the report for the model and hardware groups of a composed configuration."""
    name = config.model.name
    try:
        if config.model.is_served:
            with closing(Client(inputs.engine_of(config.model))) as client:  # raises without answer
                names = ", ".join(client.model_names()) or "no models"
            text = f"{config.model.url} answers; it lists {names}: choose with model.name=NAME"
            yield OK, name, text
            return
        if missing := list(missing_lines(model_spec(config.model))):
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
    for source, revision, is_lora in sources.checkpoint_sources([spec]):
        try:
            sources.checkpoint_folder(source, revision)
        except DllmBenchError as error:
            yield REQUIRED_MISSING, f"{spec.name} lora" if is_lora else spec.name, str(error)


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
    yield OK, "content", f"sha256 {sources.content_hash(spec)[:12]}"
    for source in checkpoint.folders:
        yield manifest_line(source)


def manifest_line(source: str) -> Line:
    """Compare the files with the manifest that `prefetch` wrote, if there is one."""
    cache = hub_cache()
    entry = sources.read_manifest(cache).get(source)
    if entry is None:
        text = f"none lists {source}, so its files cannot be compared with the published ones"
        return OK, "manifest", text
    problems = sources.manifest_problems(cache, entry)
    if problems:
        text = f"{source}: {'; '.join(problems)}; fetch it again with dllm-bench prefetch"
        return REQUIRED_MISSING, "manifest", text
    return OK, "manifest", f"{source}: {len(entry['files'])} files are as they were downloaded"


def architecture_lines(checkpoint: Inspection) -> Iterator[Line]:
    """Report adapter, form of attention, number of parameters and dtypes."""
    opened = checkpoint.opened
    form = opened.attention_form.replace("_", "-")
    block = f" over blocks of {opened.block}" if opened.block else ""
    shift = "row i predicts position i + 1" if opened.shifted else "row i predicts position i"
    yield OK, "architecture", f"{opened.adapter}, {form} attention{block}, {shift}"
    stored = ", ".join(f"{count} {dtype}" for dtype, count in sorted(checkpoint.stored.items()))
    dtype = str(checkpoint.dtype).removeprefix("torch.")
    yield OK, "tensors", f"{stored}; {checkpoint.parameters:,} parameters, run in {dtype}"


def text_lines(checkpoint: Inspection) -> Iterator[Line]:
    """Report the special token ids with their texts, and the chat template."""
    yield OK, "special ids", ", ".join(f"{r} {text}" for r, text in checkpoint.named_ids().items())
    if checkpoint.text.tokenizer is None:
        yield REQUIRED_MISSING, "tokenizer", "no tokenizer files; requests of text need them"
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
    device = str(load.device_of(spec))
    name = None if device == CPU else inputs.cuda_device(device)
    return name or "this machine", inputs.memory_bytes(device)


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


# --- a device ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuCheck:
    """Settings of the check."""

    device: str
    """The device that is compared with the CPU."""
    quick: bool
    """Whether steps take fewer cases."""

    @property
    def fake(self) -> bool:
        """Whether the CPU replaces the device."""
        return self.device == CPU


def gpu_lines(fake: bool, quick: bool, out: Path | None) -> Iterator[Line]:
    """Run the steps; a line for each, and one for all that had no time. DllmBenchError where the
    device is missing."""
    if not fake and inputs.cuda_device() is None:
        raise DllmBenchError(
            "doctor --gpu asks for a CUDA device, and this machine has none; give --fake to run "
            "the checks on the CPU."
        )
    check = GpuCheck(CPU if fake else CUDA, quick)
    budget_s, started = QUICK_S if quick else BUDGET_S, time.monotonic()
    report: dict[str, Any] = {"device": check.device, "budget_s": budget_s, "steps": []}
    process = None
    for name in STEPS:
        left_s = budget_s - (time.monotonic() - started)
        if left_s <= 0:
            entry = {"state": NOT_RUN, "why": "out of time"}
        elif fake:
            entry = run_step(name, check)
        else:
            process = process or ProcessPoolExecutor(1, get_context("spawn"))
            entry = outcome(process.submit(run_step, name, check), left_s)
            if entry["state"] in (FAILED, NOT_RUN):
                for child in active_children():
                    child.kill()
                process = None
        report["steps"].append({"name": name, **entry})
        if out is not None:
            write_json(out, report)
        yield MARKS[entry["state"]], name, in_words(entry)
    if late := "; ".join(one["name"] for one in report["steps"] if one["state"] == NOT_RUN):
        other = f"leave out --quick for {BUDGET_S:.0f} s" if quick else "--quick takes fewer cases"
        yield REQUIRED_MISSING, "time", f"{late}: not checked in {budget_s:.0f} s; {other}"


def outcome(step: Future[dict[str, Any]], left_s: float) -> dict[str, Any]:
    """Wait for a step in another process, and return its entry of the report."""
    try:
        return step.result(left_s)
    except TimeoutError:
        return {"state": NOT_RUN, "why": f"did not end in the {left_s:.0f} s that were left"}
    except BrokenExecutor:
        return {"state": FAILED, "facts": {}, "problems": ["the step's process died"]}


def run_step(name: str, check: GpuCheck) -> dict[str, Any]:
    """Run a step, and return its state, facts and problems."""
    why = (NEED_CUDA if check.fake else LONG_STEPS if check.quick else {}).get(name)
    if why is not None:
        return {"state": SKIPPED, "why": why}
    started = time.monotonic()
    try:
        facts, problems = STEPS[name](check)
    except Exception as error:  # the command looks for any error of a device or driver
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        facts, problems = {}, [f"{said} ({Path(where.filename).name}:{where.lineno})"]
    spent_s = round(time.monotonic() - started, 2)
    state = FAILED if problems else PASSED
    return {"state": state, "seconds": spent_s, "facts": facts, "problems": problems}


def in_words(entry: Mapping[str, Any]) -> str:
    """Return a step's outcome for the terminal."""
    if "why" in entry:
        return f"{entry['state']}: {entry['why']}"
    facts = ", ".join(f"{name} {value}" for name, value in entry["facts"].items())
    return "; ".join([facts or "no facts", *entry["problems"]])


# --- steps of `doctor --gpu` ---------------------------------------------------------------------


def machine_facts(check: GpuCheck) -> Found:
    """Report device, driver and packages; on a CUDA device the kernels have to work."""
    found = {**machine(check.device), **packages()}
    broken = not check.fake and not all(fused.works(dtype) for dtype in fused.DTYPES)
    return found, ["the Triton kernels do not work, logits are read in several passes"] * broken


def numerics(check: GpuCheck) -> Found:
    """Compare token, probability and entropy of rows of logits with float64."""
    problems, worst = [], 0.0
    rows = (1, 8) if check.quick else (1, 8, 256)
    cases = list(product(LENGTHS, rows, (torch.float32, torch.bfloat16)))
    for length, count, dtype in cases:
        logits_RV = hard_logits(count, length).to(dtype)
        seen = read_logits(logits_RV.to(check.device)[None], entropy=True)
        law_RV = logits_RV.double().softmax(-1)
        error = relative(seen.probability_KW[0].cpu(), law_RV.amax(-1))
        assert seen.neg_entropy_KW is not None  # set, since entropy=True
        entropy_R = 1 + torch.special.entr(law_RV).sum(-1)  # 1: an entropy may be 0
        error = max(error, relative(1 - seen.neg_entropy_KW[0].cpu(), entropy_R))
        worst = max(worst, error)
        if error > 2e-6 or not seen.ids_KW[0].cpu().equal(law_RV.argmax(-1)):
            problems.append(f"{count} rows of {length} in {dtype} differ by {error:.1e}")
    return {"cases": len(cases), "largest error": f"{worst:.1e}"}, problems


def hard_logits(rows: int, length: int) -> Tensor:
    """Return (R, V): a token at -inf in every row; and a tie in the first row."""
    logits_RV = 4 * torch.randn(rows, length, generator=torch.Generator().manual_seed(length))
    logits_RV[:, 3] = -torch.inf
    logits_RV[0, [1, length - 1]] = 30.0
    return logits_RV


def relative(values: Tensor, law: Tensor) -> float:
    """Return the largest relative difference."""
    return float(((values.double() - law).abs() / law).max())


def decoders(check: GpuCheck) -> Found:
    """Compare tokens and commit steps on the device with the CPU's: alone, in a batch, recorded."""
    names = list(DECODERS)[:QUICK_DECODERS] if check.quick else list(DECODERS)
    ways = ((1, "none"), (BATCH, "none"), (1, "max"))
    problems, near = [], 0
    for name in names:
        expected = decoded(name, CPU, 1)
        for batch, mode in ways[1:] if check.fake else ways:
            for request, text in decoded(name, check.device, batch, compiled=mode).items():
                law = expected[request]
                if (text.ids, text.born) == (law.ids, law.born):
                    continue
                apart, way = margin_at_difference(name, law, text), f"batch {batch}, compile {mode}"
                near += apart < CLOSE
                if apart >= CLOSE:
                    problems.append(f"{name}, {way}: {request} differs, margin {apart:.1e}")
    facts = {"decoders": " ".join(names), "requests": BATCH, "differ where tokens are close": near}
    return facts, problems


def short_dtype(check: GpuCheck) -> Found:
    """Count the texts in bfloat16 that are the same alone and in a batch."""
    alone, batched = (decoded("fast_dllm", check.device, n, "bfloat16") for n in (1, BATCH))
    equal = sum(alone[key].ids == batched[key].ids for key in alone)
    return {"equal texts": f"{equal} of {BATCH}"}, []


def waits(check: GpuCheck) -> Found:
    """Count how often the host waits for the device; once per round is expected."""
    name = "fast_dllm"
    decoded(name, check.device, 1)  # compiles kernels
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            texts = decoded(name, check.device, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waited = [one for one in caught if SYNCHRONISES in str(one.message)]
    places = Counter(f"{Path(one.filename).name}:{one.lineno}" for one in waited)
    found = len(waited)
    forwards = sum(len(text.trace.forwards) for text in texts.values())
    most = forwards + 2 * len(texts)  # a request waits once more when it begins, and when it ends
    often = ", ".join(f"{place} {count} times" for place, count in places.most_common())
    problem = f"the host waited {found} times in {forwards} rounds: {often}"
    return {"waits": found, "rounds": forwards}, [problem] if found > most else []


def rounds(check: GpuCheck, mode: str) -> Found:
    """Measure rounds of a model with random weights. mode: of hardware.compile.

    The shape is Dream-7B's; on the CPU it is a small one.
    """
    small = RoundShape(CPU, torch.float32, SMALL, 1024, 64)
    one = small if check.fake else RoundShape(CUDA, torch.bfloat16, DREAM_7B, LONG, PREFIX)
    ceilings, steps = random_model.measured_ceilings(one.device, one.dtype), 4 if check.fake else 24
    found: dict[str, Any] = {
        "copied GB/s": round(ceilings.bytes_per_s / 1e9),
        "TFLOP/s": round(ceilings.flop_per_s / 1e12, 1),
    }
    problems = []
    model = random_model.random_model(one.vocab, one.shape, one.device, one.dtype, "none", mode)
    few = check.quick or mode == "default"  # torch.compile takes minutes
    for k, window in QUICK_SHAPES if few else SHAPES:
        made = random_rounds(model, one.prefix, k, window, WARM + steps)[WARM:]
        ms, replayed = median(forward.ms for forward in made), sum(f.replayed for f in made)
        share = median(random_model.roofline_ms(one, "none", f, ceilings) / f.ms for f in made)
        short = mode == "max" and (k + 1) * window <= ROWS
        if short and not check.fake and replayed < len(made):
            problems.append(f"{k} x {window}: {replayed} of {len(made)} rounds were graphs")
        text = f"{ms:.2f} ms · {1000 / ms:.0f} rounds/s · {100 * share:.0f} % of the roofline"
        started = "" if check.fake else f" · {launches(model, one, k, window):.0f} launches"
        found[f"{k} x {window}"] = text + started
    if isinstance(model, FixedShapeDenoiser):
        found["shapes"] = len(model.shapes_met)
    elif mode == "default":
        found["graphs"] = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found, problems


def launches(model: TransformerDenoiser, one: RoundShape, k: int, window: int) -> float:
    """Count the kernels and graphs that the host starts in a round."""
    profiler, kinds = torch.profiler, torch.profiler.ProfilerActivity
    with profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as seen:
        made = random_rounds(model, one.prefix, k, window, PROFILED)
    return sum(event.name.startswith(LAUNCHES) for event in seen.events()) / len(made)


def memory(check: GpuCheck) -> Found:
    """Compare the peak memory of Dream-7B's shape with that of its weights, K/V and logits."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = random_model.random_model(LONG, DREAM_7B, check.device, torch.bfloat16)
    random_rounds(model, PREFIX, 7, 32, WARM + 4)
    peak = torch.cuda.max_memory_allocated() - before
    weights = sum(tensor.nbytes for tensor in model.module.parameters())
    width = DREAM_7B["width"] * DREAM_7B["kv_heads"] // DREAM_7B["heads"]
    kv = 2 * 2 * DREAM_7B["layers"] * width * (PREFIX + 8 * 32)
    needed = weights + kv + 2 * 8 * 32 * LONG
    facts = {"peak GiB": round(peak / GIBIBYTE, 2), "needed GiB": round(needed / GIBIBYTE, 2)}
    problem = f"the peak is {peak / needed:.2f} times what is needed"
    return facts, [problem] if peak > MEMORY_SHARE * needed else []


def bandwidth(check: GpuCheck) -> Found:
    """Measure the bytes of logits that the device reads per second, more than its cache holds."""
    (rows, count), cuda = (8, 2) if check.fake else (256, 4), not check.fake
    tensors = [torch.randn(1, rows, LONG).to(check.device, torch.bfloat16) for _ in range(count)]
    work = random_model.recorded(lambda: [read_logits(one, entropy=True) for one in tensors], cuda)
    per_s = sum(one.nbytes for one in tensors) / random_model.seconds(work, cuda)
    return {"GB/s": round(per_s / 1e9, 1)}, []


STEPS: dict[str, Callable[[GpuCheck], Found]] = {
    "machine": machine_facts,
    "numerics": numerics,
    "decoders": decoders,
    "bfloat16": short_dtype,
    "waits": waits,
    "memory": memory,
    "bandwidth": bandwidth,
    "rounds": partial(rounds, mode="none"),
    "rounds, recorded": partial(rounds, mode="max"),
    "rounds, compiled": partial(rounds, mode="default"),
}


# --- decoding ------------------------------------------------------------------------------------


def decoded(
    name: str, device: str, batch: int, dtype: str = "float32", compiled: str = "none"
) -> dict[str, Generation]:
    """Return request -> its generation by a decoder."""
    model, decoder = embedded(DECODERS[name], device, dtype, compiled), generation.decoder(name)
    ready = [decoder.prepare(model.denoiser, request) for request in requests(model)]
    return {one.request_id: one for one in generation.decode_together(model, decoder, ready, batch)}


@cache
def embedded(name: str, device: str, dtype: str, compiled: str) -> LoadedModel:
    """Return an embedded model on a device, in a mode of hardware.compile."""
    return generation.load_model(name, device=device, dtype=dtype, compile=compiled)


def requests(model: LoadedModel) -> Sequence[Request]:
    """Return questions of different lengths."""
    said = "Tom has {} apples. He buys {} more. " + "He eats one. " * 2 + "How many has he now?"
    texts = [said.format(9**count, count) for count in range(1, BATCH + 1)]
    return [Request(text, tuple(model.encode(text)), NEW, seed=i) for i, text in enumerate(texts)]


def margin_at_difference(name: str, law: Generation, other: Generation) -> float:
    """Return the two largest probabilities' difference where two texts first differ, on the CPU."""
    pairs = zip(law.ids, law.born, other.ids, other.born, strict=False)
    apart = [i for i, (a, b, c, d) in enumerate(pairs) if (a, b) != (c, d)]
    if not apart:  # one text is the beginning of the other
        return 1.0
    first = min(apart, key=lambda i: min(law.born[i], other.born[i]))
    model, decoder = embedded(DECODERS[name], CPU, "float32", "none"), generation.decoder(name)
    (request,) = [one for one in requests(model) if one.id == law.request_id]
    watched: Any = MarginRecorder(model.denoiser)
    decoder.generate(watched, decoder.prepare(watched, request))
    forward, position = min(law.born[first], other.born[first]), len(request.prompt_ids) + first
    return watched.found[forward].get(position, 1.0)


@dataclass
class MarginRecorder:
    """A model that records, in each forward, the margin of every position's best token."""

    _model: Any
    found: list[dict[int, float]] = field(default_factory=list)

    picks_rows = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, tokens_KL: Tensor, plan: ForwardPlan, kv: KVCache) -> Tensor:
        """Return the model's logits."""
        logits_KRV: Tensor = self._model.forward(tokens_KL, plan, kv)
        margins_R = margin(logits_KRV).amin(0).tolist()
        self.found.append(dict(zip(range(*plan.rows), margins_R, strict=False)))
        return logits_KRV
