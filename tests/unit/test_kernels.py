"""Rows of logits: the kernels that read them and torch's passes say what a definition in float64
says; and the kernels of the layers compute what torch's passes compute.

Triton's interpreter runs them on the CPU, in a process of its own, because Triton decides when it
is imported whether it interprets. Another process compiles them for a CUDA device, which finds what
the interpreter lets pass; on a CUDA device they run as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dllm_bench.core.errors import FALLBACKS
from dllm_bench.decoding import fused, numerics
from dllm_bench.decoding.fused import DTYPES, SPAN
from dllm_bench.decoding.numerics import argmax, dtype_of, margin, neg_entropy, read_logits
from dllm_bench.models.layer_ops import compare_kernels
from tests.tiers import covering, covering_pairs

NO_TRITON = "Triton is not installed (extra: kernels)"
NO_DEVICE = not torch.cuda.is_available() or find_spec("triton") is None
ROOT = Path(__file__).resolve().parents[2]
LONG = 2 * SPAN + 77
Run = Callable[..., Any]  # a function of `fused` by its name, a case by its name, other arguments

pytestmark = pytest.mark.xdist_group("fused")  # one interpreter serves all of this file


def drawn(rows: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(N, V), a token of each row out of the question."""
    logits_NV = 4 * torch.randn(rows, length, generator=torch.Generator().manual_seed(length))
    logits_NV[:, 3] = -torch.inf
    return logits_NV.to(dtype)


def tied() -> Tensor:
    """Equal maxima within a part, in two parts, in the last token, and all tokens equal."""
    logits_NV = drawn(4, LONG)
    for row, ids in enumerate([(5, 6, 900), (SPAN - 1, SPAN), (SPAN + 9, LONG - 1)]):
        logits_NV[row, list(ids)] = 30.0
    logits_NV[3] = 1.5
    return logits_NV


def single(value: float) -> Tensor:
    """Return one token each, anywhere in the row; the others are out of the question."""
    logits_NV = torch.full((5, LONG), -torch.inf)
    logits_NV[range(5), [0, 1, SPAN - 1, SPAN, LONG - 1]] = value
    return logits_NV


def masked(dtype: torch.dtype) -> Tensor:
    """Return tokens at the dtype's least number, all of a part and all of a row among them."""
    logits_NV = drawn(3, LONG, dtype)
    logits_NV[:2, :SPAN] = torch.finfo(dtype).min
    logits_NV[1, -5:] = torch.finfo(dtype).min
    logits_NV[2] = torch.finfo(dtype).min
    return logits_NV


def growing(sign: int) -> Tensor:
    """Return logits whose maximum moves from part to part by more than float32's exp can hold."""
    return sign * torch.linspace(-500, 500, LONG).repeat(2, 1)


