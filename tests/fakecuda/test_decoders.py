"""Every decoder on a device decodes what it decodes on the CPU, and waits for it once a round.

The device computes nothing (`device.py`), so a test finds tensors on two devices, dtypes that do
not fit, a host that waits and too many kernels; it finds no wrong number. `launches.yaml` holds how
many kernels a round may start beside the forward, and `passes.yaml` how often a request may read or
write as many numbers as there are logits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench import parallel
from dllm_bench.api.compose import compose
from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding import fused
from dllm_bench.decoding.canvas import CanvasDecoder
from dllm_bench.decoding.masked import LARGE, MaskedDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.common import Blocks, Threshold
from dllm_bench.models import attention, layer_ops
from dllm_bench.models.acceleration import FixedShapeDenoiser
from dllm_bench.models.canvas import CanvasDenoiser
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.parallel import BranchWorkerGroup
from dllm_bench.paths import options, read_yaml
from dllm_bench.registry import instantiate
from tests.canvas import FULL, tiny_canvas_model
from tests.fakecuda.device import HostReads, Watch, claimed_model, device, load_guard
from tests.helpers import VOCAB, tiny_denoiser
from tests.pieces import BLOCK, decoders, needs_unshifted
from tests.speculative import with_drafter
from tests.tiers import covering

FOLDER = Path(__file__).parent
BUDGETS, PASSES = (read_yaml(FOLDER / name) for name in ("launches.yaml", "passes.yaml"))
DRAFTERS = tempfile.TemporaryDirectory()  # removed at exit
DTYPES = ("float32", "bfloat16")
ROUNDED = ("lopa_dist", "eb_sampler")
"""Decoders whose entropies are rounded to the logits' own dtype."""
DEEP = ("d2f", "lopa", "lopa_dream", "d3llm", "sdar", "multi_bd", "multi_bd_edit")
"""Decoders with several open blocks, which need a second block to open."""
TWICE = ("eagle3", "dspark_threshold")
"""Decoders that wait twice a round: once for what was accepted, which the next draft continues, and
once for what of the draft is verified. Verifying whole drafts would need the first wait alone, and
feed the target positions that these decoders do not feed: their cost would be another one's."""
FEWER = {"diffusion_gemma": ["decoder.anneal.steps=12"]}  # of 48: a random canvas never settles
REPLAYED = ("lopa", "ar", "fast_dllm_dual", "dspark", "lopa_dream", "d2f", "sdar", "vanilla")
REPLAY = 17  # launches of a replayed forward: the graph, what it reads, head and norm
ON_CPU_ALONE = "decoding/numerics.py"  # has a question that is worth its answer on a CPU alone

pytestmark = pytest.mark.xdist_group("fakecuda")
exhaustive, drill = pytest.mark.exhaustive, pytest.mark.drill


