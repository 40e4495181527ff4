"""One pass over the logits says what a definition in float64 says, row for row.

Rows are long enough to be read in several chunks, with ties and tokens at -inf.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.errors import FALLBACKS
from dllm_bench.decoding import fused, numerics
from dllm_bench.decoding.numerics import argmax, dtype_of, margin, neg_entropy, read_logits

LENGTHS = (7, 552, 2**12, 4613, 2**17 + 1)


def logits_of(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(2, 3, V), some tokens out of the question."""
    logits_KWV = 4 * torch.randn(2, 3, length, generator=torch.Generator().manual_seed(length))
    logits_KWV[..., 3] = -torch.inf
    return logits_KWV.to(dtype)


@pytest.mark.parametrize("length", LENGTHS)
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


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_asked_about_have_their_own_probability(length: int) -> None:
    logits_KWV, ids_KW = logits_of(length, torch.bfloat16), torch.arange(6).view(2, 3)
    expected_KW = logits_KWV.double().softmax(-1).gather(-1, ids_KW[..., None])[..., 0]
    seen = read_logits(logits_KWV, "float64", ids_KW=ids_KW)
    assert seen.ids_KW.equal(ids_KW)
    assert torch.allclose(seen.probability_KW, expected_KW, rtol=1e-12, atol=0)
    assert float(seen.probability_KW[1, 0]) == 0.0  # the token at -inf


@pytest.mark.parametrize("length", LENGTHS)
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