def hard(rows: int, length: int, dtype: torch.dtype, value: str = "-inf") -> Tensor:
    """(N, V) of every other row and all but the first and last tokens of a wider tensor; ties in
    every other row, one token of each at `value`.
    """
    numbers = torch.Generator().manual_seed(rows * length)
    wide = 4 * torch.randn(2 * rows, length + 2, generator=numbers)
    wide[::4] = wide[::4].round()
    wide[:, 1 + length // 2] = float(value)
    return wide.to(dtype)[::2, 1:-1]


def nan(*places: int) -> Tensor:
    """Return rows with a NaN at one place each."""
    rows = range(len(places))
    return drawn(len(places), LONG).index_put_((torch.tensor(rows), torch.tensor(places)), NAN)


NAN = torch.tensor(torch.nan)
Cases = dict[str, Callable[[], Tensor]]
LENGTHS = (8, 1001, SPAN - 1, SPAN, SPAN + 1, 3 * SPAN + 5)
HARD = {
    f"{rows} hard of {length}-{str(dtype)[6:]} with {value}": partial(
        hard, rows, length, dtype, value
    )
    for length, dtype, value, rows in covering_pairs(
        (5, 618, 8193, 152_064),
        DTYPES[:2],
        ("-inf", "nan"),
        (1, 7, 40),
        fits=lambda pair: not {40, 152_064} <= {*pair.values()},
    )
}
DRAWN = {
    f"{length}-{str(dtype)[6:]}": partial(drawn, 2, length, dtype)
    for length, dtype in product(LENGTHS, DTYPES)
}
CASES: Cases = {
    **DRAWN,
    **{name: make for name, make in HARD.items() if "nan" not in name},
    **{f"masked-{str(dtype)[6:]}": partial(masked, dtype) for dtype in DTYPES},
    "two rows": lambda: drawn(2, LONG),
    "first of two rows": lambda: drawn(2, LONG)[:1],
    "tied": tied,
    "single": lambda: single(2.5),
    "single low": lambda: single(-1e30),
    "rising": lambda: growing(1),
    "falling": lambda: growing(-1),
    "one row thrice": lambda: drawn(1, 700).expand(3, -1),
    "columns": lambda: drawn(3, 700).T.contiguous().T,
}
NANS: Cases = {
    "nan": lambda: nan(7, SPAN + 7),
    "nan alone": lambda: torch.full((1, LONG), torch.nan),
    **{name: make for name, make in HARD.items() if "nan" in name},
}
TO_ROUND = ("1001-float32", f"{SPAN + 1}-bfloat16", "tied", "single")
SHARES = (1e-6, 0.3, 0.95, 0.9999)  # of probability, that are kept
LENGTH = SPAN + 77  # two parts
CUTS: Cases = {
    **{f"cut-{str(to)[6:]}": partial(drawn, 2, LENGTH, to) for to in DTYPES[:3]},
    **{
        f"cut hard of {length}-{str(to)[6:]}": partial(hard, 2, length, to)
        for length, to in product((5, 618), DTYPES[:2])
    },
    "cut alone": lambda: drawn(2, LENGTH)[:1],
    "cut ties": lambda: drawn(1, LENGTH).round(),
    "cut equals": lambda: torch.full((1, LENGTH), -1.5, dtype=torch.bfloat16),
    "cut zeros": lambda: torch.tensor([0.0, -0.0, -9.0, -torch.inf]).repeat(1, 400),
    "cut peaked": lambda: drawn(1, LENGTH) * 30,
    "cut single": lambda: torch.full((1, LENGTH), -torch.inf).index_fill_(1, torch.tensor(9), 2.5),
    "cut apart": lambda: drawn(4, LENGTH)[::2, 1::3],
}
NOTHING: Cases = {"nothing": lambda: torch.full((2, LONG), -torch.inf)}
ALL: Cases = {**CASES, **NANS, **NOTHING, **CUTS}

COMPILE = """
import torch
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
))
seen = set()
def watch(*kernels):
    for kernel in kernels:
        def compiled(*args, run=kernel.run, **options):
            built = run(*args, **{**options, "warmup": True})  # compiles, starts nothing
            if built.hash not in seen and built.asm["cubin"]:
                print(built.metadata.name)
            seen.add(built.hash)
        kernel.run = compiled
"""
STATISTICS = """
from dllm_bench.decoding import kernels
from dllm_bench.decoding.fused import keep_top_p, neg_entropy, row_statistics
watch(kernels.of_parts, kernels.of_rows, kernels.entropy_of_parts)
watch(kernels.mass_of_parts, kernels.equals_of_parts, kernels.cut_parts)
row_statistics(torch.zeros(2, 152_064, dtype=torch.bfloat16), True)
row_statistics(torch.zeros(2, 1001), False, torch.float64)
sums_R = torch.ones(2)
neg_entropy(torch.zeros(2, 152_064, dtype=torch.bfloat16), sums_R, sums_R, torch.bfloat16, 1e-10)
keep_top_p(torch.zeros(2, 152_064), 0.95)
keep_top_p(torch.zeros(2, 152_064, dtype=torch.bfloat16), 0.95)
"""


def called(name: str, case: str, *args: Any, device: str = "cpu") -> Any:
    """Return what a function of `fused` finds of a case, whose rows lie on the device as they do in
    its memory, with whatever lies between them."""
    rows_NV = ALL[case]()
    memory = torch.empty(0, dtype=rows_NV.dtype).set_(rows_NV.untyped_storage()).to(device)
    logits_NV = memory.as_strided(rows_NV.size(), rows_NV.stride(), rows_NV.storage_offset())
    if name == "neg_entropy":
        best_N, _, sum_N, _ = fused.row_statistics(logits_NV, False, args[0])
        args = (best_N, sum_N, *args)
    return tree_map_only(Tensor, Tensor.cpu, getattr(fused, name)(logits_NV, *args))


def child(code: str, *args: Path, **environment: str) -> str:
    """Return what a Python process of its own prints."""
    if find_spec("triton") is None:
        pytest.skip(NO_TRITON)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """Return a process in which Triton will interpret."""
    if find_spec("triton") is None:
        pytest.skip(NO_TRITON)
    with ProcessPoolExecutor(1, get_context("spawn"), interpret) as process:
        yield process


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Run:
    """Calls a function of `fused` for a case, by the interpreter or on a device."""
    if request.param == "interpreter":
        process = request.getfixturevalue("interpreter")
        return lambda *key: process.submit(called, *key).result()
    if NO_DEVICE:
        pytest.skip("needs a CUDA device and Triton")
    return partial(called, device="cuda")


def test_the_comparison_before_a_run_lets_them_pass(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(fused.works, torch.float32, device="cpu").result()


@pytest.mark.parametrize("name", CASES)
def test_one_read_is_the_definition(run: Run, name: str) -> None:
    logits_NV = CASES[name]().double()
    best_N, index_N, sum_N, entropy_N = run("row_statistics", name, True)
    wide = torch.promote_types(CASES[name]().dtype, torch.float32)
    assert best_N.dtype == sum_N.dtype == wide and index_N.dtype == torch.int64
    assert best_N.double().equal(logits_NV.amax(-1))
    ids_NV = torch.arange(logits_NV.shape[1]).where(logits_NV == best_N[:, None], torch.inf)
    assert index_N.equal(ids_NV.amin(-1).long())
    assert sum_N.double().allclose((logits_NV - best_N[:, None]).exp().sum(-1), rtol=2e-6, atol=0)
    law_N = -torch.special.entr(logits_NV.softmax(-1)).sum(-1)
    assert entropy_N is not None and entropy_N.double().allclose(law_N, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("name", TO_ROUND)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_rounded_first(run: Run, name: str, dtype: torch.dtype) -> None:
    logits_NV = CASES[name]().to(dtype).double()
    best_N, _, sum_N, _ = run("row_statistics", name, True, dtype)
    assert best_N.dtype == sum_N.dtype == torch.promote_types(dtype, torch.float32)
    assert best_N.double().equal(logits_NV.amax(-1))
    law_N = (logits_NV - logits_NV.amax(-1, keepdim=True)).exp().sum(-1)
    assert sum_N.double().allclose(law_N, rtol=1e-14 if dtype == torch.float64 else 2e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "dtype", "eps"), covering_pairs(TO_ROUND, DTYPES, (0.0, 1e-10, 0.5))
)
def test_the_published_entropy_is_rounded_at_every_step(run, name, dtype, eps) -> None:
    """The sum alone is taken in another order, so that its last digit may differ."""
    law_N = neg_entropy(CASES[name]().to(dtype), "model", eps)
    entropy_N = run("neg_entropy", name, dtype, eps)
    assert entropy_N.dtype == dtype
    if dtype == torch.float16 and 0 < eps < 1e-8:
        return  # the published form is nan: 0 ln 0, since eps is rounded to 0
    digit = max(torch.finfo(dtype).eps, 1e-6) if dtype != torch.float64 else 1e-13
    assert entropy_N.allclose(law_N, rtol=digit, atol=digit)


TURNS = enumerate(CUTS)
SEARCHES = [(name, SHARES[(i + turn) % 4]) for i, name in TURNS for turn in range(4)]


@pytest.mark.parametrize(("name", "share"), covering(4, SEARCHES, often=4))
def test_a_search_keeps_what_a_sort_keeps(run: Run, name: str, share: float) -> None:
    """The first tokens of a stable sort, up to the one that takes their sum above the share."""
    logits_NV, kept_NV = CUTS[name](), run("keep_top_p", name, share)
    stays_NV = kept_NV > -torch.inf
    assert kept_NV.dtype == logits_NV.dtype
    assert kept_NV.equal(logits_NV.masked_fill(~stays_NV, -torch.inf))
    order_NV = logits_NV.sort(descending=True, stable=True).indices
    first_NV = stays_NV.gather(-1, order_NV)
    assert first_NV.equal(first_NV.cummin(-1).values), "a token stays and a better one does not"
    mass_NV = logits_NV.double().softmax(-1).gather(-1, order_NV)
    last_N1 = stays_NV.sum(-1, keepdim=True) - 1
    above_N1 = (mass_NV.cumsum(-1) - mass_NV).gather(-1, last_N1)
    assert (above_N1 <= share + 1e-6).all()
    assert (above_N1 + mass_NV.gather(-1, last_N1) >= share - 1e-6).all()


def test_without_entropy_the_rest_is_the_same(run: Run) -> None:
    *plain, nothing = run("row_statistics", "tied", False)
    *asked, entropy_N = run("row_statistics", "tied", True)
    assert nothing is None and entropy_N is not None
    assert all(a.equal(b) for a, b in zip(plain, asked, strict=True))


def test_a_row_alone_has_the_same_bits(run: Run) -> None:
    first, alone = (run("row_statistics", name, True) for name in ("two rows", "first of two rows"))
    for both_N, one_N in zip(first, alone, strict=True):
        assert both_N is not None and one_N is not None and both_N[:1].equal(one_N)
    two_NV, one_NV = (run("keep_top_p", name, 0.95) for name in ("cut-float32", "cut alone"))
    assert two_NV[:1].equal(one_NV)


@pytest.mark.parametrize("name", NANS)
def test_a_nan_stays_a_nan(run: Run, name: str) -> None:
    _, index_N, sum_N, _ = run("row_statistics", name, True)
    assert sum_N.isnan().all() and ((index_N >= 0) & (index_N < NANS[name]().shape[1])).all()


def test_a_row_without_a_token_has_no_mass(run: Run) -> None:
    best_N, index_N, sum_N, entropy_N = run("row_statistics", "nothing", True)
    assert best_N.tolist() == [-torch.inf] * 2
    assert entropy_N is not None and bool(entropy_N.isnan().all())
    assert index_N.tolist() == sum_N.tolist() == [0, 0]


@pytest.mark.exhaustive
def test_the_kernels_compile_for_a_device(tmp_path: Path) -> None:
    built = child(COMPILE + STATISTICS, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    rows, cut = "of_parts of_rows", "mass_of_parts equals_of_parts cut_parts"
    assert built.split() == f"{rows} {rows} entropy_of_parts {rows} {cut} of_parts {cut}".split()


# --- kernels of the layers ------------------------------------------------------------------------

INTERPRET = """
from dataclasses import replace
import torch
from dllm_bench.models import attention, layer_ops, layers
from tests.helpers import tiny_denoiser
from tests.unit.models.test_layers import PREFIX, TOKENS, WINDOW, cached
compare_windows = layer_ops._compare_windows
for dtype in layer_ops.DTYPES:
    if dtype != torch.float32:  # the interpreter multiplies no bfloat16, and is slow
        layer_ops._compare_windows = lambda *given: None
    layer_ops.compare_kernels("cpu", dtype)
    layer_ops._compare_windows = compare_windows
attention.WORTH_MASKED = 0
layer_ops.has_kernels = layers.has_kernels = attention.has_kernels = lambda *given: True
model = tiny_denoiser("qwen3", seed=4)
plan, sides = replace(WINDOW, store=(PREFIX, PREFIX + 4), feature_layers=(-1, 0, 1)), []
for side in (layers.own_layers(model.module, True), layers.module_layers(model.module)):
    model.layers = side
    kv = cached(model, TOKENS[:2])
    logits = model.forward(TOKENS[:2], plan, kv)
    kv.keep(plan, torch.tensor(1))
    sides.append([logits, kv.features, *(part[:, :, : kv.length] for part in kv._buffers())])
torch.testing.assert_close(*sides, atol=5e-5, rtol=1e-5)
print("equal")
"""

LAYERS = """
from itertools import product
from dllm_bench.models import kernels, layer_ops
ROWS = (1, 3, 16, 48)
watch(kernels.swiglu, kernels.rotate, kernels.join, kernels.attend_parts, kernels.join_parts)
zeros = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)
layer_ops.swiglu_kernel(zeros(2, 2 * 18944))
for weight, rows in product((None, zeros(32, 128)), ROWS):
    slots = (zeros(1, 4, 60, 128), zeros(1, 4, 60, 128))
    angles = (zeros(1, rows, 128),) * 2
    layer_ops.rotate_kernel(zeros(1, rows, 36, 128), angles, slots, weight, 1e-6)
for rows in ROWS:
    mass = torch.zeros(1, 28, 3 * rows), torch.zeros(3, 28, rows)
    old, own = zeros(1, 3 * rows, 28, 128), zeros(3, rows, 28, 128)
    layer_ops.join_kernel(old, mass[0], own, mass[1])
own, cached = ((zeros(k, 4, n, 128),) * 2 for k, n in ((8, 32), (1, 1280)))
masks = zeros(8, 1, 32, 32), zeros(1280)
layer_ops.windows_kernel(zeros(8, 28, 32, 128), (*own, masks[0]), (*cached, masks[1]))
"""


@pytest.mark.exhaustive
def test_the_kernels_are_torchs_passes() -> None:
    assert child(INTERPRET, TRITON_INTERPRET="1").split() == ["equal"]


@pytest.mark.exhaustive
def test_the_kernels_compile_once_for_any_number_of_rows(tmp_path: Path) -> None:
    """So that the length of a prompt compiles nothing within a timed request."""
    built = child(COMPILE + LAYERS, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert built.split() == "swiglu rotate rotate join attend_parts join_parts".split()


@pytest.mark.gpu
@pytest.mark.skipif(NO_DEVICE, reason="needs a CUDA device and Triton")
def test_the_kernels_agree_on_a_device() -> None:
    compare_kernels("cuda", torch.float32)


# --- torch's passes, and the choice between them and the kernels ----------------------------------

SIZES = (7, 552, 2**12, 4613, 2**17 + 1)  # long ones are read in several chunks


def logits_of(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(2, 3, V) of `drawn`."""
    return drawn(6, length, dtype).view(2, 3, length)


@pytest.mark.parametrize("length", SIZES)
@pytest.mark.parametrize(("raised", "kept"), [(0, None), (40, None), (0, 5), (0, 1)])
def test_the_pass_is_the_definition(length: int, raised: int, kept: int | None) -> None:
    """exp(max - logsumexp) would lose digits below the last one of a logit: 4e-6 at 40. Tokens that
    were cut have no part: they lie at -inf, where no exponential is taken."""
    logits_KWV = logits_of(length) + raised
    if kept is not None:
        logits_KWV[..., kept:] = -torch.inf
    law_KWV = logits_KWV.double().softmax(-1)
    two_KW2, seen = law_KWV.topk(2).values, read_logits(logits_KWV, entropy=True)
    assert seen.ids_KW.equal(law_KWV.argmax(-1))
    for probability_KW in (seen.probability_KW, read_logits(logits_KWV).probability_KW):
        assert torch.allclose(probability_KW.double(), two_KW2[..., 0], rtol=5e-7, atol=0)
        assert kept != 1 or bool((probability_KW == 1).all())
    apart_KW = two_KW2[..., 0] - two_KW2[..., 1]
    assert torch.allclose(margin(logits_KWV).double(), apart_KW, rtol=5e-7, atol=1e-7)
    entropy_KW = torch.special.entr(law_KWV).sum(-1)
    assert seen.neg_entropy_KW is not None
    assert torch.allclose(-seen.neg_entropy_KW.double(), entropy_KW, rtol=2e-6, atol=1e-6)
    assert kept != 1 or not seen.neg_entropy_KW.any()


@pytest.mark.parametrize("length", SIZES)
def test_tokens_asked_about_have_their_own_probability(length: int) -> None:
    logits_KWV, ids_KW = logits_of(length, torch.bfloat16), torch.arange(6).view(2, 3)
    expected_KW = logits_KWV.double().softmax(-1).gather(-1, ids_KW[..., None])[..., 0]
    seen = read_logits(logits_KWV, "float64", ids_KW=ids_KW)
    assert seen.ids_KW.equal(ids_KW)
    assert torch.allclose(seen.probability_KW, expected_KW, rtol=1e-12, atol=0)
    assert float(seen.probability_KW[1, 0]) == 0.0  # the token at -inf


@pytest.mark.parametrize("length", SIZES)
def test_of_equal_tokens_the_first_is_taken(length: int) -> None:
    values_NV = torch.zeros(3, length)
    values_NV[0, [length // 2, length - 1]] = 1.0
    values_NV[1, -1] = 1.0
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert argmax(values_NV.to(dtype)).tolist() == [length // 2, length - 1, 0]


def test_the_size_of_a_chunk_changes_nothing() -> None:
    """Many rows are read in several portions, a single one in one."""
    rows = 2 * numerics.CACHED // 4613
    logits_1RV = 4 * torch.randn(1, rows, 4613, generator=torch.Generator().manual_seed(0))
    together = read_logits(logits_1RV, entropy=True)
    apart = [read_logits(logits_1RV[:, [row]], entropy=True) for row in range(rows)]
    for name in ("ids_KW", "probability_KW", "neg_entropy_KW"):
        assert getattr(together, name).equal(torch.cat([getattr(one, name) for one in apart], 1))


@pytest.mark.parametrize(("precision", "eps"), [("model", 0.0), ("model", 1e-10), ("float32", 0.1)])
@pytest.mark.parametrize("length", [50, numerics.CACHED // 2])  # two rows at a time
def test_a_rounded_entropy_is_the_published_one_to_the_bit(precision, eps, length) -> None:
    logits_KWV = logits_of(length, torch.bfloat16)
    found_KW = read_logits(logits_KWV, precision, entropy=True, eps=eps).neg_entropy_KW
    assert found_KW is not None and found_KW.equal(neg_entropy(logits_KWV, precision, eps))
    assert found_KW.dtype == dtype_of(logits_KWV, precision)


def on_device(dtype: torch.dtype) -> Any:
    return SimpleNamespace(is_cuda=True, dtype=dtype, device="cuda")


def test_it_takes_floats_that_lie_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "works", lambda *dtypes: True)
    assert all(fused.available(on_device(dtype)) for dtype in fused.DTYPES)
    assert not fused.available(torch.zeros(2, 8)) and not fused.available(on_device(torch.int64))


def test_without_triton_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    fused.works.cache_clear()
    with pytest.warns(UserWarning, match="several passes") as warned:
        assert not any(fused.available(on_device(torch.float32)) for _ in range(2))
    assert len(warned) == 1
    fused.works.cache_clear()


def statistics(logits_NV: Tensor, entropy: bool, to: torch.dtype, more: int = 0) -> Any:
    best_N, index_N, sum_N, entropy_N = numerics.statistics(logits_NV, to, entropy)
    return best_N, index_N + more, sum_N, entropy_N


def entropy_of(logits_NV: Tensor, best_N: Any, sum_N: Any, to: torch.dtype, eps: float) -> Tensor:
    return neg_entropy(logits_NV.to(to), "model", eps)


WRONG: dict[str, Any] = {
    "row_statistics": partial(statistics, more=1),
    "neg_entropy": lambda *args: entropy_of(*args) + 1,
    "keep_top_p": lambda logits_NV, top_p: logits_NV,
}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Right ones in place of the kernels, which are tried anew."""
    for name, right in zip(WRONG, (statistics, entropy_of, numerics.keep_top_p), strict=True):
        monkeypatch.setattr(fused, name, right)
    fused.works.cache_clear()
    yield
    fused.works.cache_clear()


PAIRS = list(product(fused.DTYPES, (None, *fused.DTYPES)))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_kernels_are_tried_in_the_dtypes_of_a_run(monkeypatch, pair) -> None:
    """A variant that does not compile is found when its dtypes are first asked for."""
    assert fused.works(*pair, "cpu")
    fused.works.cache_clear()
    chosen = (pair[0], pair[1] or pair[0])

    def of_one(logits_NV: Tensor, entropy: bool, to: torch.dtype) -> Any:
        if (logits_NV.dtype, to) == chosen:
            raise RuntimeError("no such variant")
        return statistics(logits_NV, entropy, to)

    monkeypatch.setattr(fused, "row_statistics", of_one)
    others = [other for other in PAIRS if (other[0], other[1] or other[0]) != chosen]
    assert fused.works(*others[0], "cpu")
    with pytest.warns(UserWarning, match=r"several passes.*no such variant"):
        assert not fused.works(*pair, "cpu")
    assert any("no such variant" in fallback for fallback in FALLBACKS)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("share", [1, 1.0, 1 - 1e-9])
def test_a_share_of_one_drops_no_token(share: float, ties: bool) -> None:
    """Though rounded probabilities reach 1 before the last token."""
    logits_1WV = 8 * torch.randn(1, 256, 618, generator=torch.Generator().manual_seed(0))
    sums_1WV = logits_1WV.sort(descending=True).values.softmax(-1).cumsum(-1)
    assert bool((sums_1WV[..., :400] > 1).any())
    assert numerics.keep_top_p(logits_1WV, share, ties).equal(logits_1WV)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", WRONG)
def test_kernels_that_find_something_else_are_not_used(monkeypatch, name) -> None:
    assert fused.works(torch.float32, device="cpu")
    fused.works.cache_clear()
    monkeypatch.setattr(fused, name, WRONG[name])
    with pytest.warns(UserWarning, match="several passes"):
        assert not fused.works(torch.float32, device="cpu")