@pytest.fixture(scope="module", autouse=True)
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The device is there."""
    load_guard(tmp_path_factory.mktemp("guard"))


@cache
def named(name: str) -> Any:
    if name in decoders():
        return decoders()[name]
    composed = compose([f"decoder={name}", *FEWER.get(name, ())])["decoder"]
    plain = with_drafter(composed, Path(DRAFTERS.name) / name)
    return instantiate({k: v for k, v in plain.items() if k != "name"}, "decoder")


def made_of(kind: Any, plain: Any, dtype: str = "") -> Any:
    """Return the same model as a denoiser of another kind, or in another dtype."""
    module = plain.module.to(getattr(torch, dtype)) if dtype else plain.module
    return kind(module, plain.special, plain.shifted, attention_form=plain.attention_form)


@cache
def model(layout: str, dtype: str) -> TransformerDenoiser:
    """Return a random model, of one layer unless drafters read its layers."""
    changes = {} if layout == "qwen3" else {"n_layers": 1, "num_hidden_layers": 1}
    return made_of(TransformerDenoiser, tiny_denoiser(layout, 1, **changes), dtype)


def model_for(decoder: Any, dtype: str) -> TransformerDenoiser:
    """Return a model that the decoder fits."""
    if isinstance(decoder, CanvasDecoder):
        made = tiny_canvas_model(6 + DTYPES.index(dtype), canvas=BLOCK, layers=(FULL,))
        made.module.config._experts_implementation = "batched_mm"  # the default looks at the device
        return made_of(CanvasDenoiser, made, dtype)
    if not isinstance(decoder, MaskedDecoder):
        return model("qwen3", dtype)
    return model("llada" if needs_unshifted(decoder) else "dream", dtype)


def requests(count: int, new: int) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, VOCAB - 6, (9 + i,), generator=generator) for i in range(count)]
    return [Request(f"r{i}", (*ids.tolist(),), new, seed=i) for i, ids in enumerate(prompts)]


@dataclass(frozen=True)
class Case:
    name: str
    dtype: str
    batch: int = 1
    new: int = BLOCK

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}-{self.batch}"


def decoded(
    decoder: Any, dtype: str, batch: int, new: int, generate: Any = None, kind: Any = None
) -> Watch:
    """Return what decoding on the device cost; its generations are those of the CPU.

    generate: decodes in another way, `generate(decoder, model, requests)`. kind: of denoiser.
    """
    real, watch, reads = model_for(decoder, dtype), Watch(), HostReads()
    real = real if kind is None else made_of(kind, real)
    fake = claimed_model(real)
    if isinstance(decoder, MaskedDecoder):  # rows are left out as with a large vocabulary
        real.vocab_size = fake.vocab_size = LARGE
    given = [decoder.prepare(real, request) for request in requests(batch, new)]
    generate = generate or (lambda by, model, all_: by.generate_stream(model, all_, batch))
    with reads.hooked():
        expected = facts(generate(decoder, real, given))
    fake = watch.watched(fake)
    with reads.hooked(watch), device(watch):
        assert facts(generate(decoder, fake, given)) == expected
    assert [key for key in reads.left() if not key.startswith(ON_CPU_ALONE)] == []
    return watch


def facts(generations: Any) -> list[Any]:
    found: list[Generation] = sorted(generations, key=lambda one: one.request_id)
    return [(one.request_id, one.ids, one.born, one.cut) for one in found]


def check_waits(watch: Watch, most: int = 1) -> None:
    """Between two forwards the host waits once."""
    rounds = watch.waits[1:-1]
    assert rounds, "one forward is no round"
    assert all(len(waits) <= most for waits in rounds), f"the host waits for {max(rounds, key=len)}"
    assert any(rounds), "no round copies to the host"


GENERATING = [name for name in options("decoder") if not name.startswith("likelihood")]
ONE = [Case(name, "float32", new=2 * BLOCK if name in DEEP else BLOCK) for name in GENERATING]
OFTEN = {("fast_dllm_dual", "bfloat16", 3), ("dspark", "bfloat16", 3)}
OFTEN |= {(name, "bfloat16", 1) for name in ROUNDED}
PRODUCT = [*product(GENERATING, ("float32",), (3,)), *product(GENERATING, ("bfloat16",), (1, 3))]
CASES = [pytest.param(one, marks=exhaustive) for one in ONE]
CASES += [
    pytest.param(Case(*of, 2 * BLOCK), marks=exhaustive if of in OFTEN else drill) for of in PRODUCT
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_decoder_waits_once_a_round_and_keeps_its_launches(case: Case) -> None:
    """A batch waits once a round for all; a rounded entropy takes two reads."""
    watch = decoded(named(case.name), case.dtype, case.batch, case.new)
    check_waits(watch, 2 if case.name in TWICE else 1)
    if case.batch > 1:
        return
    assert watch.passes <= PASSES.get(case.name, PASSES["other"]), watch.wide.most_common(20)
    if case.dtype == "float32":
        launches = watch.launches["round"] / watch.forwards
        assert launches <= BUDGETS.get(case.name, BUDGETS["other"]), watch.sites.most_common(20)


@exhaustive
def test_workers_that_share_branches_wait_for_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two; the other one sends zeros."""
    of_two = {"get_rank": lambda group: 0, "get_world_size": lambda group: 2}
    sent: list[list[int]] = []

    def all_reduce(values: torch.Tensor, group: object) -> None:
        sent[-1].append(values.nbytes)

    monkeypatch.setattr(parallel, "dist", SimpleNamespace(**of_two, all_reduce=all_reduce))

    def generate(decoder: Any, model: Any, given: Any) -> list[Generation]:
        sent.append([])
        workers = BranchWorkerGroup(Any, commits=True)
        return [decoder.generate(model, request, workers) for request in given]

    check_waits(decoded(named("lopa_dist"), "bfloat16", 1, 2 * BLOCK, generate))
    assert sent[1] and sent[0] == sent[1]


