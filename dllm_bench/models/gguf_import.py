"""Turn a GGUF file into a checkpoint folder: config.json, safetensors, tokenizer, chat template.

The layouts are those of Llama, Qwen2 and Qwen3. llama.cpp stores the rows of Llama's q and k with
the two halves of each head interleaved; this is undone. Missing information is not guessed: an
unknown pre-tokenizer, a scaled rotary embedding or an unknown tensor raise an error.

The file is not trusted: every count and length is checked before anything of that size is read or
built. Format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian. The package
`gguf` is needed once tensors are listed.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from math import inf, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.adapters import LAYOUTS, renamed
from dllm_bench.models.sources import digest, first_names
from dllm_bench.models.spec import ModelSpec
from dllm_bench.models.text import library_errors_named

MAX_HEADER_BYTES = 128 * 2**20
"""Of metadata and list of tensors; the largest known tokenizers take some 12 MB."""
MAX_FIELDS, MAX_TENSORS, MAX_ELEMENTS = 4_096, 100_000, 2_000_000
"""Metadata fields and tensors of a file, and elements of all its arrays together."""
MAX_NAME_BYTES, MAX_DIMENSIONS, MAX_ALIGNMENT = 1_024, 4, 65_536
STRING, ARRAY = 8, 9
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Type of a metadata value -> its struct format."""
ARCHITECTURES = ("llama", "qwen2", "qwen3")
QUERY_OR_KEY = re.compile(r"blk\.\d+\.attn_([qk])\.\w+")
SHARD_BYTES = 2 * 2**30
CHECKED_TOKENS, STRIDE, TOLERANCE = 24, 7919, 1e-4
PRE_TOKENIZERS = LAYOUTS["pre_tokenizers"]
NORMAL, CONTROL, OWN, UNUSED = 1, 3, 4, 5  # `tokenizer.ggml.token_type`
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
TOKENS = "tokenizer.ggml.tokens"
SCALES = ("rope.scale_linear", "rope.scaling.factor")
"""Factors by which rotary embeddings are scaled even if `rope.scaling.type` is absent."""
Report = Callable[[str], None]


# --- the file -------------------------------------------------------------------------------------


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

    def wrong(self, found: str, todo: str = "convert the model to GGUF again") -> DllmBenchError:
        """Return the error for a file in which something is wrong, and what to do."""
        return DllmBenchError(f"{self.path} {found}; {todo}.")

    def get(self, key: str) -> Any:
        """Return a value of the metadata; DllmBenchError where there is none."""
        if key not in self.metadata:
            raise self.wrong(f"has no {key!r} in its metadata")
        return self.metadata[key]

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a finite number of the metadata above zero, or the default where there is none;
        DllmBenchError for anything else.
        """
        found = self.get(key) if default is None else self.metadata.get(key, default)
        is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
        if not is_number or not 0 < found < inf:
            raise self.wrong(f"has {key} {str(found)[:80]!r}, where a number above zero is needed")
        return found

    def texts(self, key: str) -> list[str]:
        """Return a list of texts of the metadata; DllmBenchError for anything else."""
        found = self.get(key)
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise self.wrong(f"has a {key} that is no list of texts")
        return found

    def read(self, name: str) -> NDArray[np.floating[Any]]:
        """Return the values of a tensor: float16 and float32 as they are, all others as float32."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        stored = np.memmap(self.path, np.uint8, "r", tensor.start, (tensor.size,))
        rows = np.array(stored).reshape(*tensor.shape[:-1], -1)
        if tensor.kind == "F16":
            return rows.view(np.float16)
        try:
            values = dequantize(rows, GGMLQuantizationType[tensor.kind])
        except NotImplementedError:
            found = f"stores {name} as {tensor.kind}, which the package gguf does not dequantise"
            raise self.wrong(found, "use a file of another quantisation") from None
        return np.asarray(values, np.float32).reshape(tensor.shape)


def read_gguf(path: Path) -> GgufFile:
    """Read the header; DllmBenchError for a file that is cut short, damaged or of another kind."""
    if not path.is_file():
        raise DllmBenchError(f"{path} is to be read as GGUF and is no file; name a .gguf file.")
    with (
        library_errors_named(f"{path} cannot be read", "make it readable"),
        path.open("rb") as file,
    ):
        data = file.read(MAX_HEADER_BYTES)
    return _Header(path, data).read()


