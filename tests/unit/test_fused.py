"""The kernel that reads every row of logits once says what the definition in float64 says.

Triton's interpreter runs it on the CPU, in a process of its own, because Triton decides when it is
imported whether it interprets. A second process compiles it for a CUDA device, which finds what the
interpreter lets pass; on a CUDA device it runs as well. What Triton costs there is not tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.decoding.fused import DTYPES, SPAN, row_statistics
from dllm_bench.decoding.numerics import read_logits

if find_spec("triton") is None:
    pytest.skip("Triton is not installed (extra: kernels)", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (8, 1001, SPAN - 1, SPAN, SPAN + 1, 3 * SPAN + 5, 152_064)
LONG = 2 * SPAN + 77
Read = tuple[Tensor, Tensor, Tensor, Tensor | None]

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
    """One token each, anywhere in the row; the others are out of the question."""
    logits_NV = torch.full((5, LONG), -torch.inf)
    logits_NV[range(5), [0, 1, SPAN - 1, SPAN, LONG - 1]] = value
    return logits_NV


def masked(dtype: torch.dtype) -> Tensor:
    """Tokens at the dtype's least number, all of a part and all of a row among them."""
    logits_NV = drawn(3, LONG, dtype)
    logits_NV[:2, :SPAN] = torch.finfo(dtype).min
    logits_NV[1, -5:] = torch.finfo(dtype).min
    logits_NV[2] = torch.finfo(dtype).min
    return logits_NV


def growing(sign: int) -> Tensor:
    """The maximum moves from part to part by more than float32's exp can hold."""
    return sign * torch.linspace(-500, 500, LONG).repeat(2, 1)


DRAWN: dict[str, Callable[[], Tensor]] = {
    f"{length}-{str(dtype)[6:]}": lambda length=length, dtype=dtype: drawn(2, length, dtype)
    for length, dtype in product(LENGTHS, DTYPES)
}
CASES: dict[str, Callable[[], Tensor]] = {
    **DRAWN,
    **{f"masked-{str(dtype)[6:]}": lambda dtype=dtype: masked(dtype) for dtype in DTYPES},
    "many rows": lambda: drawn(40, 40),
    "two rows": lambda: drawn(2, LONG),
    "first of two rows": lambda: drawn(2, LONG)[:1],
    "tied": tied,
    "single": lambda: single(2.5),
    "single low": lambda: single(-1e30),
    "rising": lambda: growing(1),
    "falling": lambda: growing(-1),
    "wider rows": lambda: drawn(4, 500)[:, 1:400],
    "every other row": lambda: drawn(6, LONG, torch.bfloat16)[::2],
    "one row thrice": lambda: drawn(1, 700).expand(3, -1),
    "every other token": lambda: drawn(3, 900)[:, ::2],
    "columns": lambda: drawn(3, 700).T.contiguous().T,
}
OTHERS: dict[str, Callable[[], Tensor]] = {  # what no softmax is defined for
    "nan": lambda: drawn(2, LONG).index_put_(
        (torch.tensor([0, 1]), torch.tensor([7, SPAN + 7])), torch.tensor(torch.nan)
    ),
    "nan alone": lambda: torch.full((1, LONG), torch.nan),
    "nothing": lambda: torch.full((2, LONG), -torch.inf),
}

INTERPRET = """
import sys, torch
import dllm_bench.decoding.numerics
from dllm_bench.decoding.fused import row_statistics, works
late = "triton" not in sys.modules
assert works("cpu")
asked = torch.load(sys.argv[1])
found = {key: row_statistics(logits, entropy=key[1]) for key, logits in asked.items()}
torch.save((late, found), sys.argv[2])
"""

COMPILE = """
import torch
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from dllm_bench.decoding import kernels
from dllm_bench.decoding.fused import row_statistics
driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
))
for kernel in (kernels.of_parts, kernels.of_rows):
    def compiled(*args, run=kernel.run, **options):
        built = run(*args, **{**options, "warmup": True})  # compiles, starts nothing
        print(built.metadata.name, len(built.asm["cubin"]) > 0)
    kernel.run = compiled
row_statistics(torch.zeros(2, 152_064, dtype=torch.bfloat16), True)
row_statistics(torch.zeros(2, 1001), False)
"""


