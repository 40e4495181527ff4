"""Copy between host and device: to the device without waiting, back in one wait for all tensors.

Also operations on tensors in which Python numbers would mean such a copy, and on the fields of a
dataclass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, compress, islice
from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device) -> Tensor:
    """Return a tensor, or a nested list of numbers, on a device.

    For a CUDA device the copy starts from pinned memory. A copy from other memory would make the
    host wait until the device has finished all its work.
    """
    host = torch.as_tensor(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=256)
def constant(values: int | tuple[int, ...] | range, device: torch.device) -> Tensor:
    """Return integers on a device, int64: one tensor for all callers, which nobody writes."""
    if isinstance(values, range):
        return torch.arange(values.start, values.stop, values.step, device=device)
    return to_device(values, device)


def selected(owner: object, names: Iterable[str], index: Tensor) -> dict[str, Any]:
    """Return the rows `index` (int64) of the tensors in these fields, without those that are
    None."""
    known = {name: getattr(owner, name) for name in names}
    return {name: v.index_select(0, index) for name, v in known.items() if v is not None}


@lru_cache
def _lowest(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), -torch.inf, dtype=dtype, device=device)


def only(values: Tensor, where: Tensor) -> Tensor:
    """Return the values where `where` is true and -inf elsewhere, in one launch."""
    return torch.where(where, values, _lowest(values.dtype, values.device))


def to_host(values: Sequence[Tensor]) -> list[list[Any]]:
    """Return the values of each tensor (X,), in one copy for all."""
    if len(values) == 1:
        return [values[0].tolist()]
    joined = iter(torch.cat(list(values)).tolist())
    return [list(islice(joined, len(one))) for one in values]


def true_indices(masks: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the ascending indices, int64 on `device`, at which each of the masks (X,) is true.

    Masks on the host cost no wait; masks on a device cost one wait for all.
    """
    found = [[*compress(range(len(flags)), flags)] for flags in to_host(masks)]
    indices_X = to_device(torch.tensor([*chain(*found)], dtype=torch.long), device)
    return [*indices_X.split([len(indices) for indices in found])]