class _Header:
    """Reads a header from front to back."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data, self.total = path, data, path.stat().st_size
        self.end = len(data)
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
        alignment = self._alignment(metadata)
        start = -(-self.at // alignment) * alignment
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
        if kind != ARRAY:
            return self._values(kind, 1)[0]
        kind = self._scalar("I")
        length = self._count("Q", MAX_ELEMENTS - self.elements, "elements of its arrays")
        self.elements += length
        return self._values(kind, length)

    def _values(self, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            return [self._text(self.end) for _ in range(count)]
        if kind not in SCALARS:
            raise self._wrong(f"has a value or an array of an unknown type ({kind})")
        form = f"<{count}{SCALARS[kind]}"
        return list(struct.unpack(form, self._bytes(struct.calcsize(form))))

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
        return self.data[self.at - count : self.at]

    def _wrong(self, found: str) -> DllmBenchError:
        return DllmBenchError(
            f"{self.path} cannot be read as GGUF: it {found}; fetch the file again."
        )


# --- the import -----------------------------------------------------------------------------------


def import_gguf(file: Path, folder: Path, report: Report = print) -> None:
    """Write the checkpoint of a GGUF file into a new folder, and compare its logits.

    Until it is complete it has a new, hidden name. DllmBenchError where the folder exists, the file
    is of another kind, or the logits differ from those of transformers' own reader by more than
    `TOLERANCE` of the largest.
    """
    if folder.exists():
        raise DllmBenchError(
            f"{folder} exists and is to be written; name another folder with --to, or remove it."
        )
    gguf = read_gguf(file)
    config = config_of(gguf)
    names = published_names(gguf)
    part = folder.with_name(f".{folder.name}-{secrets.token_hex(8)}.part")
    part.mkdir(parents=True)
    try:
        _write_json(part / "config.json", config)
        write_tokenizer(gguf, part)
        write_weights(gguf, names, part)
        report(f"{len(names)} tensors of {file.name} written; comparing logits with transformers")
        difference = logits_difference(file, part)
        if not difference <= TOLERANCE:
            raise DllmBenchError(
                f"The logits of {file} differ from those of transformers' own reader by "
                f"{difference:.2g} of the largest, and at most {TOLERANCE:g} is accepted; "
                "report it with the file's name."
            )
        report(f"largest difference: {difference:.1g} of the largest logit")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


# --- config and weights --------------------------------------------------------------------------


def config_of(gguf: GgufFile) -> dict[str, Any]:
    """Return config.json of the model, with transformers' names."""
    kind = gguf.get("general.architecture")
    if kind not in ARCHITECTURES:
        found = f"is of architecture {str(kind)[:40]!r}, and {', '.join(ARCHITECTURES)} are read"
        raise gguf.wrong(found, "use a file of one of them")
    _require_plain(gguf, kind)
    heads, kv_heads, head_dim = _head_sizes(gguf, kind)
    return {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "vocab_size": _embedding(gguf)[0],
        "hidden_size": int(gguf.number(f"{kind}.embedding_length")),
        "intermediate_size": int(gguf.number(f"{kind}.feed_forward_length")),
        "num_hidden_layers": int(gguf.number(f"{kind}.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": int(gguf.number(f"{kind}.context_length")),
        "rms_norm_eps": _as_written(gguf.number(f"{kind}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _as_written(gguf.number(f"{kind}.rope.freq_base", 10_000.0)),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **{
            f"{role}_token_id": token for role, token in _special_ids(gguf).items() if role != "unk"
        },
        "imported_from": {"file": gguf.path.name, "sha256": digest(gguf.path)},
    }


def _head_sizes(gguf: GgufFile, kind: str) -> tuple[int, int, int]:
    """Return the number of heads of q, of k and v, and their size."""
    heads = int(gguf.number(f"{kind}.attention.head_count"))
    kv_heads = int(gguf.number(f"{kind}.attention.head_count_kv", heads))
    share = max(1, int(gguf.number(f"{kind}.embedding_length")) // heads)
    return heads, kv_heads, int(gguf.number(f"{kind}.attention.key_length", share))


def _special_ids(gguf: GgufFile) -> dict[str, int]:
    """Return {role: id} for the roles that the file names."""
    count = len(gguf.texts(TOKENS))
    found = {role: gguf.metadata.get(f"tokenizer.ggml.{ROLES[role]}_token_id") for role in ROLES}
    return {role: i for role, i in found.items() if isinstance(i, int) and 0 <= i < count}


def _require_plain(gguf: GgufFile, kind: str) -> None:
    """Raise DllmBenchError for features that the layouts lack: experts, scaled or partial
    rotary."""
    scaling = gguf.metadata.get(f"{kind}.rope.scaling.type", "none")
    factors = (gguf.metadata.get(f"{kind}.{key}", 1) for key in SCALES)
    rotary = gguf.metadata.get(f"{kind}.rope.dimension_count")
    key = _head_sizes(gguf, kind)[2]
    wrong = {
        "experts": bool(gguf.metadata.get(f"{kind}.expert_count")),
        "its other tensors in further files": gguf.metadata.get("split.count", 1) != 1,
        f"rotary embeddings scaled by {scaling!r}": scaling != "none",
        "rotary embeddings scaled by a factor": any(factor != 1 for factor in factors),
        "rotary embeddings of a part of each head": rotary not in (None, key),
        "scaled rotary frequencies (rope_freqs.weight)": "rope_freqs.weight" in gguf.tensors,
    }
    if listed := ", ".join(what for what, found in wrong.items() if found):
        found = f"has {listed}, which the import does not read"
        raise gguf.wrong(found, "use the model's safetensors checkpoint instead")


def _as_written(number: float) -> float:
    """Return a float32 of the file as the decimal number that it was made from: 1e-05."""
    return float(str(np.float32(number)))


def _embedding(gguf: GgufFile) -> tuple[int, ...]:
    if "token_embd.weight" not in gguf.tensors:
        raise gguf.wrong("has no token_embd.weight", "use a file of a whole model")
    return gguf.tensors["token_embd.weight"].shape


def published_names(gguf: GgufFile) -> dict[str, str]:
    """Return {name in the file: name in the checkpoint}; DllmBenchError for tensors in neither
    list."""
    names = {name: renamed("GgufFile", name) for name in gguf.tensors}
    unknown = [name for name, published in names.items() if published is None]
    if unknown:
        found = f"has tensors that the import does not know ({first_names(unknown)})"
        raise gguf.wrong(found, f"use a plain {', '.join(ARCHITECTURES)} model")
    return {name: published for name, published in names.items() if published}


def write_weights(gguf: GgufFile, names: dict[str, str], folder: Path) -> None:
    """Write safetensors files of some `SHARD_BYTES` each, with an index."""
    from safetensors.torch import save

    place: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(gguf, names), start=1):
        file = f"model-{number:05}.safetensors"
        # not `save_file`, which hides it from other users
        (folder / file).write_bytes(save(shard, {"format": "pt"}))
        place |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": place}
    _write_json(folder / "model.safetensors.index.json", index)


def _shards(gguf: GgufFile, names: dict[str, str]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, published in names.items():
        shard[published] = _weight(gguf, name)
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def _weight(gguf: GgufFile, name: str) -> Tensor:
    """Return a tensor with the rows of q and k in transformers' order."""
    values = torch.from_numpy(gguf.read(name))
    kind = gguf.metadata["general.architecture"]
    match = QUERY_OR_KEY.fullmatch(name)
    if kind != "llama" or match is None:
        return values
    heads = _head_sizes(gguf, kind)[match[1] == "k"]
    if values.shape[0] % (2 * heads):
        raise gguf.wrong(f"has {name} of {len(values)} rows, which {heads} heads cannot share")
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


# --- tokenizer -----------------------------------------------------------------------------------


def write_tokenizer(gguf: GgufFile, folder: Path) -> None:
    """Write tokenizer.json, its settings, and the chat template where the file has one."""
    tokens, rows = gguf.texts(TOKENS), _embedding(gguf)[0]
    if not 0 < len(tokens) <= rows:
        raise gguf.wrong(f"has no list of at most {rows} tokens, its embedding's number of rows")
    is_byte_level = gguf.get("tokenizer.ggml.model") == "gpt2"
    read = byte_level_tokenizer if is_byte_level else _tokenizer_of_transformers
    read(gguf).save(str(folder / "tokenizer.json"))
    special = {f"{role}_token": tokens[i] for role, i in _special_ids(gguf).items()}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", settings | special)
    template = gguf.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def byte_level_tokenizer(gguf: GgufFile) -> Any:
    """Return the byte-level BPE tokenizer of the file, cut into words as `tokenizer.ggml.pre`
    says."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pre = str(gguf.get("tokenizer.ggml.pre"))
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        found = f"cuts text by the pre-tokenizer {pre[:40]!r}, and the import knows {known}"
        raise gguf.wrong(found, "add its rule to pre_tokenizers of layouts.yaml")
    rule = PRE_TOKENIZERS[pre]
    tokens = gguf.texts(TOKENS)
    kinds = gguf.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        kinds = [NORMAL] * len(tokens)
    vocab = {t: i for i, t in enumerate(tokens) if kinds[i] != UNUSED}
    halves = (merge.partition(" ") for merge in gguf.texts("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in halves]
    if not all({*pair, "".join(pair)} <= vocab.keys() for pair in merges):
        raise gguf.wrong("has merges of tokens that its list of tokens lacks")
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges="whole" in rule))
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    if "nfc" in rule:
        tokenizer.normalizer = normalizers.NFC()
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (OWN, tokenizer.add_tokens)):
        mine = [token for token, own in zip(tokens, kinds, strict=True) if own == kind]
        add([AddedToken(token, normalized=False, special=kind == CONTROL) for token in mine])
    return tokenizer


def _pre_tokenizer(rule: Mapping[str, Any]) -> Any:
    from tokenizers import Regex, pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="split" not in rule)
    if "digits" in rule:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if "split" not in rule:
        return words
    split = pre_tokenizers.Split(Regex(rule["split"]), behavior="isolated")
    return pre_tokenizers.Sequence([split, words])


def _tokenizer_of_transformers(gguf: GgufFile) -> Any:
    """Return the SentencePiece tokenizer as transformers reads it."""
    from transformers import PreTrainedTokenizerFast

    failed = f"The tokenizer of {gguf.path} cannot be read"
    with library_errors_named(failed, "convert the model to GGUF again"):
        folder, file = str(gguf.path.parent), gguf.path.name
        read = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=file)
        return read.backend_tokenizer


# --- the comparison with transformers ------------------------------------------------------------


def logits_difference(file: Path, folder: Path) -> float:
    """Return the largest difference of a logit between the written folder and transformers'
    reading, as a share of the largest logit.

    Both run in float32 on the CPU, on tokens spread over the vocabulary.
    """
    from dllm_bench.models.load import load_model

    spec = ModelSpec(folder.name, str(folder), dtype="float32", device="cpu")
    denoiser, fed = load_model(spec).denoiser, (0, CHECKED_TOKENS)
    ids_BL = (torch.arange(CHECKED_TOKENS) * STRIDE % denoiser.vocab_size)[None]
    following = (1, CHECKED_TOKENS + 1)
    plan = ForwardPlan(ForwardKind.DENOISE, fed, following, fed, attention="block_causal", block=1)
    own_BLV = denoiser.forward(ids_BL, plan, denoiser.new_cache(CHECKED_TOKENS + 1))
    del denoiser
    theirs_BLV = _logits_of_transformers(file, ids_BL)
    return float((own_BLV - theirs_BLV).abs().max() / theirs_BLV.abs().max())


def _logits_of_transformers(file: Path, ids_BL: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    failed = f"{file} cannot be compared with transformers' own reading, which fails"
    with library_errors_named(failed, "use a file of another source"), torch.inference_mode():
        with redirect_stderr(StringIO()):  # it shows a progress bar
            theirs = AutoModelForCausalLM.from_pretrained(
                str(file.parent), gguf_file=file.name, dtype=torch.float32
            )
        logits_BLV: Tensor = theirs(ids_BL).logits
        return logits_BLV


# --- files ---------------------------------------------------------------------------------------


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