def child(code: str, *args: Path, **environment: str) -> str:
    """What a Python process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, dict[Any, Read]]:
    """Whether Triton was imported late, and what was read of all cases."""
    folder = tmp_path_factory.mktemp("fused")
    asked = {(name, True): make() for name, make in {**CASES, **OTHERS}.items()}
    torch.save(asked | {("tied", False): tied()}, folder / "asked.pt")
    child(INTERPRET, folder / "asked.pt", folder / "found.pt", TRITON_INTERPRET="1")
    return torch.load(folder / "found.pt")


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def read(request: pytest.FixtureRequest) -> Callable[..., Read]:
    """The statistics of a case, by the interpreter or on a device."""
    if request.param == "interpreter":
        found = request.getfixturevalue("interpreted")[1]
        return lambda name, entropy=True: found[name, entropy]
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return lambda name, entropy=True: on_cuda({**CASES, **OTHERS}[name](), entropy)


def on_cuda(logits_NV: Tensor, entropy: bool) -> Read:
    """Rows copied to the device with whatever lies between them."""
    memory = torch.empty(0, dtype=logits_NV.dtype).set_(logits_NV.untyped_storage()).cuda()
    place = (logits_NV.size(), logits_NV.stride(), logits_NV.storage_offset())
    best_N, index_N, sum_N, weighted_N = row_statistics(memory.as_strided(*place), entropy)
    weighted_N = None if weighted_N is None else weighted_N.cpu()
    return best_N.cpu(), index_N.cpu(), sum_N.cpu(), weighted_N


@pytest.mark.parametrize("name", CASES)
def test_one_read_is_the_definition(read: Callable[..., Read], name: str) -> None:
    logits_NV = CASES[name]().double()
    best_N, index_N, sum_N, weighted_N = read(name)
    assert best_N.dtype == sum_N.dtype == torch.float32 and index_N.dtype == torch.int64
    assert best_N.double().equal(logits_NV.amax(-1))
    ids_NV = torch.arange(logits_NV.shape[1]).where(logits_NV == best_N[:, None], torch.inf)
    assert index_N.equal(ids_NV.amin(-1).long())
    below_NV = logits_NV - best_N[:, None]
    mass_NV = below_NV.exp()
    assert sum_N.double().allclose(mass_NV.sum(-1), rtol=2e-6, atol=0)
    law_N = (mass_NV * below_NV.clamp(min=-1e4)).sum(-1)  # finite: 0 where the mass is 0
    assert weighted_N is not None and weighted_N.double().allclose(law_N, rtol=2e-6, atol=0)


@pytest.mark.parametrize("name", DRAWN)
def test_one_read_says_what_torch_passes_say(read: Callable[..., Read], name: str) -> None:
    seen = read_logits(DRAWN[name](), "float32", entropy=True)
    best_N, index_N, sum_N, weighted_N = read(name)
    assert index_N.equal(seen.ids_KW)
    log_N = sum_N.log()
    probability_N = (best_N - (log_N + best_N)).exp()  # rounded at 16 to 32, by 2e-6 at most
    assert probability_N.allclose(seen.probability_KW, rtol=4e-6, atol=0)
    assert weighted_N is not None and seen.neg_entropy_KW is not None
    assert (weighted_N / sum_N - log_N).allclose(seen.neg_entropy_KW, rtol=2e-6, atol=1e-6)


def test_without_entropy_the_rest_is_the_same(read: Callable[..., Read]) -> None:
    *plain, nothing = read("tied", False)
    *asked, weighted_N = read("tied", True)
    assert nothing is None and weighted_N is not None
    assert all(a.equal(b) for a, b in zip(plain, asked, strict=True))


def test_a_row_alone_has_the_same_bits(read: Callable[..., Read]) -> None:
    first, alone = read("two rows"), read("first of two rows")
    for both_N, one_N in zip(first, alone, strict=True):
        assert both_N is not None and one_N is not None and both_N[:1].equal(one_N)


def test_a_nan_stays_a_nan(read: Callable[..., Read]) -> None:
    for name in ("nan", "nan alone"):
        _, index_N, sum_N, _ = read(name)
        assert bool(sum_N.isnan().all())
        assert bool((index_N >= 0).all()) and bool((index_N < LONG).all())


def test_a_row_without_a_token_has_no_mass(read: Callable[..., Read]) -> None:
    best_N, index_N, sum_N, weighted_N = read("nothing")
    assert best_N.tolist() == [-torch.inf] * 2
    assert weighted_N is not None
    assert index_N.tolist() == sum_N.tolist() == weighted_N.tolist() == [0, 0]


def test_triton_is_imported_when_logits_are_read(interpreted: tuple[bool, Any]) -> None:
    assert interpreted[0]


def test_the_kernels_compile_for_a_device(tmp_path: Path) -> None:
    built = child(COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert built.split() == ["of_parts", "True", "of_rows", "True"] * 2
