"""Read a GGUF file: the metadata and tensors of its header, and the values of one tensor at a time.

The file is not trusted: every count and length is checked before anything of that size is read or
built. Format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian. Importing
this module is cheap; the package `gguf` is needed once tensors are listed.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dllm_bench.core.errors import DllmBenchError

MAX_HEADER_BYTES = 128 * 2**20
"""Of metadata and list of tensors; the largest known tokenizers take some 12 MB."""
MAX_FIELDS, MAX_TENSORS, MAX_ELEMENTS = 4_096, 100_000, 2_000_000
"""Metadata fields and tensors of a file, and elements of all its arrays together."""
MAX_NAME_BYTES, MAX_DIMENSIONS, MAX_ALIGNMENT = 1_024, 4, 65_536
STRING, ARRAY = 8, 9
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Type of a metadata value -> its struct format."""
PLAIN_DTYPES = {"F32": "float32", "F16": "float16"}  # kept as they are; others become float32


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor is in a file."""

    shape: tuple[int, ...]
    """Outermost dimension first, as in torch."""
    kind: str
    """Name of its number format: F32, Q4_1, ..."""
    start: int
    """First byte, from the beginning of the file."""
    size: int
    """Bytes in the file."""


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    """Key -> number, text or list."""
    tensors: dict[str, GgufTensor]
    """Name -> place."""

    def get(self, key: str) -> Any:
        """Return a value of the metadata; DllmBenchError where there is none."""
        if key not in self.metadata:
            raise DllmBenchError(
                f"{self.path} has no {key!r} in its metadata; convert the model to GGUF again."
            )
        return self.metadata[key]

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number of the metadata above zero, or the default where there is none;
        DllmBenchError for anything else.
        """
        found = self.get(key) if default is None else self.metadata.get(key, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not found > 0:
            raise DllmBenchError(
                f"{self.path} has {key} {str(found)[:80]!r}, where a number above zero is needed; "
                "convert the model to GGUF again."
            )
        return found

    def texts(self, key: str) -> list[str]:
        """Return a list of texts of the metadata; DllmBenchError for anything else."""
        found = self.get(key)
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise DllmBenchError(
                f"{self.path} has a {key} that is no list of texts; convert the model to "
                "GGUF again."
            )
        return found

    def read(self, name: str) -> NDArray[np.floating[Any]]:
        """Return the values of a tensor: float16 and float32 as they are, all others as float32."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        stored = np.memmap(self.path, np.uint8, "r", tensor.start, (tensor.size,))
        if tensor.kind in PLAIN_DTYPES:
            return np.array(stored).view(PLAIN_DTYPES[tensor.kind]).reshape(tensor.shape)
        rows = np.array(stored).reshape(*tensor.shape[:-1], -1)
        try:
            values = dequantize(rows, GGMLQuantizationType[tensor.kind])
        except NotImplementedError:
            raise DllmBenchError(
                f"{self.path} stores {name} as {tensor.kind}, which the package gguf cannot turn "
                "into numbers; use a file of another quantisation."
            ) from None
        return np.asarray(values, np.float32).reshape(tensor.shape)


def read_gguf(path: Path) -> GgufFile:
    """Read the header; DllmBenchError for a file that is cut short, damaged or of another kind."""
    if not path.is_file():
        raise DllmBenchError(f"{path} is to be read as GGUF and is no file; name a .gguf file.")
    total = path.stat().st_size
    with path.open("rb") as file, _mapped(file.fileno(), total) as data:
        return _Header(path, data, total).read()


@contextmanager
def _mapped(descriptor: int, total: int) -> Iterator[Any]:
    if total == 0:
        yield b""
        return
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
        yield data


class _Header:
    """Reads a header from front to back."""

    def __init__(self, path: Path, data: Any, total: int) -> None:
        self.path, self.data, self.total = path, data, total
        self.end = min(total, MAX_HEADER_BYTES)
        self.at = 0
        self.elements = 0

    def read(self) -> GgufFile:
        """Return all of the header."""
        if self._bytes(4) != b"GGUF":
            raise self._wrong("does not begin with the letters GGUF")
        version = self._scalar("I")
        if version not in (2, 3):
            raise self._wrong(
                f"is of version {version}, and versions 2 and 3 (little-endian) are read"
            )
        tensors = self._count("Q", MAX_TENSORS, "tensors")
        fields = self._count("Q", MAX_FIELDS, "metadata fields")
        metadata: dict[str, Any] = {}
        for _ in range(fields):
            key = self._text(MAX_NAME_BYTES)
            metadata[key] = self._value(self._scalar("I"))
        listed = [self._tensor() for _ in range(tensors)]
        start = _rounded_up(self.at, self._alignment(metadata))
        return GgufFile(self.path, metadata, self._placed(listed, start))

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, number of its format, and offset from the first tensor's byte."""
        name = self._text(MAX_NAME_BYTES)
        dimensions = self._count("I", MAX_DIMENSIONS, f"dimensions of {name!r}")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _placed(
        self, listed: list[tuple[str, tuple[int, ...], int, int]], start: int
    ) -> dict[str, GgufTensor]:
        """Return the tensors by name, each inside of the file."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        tensors = {}
        for name, shape, number, offset in listed:
            try:
                kind = GGMLQuantizationType(number)
            except ValueError:
                raise self._wrong(f"stores {name!r} in an unknown format ({number})") from None
            values, size = GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % values or min(shape) < 1:
                raise self._wrong(
                    f"gives {name!r} the shape {shape}, which {kind.name} cannot have"
                )
            stored = prod(shape) // values * size
            if start + offset + stored > self.total:
                raise self._wrong(f"ends before the last byte of {name!r}")
            if name in tensors:
                raise self._wrong(f"lists {name!r} twice")
            tensors[name] = GgufTensor(shape, kind.name, start + offset, stored)
        return tensors

    def _alignment(self, metadata: dict[str, Any]) -> int:
        found = metadata.get("general.alignment", 32)
        if not isinstance(found, int) or not 0 < found <= MAX_ALIGNMENT or found & (found - 1):
            raise self._wrong(f"has general.alignment {str(found)[:40]}, no power of two")
        return found

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text(self.end)
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY:
            raise self._wrong(f"has a metadata value of an unknown type ({kind})")
        kind = self._scalar("I")
        length = self._count("Q", MAX_ELEMENTS - self.elements, "elements of its arrays")
        self.elements += length
        if kind == STRING:
            return [self._text(self.end) for _ in range(length)]
        if kind in SCALARS:
            size = struct.calcsize(f"<{SCALARS[kind]}")
            return list(struct.unpack(f"<{length}{SCALARS[kind]}", self._bytes(length * size)))
        raise self._wrong(f"has an array of an unknown type ({kind})")

    def _count(self, kind: str, most: int, what: str) -> int:
        found = int(self._scalar(kind))
        if found > most:
            raise self._wrong(f"counts {found:,} {what}, and at most {most:,} are read")
        return found

    def _text(self, most: int) -> str:
        length = self._count("Q", most, "bytes of one text")
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._wrong("has a text that is not UTF-8") from None

    def _scalar(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._bytes(struct.calcsize(f"<{kind}")))[0]

    def _bytes(self, count: int) -> bytes:
        if self.at + count > self.end:
            end = "ends" if self.end == self.total else f"goes on for {MAX_HEADER_BYTES:,} bytes"
            raise self._wrong(f"{end} in the middle of its header")
        self.at += count
        return bytes(self.data[self.at - count : self.at])

    def _wrong(self, found: str) -> DllmBenchError:
        return DllmBenchError(
            f"{self.path} cannot be read as GGUF: it {found}; fetch the file again."
        )


def _rounded_up(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