@pytest.mark.parametrize("name", covering(4, REPLAYED))
def test_a_recorded_forward_is_replayed_by_few_launches(name: str) -> None:
    watch = decoded(named(name), "bfloat16", 1, 2 * BLOCK, kind=FixedShapeDenoiser)
    check_waits(watch, 2 if name in TWICE else 1)
    assert min(watch.each) <= REPLAY


def test_all_graphs_of_a_run_are_recorded_by_its_first_forward() -> None:
    """LoPA with seven branches beside the base, over a window of 64: 512 rows."""
    seen: list[Generation] = []

    def generate(decoder: Any, model: Any, given: Any) -> list[Generation]:
        model.expect_canvas(9 + 64, decoder.summary().branches)
        seen[:] = [decoder.generate(model, request) for request in given * 2]
        return seen[:1]

    lopa = replace(named("lopa"), explore=Lookahead(7), schedule=Blocks(64, sees_future=False))
    decoded(lopa, "bfloat16", 1, 64, generate, FixedShapeDenoiser)
    first, again = ([*one.trace.forwards] for one in seen)
    assert [forward.recorded for forward in first[1:]] == [True] + [False] * (len(first) - 2)
    assert not any(forward.recorded for forward in again)
    wide = [one.replayed for one in again[1:] if one.branches * one.fed == 512]
    assert all(wide) and len(wide) > len(again) / 2


def test_a_longer_store_has_graphs_when_those_of_the_shorter_one_are_gone() -> None:
    seen: list[Generation] = []

    def generate(decoder: Any, model: Any, given: Any) -> list[Generation]:
        longer = replace(given[0], prompt_ids=given[0].prompt_ids * 30)
        seen[:] = [decoder.generate(model, request) for request in (*given, longer)]
        return seen

    decoded(named("lopa"), "bfloat16", 1, BLOCK, generate, FixedShapeDenoiser)
    assert all(forward.replayed for one in seen for forward in one.trace.forwards[1:])


WITHOUT = {
    "kernels of logits": (fused, "works"),
    "kernels of layers": (layer_ops, "kernels_work"),
    "kernel of attention": (attention, "mass_kernel_works"),
    "graphs": (torch.cuda, "graph"),  # a TypeError: no RuntimeError, as those of Triton
}


@pytest.mark.parametrize("which", WITHOUT)
def test_a_device_without_a_kernel_or_graphs_takes_more_launches(monkeypatch, which) -> None:
    def generate(decoder: Any, model: Any, given: Any) -> Any:
        monkeypatch.setattr(*WITHOUT[which], lambda *form: False)  # after `device` has set it
        return decoder.generate_stream(model, given, 1)

    monkeypatch.setattr(*WITHOUT[which], lambda *form: False)
    kind = FixedShapeDenoiser if which == "graphs" else None
    watch = decoded(named("lopa"), "bfloat16", 1, 2 * BLOCK, generate, kind)
    usual = decoded(named("lopa"), "bfloat16", 1, 2 * BLOCK, kind=kind)
    assert watch.launches.total() > usual.launches.total()


PLANTED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "read": (lambda probability_KW: probability_KW.max().item(), "the host waits"),
    "chosen by list": (lambda probability_KW: probability_KW[:, [0, 1]], "the host waits"),
    "mixed": (lambda probability_KW: probability_KW + torch.zeros(1, 1), "same device"),
}


@exhaustive
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str) -> None:
    plant, message = PLANTED[fault]

    class Faulty(Threshold):
        def __call__(self, scores: Any, window: Any, state: Any) -> Tensor:
            plant(scores.probability_KW)
            return super().__call__(scores, window, state)

    decoder = named("fast_dllm")
    planted = replace(decoder, select=Faulty(decoder.select.tau))
    with pytest.raises((AssertionError, RuntimeError), match=message):
        check_waits(decoded(planted, "float32", 1, BLOCK))
