"""Loading checkpoints: layouts, text codec, content hash, special ids, adapters, every error."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models import checkpoint, sources
from dllm_bench.models.load import LoadedModel, load_model
from dllm_bench.models.sources import checkpoint_folder, content_hash
from dllm_bench.models.spec import ModelSpec
from dllm_bench.models.text import read_token_texts, read_tokenizer
from tests.helpers import IDS, ROLES, tiny_checkpoint, tiny_denoiser, whole_forward
from tests.unit.models.common import edit, resident, spec, tensors

KEY = "model.layers.1.self_attn.o_proj.weight"
LLADA_KEY = "model.transformer.blocks.1.attn_out.weight"
Plant = Callable[[Path], object]
TOKENS = torch.tensor([[3, 1, 4, 1, 5, IDS["<|mask|>"], 9, 2, 6, IDS["<|mask|>"]]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint("dream", tmp_path / "checkpoint", seed=5)


def logits(model: LoadedModel) -> Tensor:
    return whole_forward(model.denoiser, TOKENS)


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream-base", "tiny-qwen3"])
def test_tokens_have_the_texts_that_transformers_give(name: str) -> None:
    folder = checkpoint_folder(f"assets/{name}")
    tokenizer, decode = read_tokenizer(folder), read_token_texts(folder)
    assert decode is not None
    every = range(len(tokenizer) + 1)
    assert [decode([token]) for token in every] == [tokenizer.decode([token]) for token in every]
    assert decode(every) == tokenizer.decode(list(every))


def test_a_tokenizer_whose_settings_add_tokens_is_left_to_transformers(tmp_path: Path) -> None:
    assert read_token_texts(tmp_path) is None
    shutil.copytree(checkpoint_folder("assets/tiny-llada"), tmp_path / "model")
    file = tmp_path / "model" / "tokenizer_config.json"
    edit(file, added_tokens_decoder={"99999": {"content": "<more>", "special": True}})
    assert read_token_texts(tmp_path / "model") is None


def test_what_was_read_of_a_file_does_not_stay_in_memory(tmp_path, monkeypatch) -> None:
    file, many, size = tmp_path / "model.safetensors", 16, 2**18
    save_file({f"t{i:02}": torch.full((size // 4,), float(i)) for i in range(many)}, file)
    for most in (2 * size, many * size):
        monkeypatch.setattr(checkpoint, "MAPPED_BYTES", most)
        weights = checkpoint.Weights([file])
        sums = [float(weights.read(name).sum()) for name in sorted(weights.names)]
        assert sums == [float(i * size // 4) for i in range(many)]
        assert most - size <= resident(file) <= most + size
        del weights


def test_a_tied_head_needs_no_tensor(tmp_path: Path) -> None:
    folder, head = tiny_checkpoint("llada", tmp_path, 5), "model.transformer.ff_out.weight"
    edit(folder / "config.json", weight_tying=True)
    without(head)(folder)
    module = load_model(spec(folder)).denoiser.module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert not module.lm_head.weight.is_meta
    adapter = write_adapter(tmp_path / "adapter", head, SIDES)
    with pytest.raises(DllmBenchError, match=f"{head}, and embedding and head"):
        load_model(spec(folder, lora=str(adapter)))


def test_llada2_may_name_its_rotary_share_among_the_rotary_settings(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llada2", tmp_path, 5)
    before, key = logits(load_model(spec(folder))), "partial_rotary_factor"
    edit(folder / "config.json", **{key: "absent", "rope_parameters": {key: 0.5}})
    assert torch.equal(logits(load_model(spec(folder))), before)


def test_llada_with_qkv_bias(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llada", tmp_path, 5, include_qkv_bias=True)
    biased, stored = logits(load_model(spec(folder))), tensors(folder)
    plain = {name: t for name, t in stored.items() if not name.endswith("bias")}
    zeros = {name: 0 * stored[name] for name in stored.keys() - plain.keys()}
    save_file(plain | zeros, folder / "model.safetensors")
    unbiased = logits(load_model(spec(folder)))
    assert zeros and (unbiased - biased).abs().max() > 1e-2
    save_file(plain, folder / "model.safetensors")
    edit(folder / "config.json", include_qkv_bias=False)
    torch.testing.assert_close(unbiased, logits(load_model(spec(folder))))


def test_text_goes_both_ways(folder: Path) -> None:
    plain, chat = load_model(spec(folder)), load_model(spec(folder, chat=True, bos=True))
    bos, eot = ROLES["bos"], ROLES["eot"]
    assert plain.encode("w3 w14 w15") == [3, 14, 15]
    assert chat.encode("w3 w14") == [bos, 3, 14]
    assert chat.encode([{"role": "user", "content": "w3 w14"}]) == [bos, 3, 14, eot]
    assert plain.decode([3, ROLES["mask"], 14, ROLES["eos"]]) == "w3 w14"
    assert plain.metadata.template_sha256 is None
    assert chat.metadata.template_sha256 is not None
    with pytest.raises(DllmBenchError, match="chat: false"):
        plain.encode([{"role": "user", "content": "w3"}])
    with pytest.raises(DllmBenchError, match="does not take these turns.*empty conversation"):
        chat.encode([])
    chat.text.tokenizer.chat_template = "{{ 'a' * 2 ** 25 }}"
    with pytest.raises(DllmBenchError, match="makes 33,554,432 characters"):
        chat.encode([{"role": "user", "content": "w3"}])
    chat.text.tokenizer.add_tokens(["another"])
    with pytest.raises(DllmBenchError, match=f"'another'.* token {ROLES['mask'] + 1} .*'tiny' has"):
        chat.encode("w3 another")


def test_of_several_chat_templates_the_default_one_is_used(folder: Path) -> None:
    turns, file = [{"role": "user", "content": "w3"}], folder / "chat_template.jinja"
    single, named = load_model(spec(folder, chat=True)), {"template": file.read_text()}
    file.unlink()
    edit(folder / "tokenizer_config.json", chat_template=[{"name": "default", **named}])
    several = load_model(spec(folder, chat=True))
    assert several.encode(turns) == single.encode(turns)
    assert several.metadata.template_sha256 == single.metadata.template_sha256
    edit(folder / "tokenizer_config.json", chat_template=[{"name": "tool_use", **named}])
    with pytest.raises(DllmBenchError, match="no default chat template .*set chat: false"):
        load_model(spec(folder, chat=True))
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert not sources.settings_of(folder)["chat"]


def config(**entries: Any) -> Plant:
    return lambda folder: edit(folder / "config.json", **entries)


def without(name: str, **more: Tensor) -> Plant:
    """Return what takes a tensor out of a checkpoint, and puts others in."""

    def plant(folder: Path) -> None:
        kept = {key: tensor for key, tensor in tensors(folder).items() if key != name}
        save_file(kept | more, folder / "model.safetensors")

    return plant


def unmasked(folder: Path) -> None:
    """Let a checkpoint name no mask token, as LLaDA's and SDAR's do not."""
    edit(folder / "config.json", mask_token_id=None)
    edit(folder / "tokenizer_config.json", mask_token="absent")


def wordless(folder: Path) -> None:
    """Take out the tokenizer and the token that begins a text."""
    for file in folder.glob("*token*"):
        file.unlink()
    edit(folder / "config.json", bos_token_id=None)


def as_it_is(folder: Path) -> None: ...


MASKED_AS = f"'w5' has id 5, but .*mask_token_id={ROLES['mask']}"
MAMBA = config(model_type="mamba", architectures=["MambaForCausalLM"])
UNKNOWN = r"^(?!.*correct).*'mamba' \(MambaForCausalLM\), which no adapter.*dllm_bench\.wrap"
REFUSED: dict[str, tuple[str, Plant, dict[str, Any], str]] = {  # layout, plant, settings, words
    "a dtype": ("dream", as_it_is, {"dtype": "int4"}, "int4"),
    "no such device": ("dream", as_it_is, {"device": "abacus"}, "abacus"),
    "a block": ("dream", as_it_is, {"block": 8}, "only block_causal takes a block"),
    "no device": ("dream", as_it_is, {"device": "cuda"}, "no CUDA"),
    "an adapter": ("llada", as_it_is, {"adapter": "dream"}, "'dream'.*set model.adapter=llada"),
    "no layout": ("sdar", MAMBA, {"adapter": "llada"}, UNKNOWN),
    "many layers": ("llada", config(n_layers=10**7), {}, "n_layers=10000000, and the weights besi"),
    "many experts": ("llada_moe", config(num_experts=10**7), {}, "num_experts=10000000, and the w"),
    "two bases": ("llada2", config(rope_parameters={"rope_theta": 5e5}), {}, "level and 500000"),
    "no base": ("wedlm", config(rope_theta=None), {}, "no 'rope_theta'"),
    "scaling": ("llada", config(rope_scaling={"type": "dynamic"}), {}, "of type 'dynamic'"),
    "packed": ("dream", config(quantization_config={"bits": 4}), {}, r"n_config=\{'bits': 4\}"),
    "norms": ("wedlm", config(qk_norm=False), {}, "qk_norm=False, which the wedlm adapter"),
    "experts": ("llada2", config(expert_capacity=4), {}, "=4, which the llada2_moe adapter"),
    "no tensor": ("llada", without(LLADA_KEY), {}, f"missing: {LLADA_KEY}"),
    "two heads": ("dream", config(tie_word_embeddings=True), {}, r"hold another lm_head\.weight"),
    "more tensors": ("dream", without("", extra=torch.ones(2)), {}, "unexpected: extra"),
    "no template": (
        "dream", lambda f: (f / "chat_template.jinja").unlink(), {"chat": True}, "no chat template",
    ),
    "no beginning": ("dream", wordless, {"bos": True}, "bos: true"),
    "ids outside": (
        "dream", lambda f: (wordless(f), config(pad_token_id=4000)(f)), {}, "pad=4000 lie outside",
    ),
    "another mask": ("dream", as_it_is, {"mask_token": "w5"}, MASKED_AS),
    "mask of no id": ("dream", as_it_is, {"mask_token": "<|none|>"}, "none.>', which is no token"),
    "no mask": ("dream", unmasked, {}, "needs a mask token of its own"),
    "end as mask": (
        "dream", unmasked, {"mask_token": "<|endoftext|>"}, f"found mask={ROLES['eos']} with",
    ),
    "text as an id": ("llada", config(mask_token_id="95"), {}, "_id '95'; give a whole number"),
    "another end": (
        "dream", lambda f: (f / "generation_config.json").write_text('{"eos_token_id": ["a"]}'),
        {}, r"generation_config.json has eos_token_id \['a'\]; give",
    ),
    "other ends": ("dream", config(eos_token_id=[7, 8]), {}, r"eos_token_id=\[7, 8\], the tok"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_loaded_wrongly_is_refused(name, tmp_path, monkeypatch) -> None:
    layout, plant, settings, words = REFUSED[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plant(tiny_checkpoint(layout, tmp_path, seed=5))
    with pytest.raises(DllmBenchError, match=words):
        load_model(spec(tmp_path, **settings))


def test_a_model_that_is_not_in_the_cache_is_told_how_to_be_fetched(monkeypatch) -> None:
    absent = ModelSpec("absent", "nobody-org/no-such-model", revision="abc")
    words = "hf download nobody-org/no-such-model --rev.* abc"
    for use in (load_model, content_hash):
        with pytest.raises(DllmBenchError, match=words):
            use(absent)
    refs = Mock(side_effect=IsADirectoryError)  # as for a revision that is a folder of refs
    monkeypatch.setattr("huggingface_hub.snapshot_download", refs)
    with pytest.raises(DllmBenchError, match="hf download nobody-org/no-such-model,"):
        load_model(replace(absent, revision=""))


def test_the_content_hash_follows_content(folder: Path, tmp_path: Path) -> None:
    first = content_hash(spec(folder))
    assert load_model(spec(folder)).metadata.weights_sha256 == first
    moved = folder.rename(tmp_path / "elsewhere")
    assert content_hash(spec(moved)) == first
    changed = tensors(moved)
    changed[min(changed)].view(-1)[0] += 1e-3
    save_file(changed, moved / "model.safetensors")
    second = content_hash(spec(moved))
    (moved / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    assert content_hash(spec(moved)) == second, "as transformers, the single file goes first"
    edit(moved / "config.json", rope_theta=5e5)
    assert len({first, second, content_hash(spec(moved))}) == 3
    pinned = [ModelSpec("pinned", "owner/model", revision=digit * 40) for digit in "ab"]
    assert len(set(map(content_hash, pinned))) == 2, "without files"


def test_the_hubs_name_of_a_file_is_its_hash(folder: Path, tmp_path: Path) -> None:
    file, before = folder / "model.safetensors", content_hash(spec(folder))
    blob = tmp_path / hashlib.sha256(file.read_bytes()).hexdigest()
    file.rename(blob)
    file.symlink_to(blob)
    assert content_hash(spec(folder)) == before
    file.unlink()
    file.symlink_to(blob.rename(tmp_path / ("0" * 64)))
    assert content_hash(spec(folder)) != before


def test_thinking_is_passed_to_the_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 'w1' if enable_thinking else 'w2' }}")
    turns = [{"role": "user", "content": "w3"}]
    for thinking, expected in ((True, [1]), (False, [2]), (None, [2])):
        assert load_model(spec(folder, chat=True, thinking=thinking)).encode(turns) == expected


def test_the_yaml_may_say_how_the_weights_were_trained_and_run(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plain = load_model(ModelSpec("tiny", str(folder)))
    assert (plain.attention_form, plain.denoiser.attention_form) == ("full", "full")
    assert (plain.metadata.dtype, plain.metadata.device) == ("float32", "cpu")
    edit(folder / "config.json", block_size=16)
    assert load_model(spec(folder, attention_form="block_causal")).block == 16
    other = load_model(spec(folder, attention_form="block_causal", block=8, shifted=False))
    assert (other.attention_form, other.block, other.denoiser.block) == ("block_causal", 8, 8)
    assert other.denoiser.shifted != plain.denoiser.shifted


WARNED = [  # attention and block of the weights, of a decoder, words of the warning
    (("full", None), ("full", 0), "None"),
    (("block_causal", 4), ("block_causal", 4), "None"),
    (("block_causal", None), ("block_causal", 32), "None"),
    (("causal", None), ("full", 0), "None"),
    (("block_causal", 1), ("feed_order", 16), "None"),
    (("full", None), ("block_causal", 32), "full attention, the decoder uses block_causal"),
    (("block_causal", 4), ("full", 0), "block_causal attention over blocks of 4, the decoder"),
    (("block_causal", 4), ("block_causal", 32), "uses block_causal attention over blocks of 3"),
    (("block_causal", 4), ("feed_order", 4), "uses attention that is causal in the order"),
]


def test_a_decoder_with_other_attention_gets_a_warning(folder: Path) -> None:
    model = load_model(spec(folder))
    for (form, block), asked, words in WARNED:
        trained = replace(model, attention_form=form, block=block)
        assert words in str(trained.attention_warning(*asked))


# --- special ids: config.json, tokenizer and generation_config.json must agree --------------------


def test_the_tokenizer_or_the_yaml_may_name_the_mask(folder: Path) -> None:
    edit(folder / "config.json", mask_token_id=None)
    assert load_model(spec(folder)).special.mask == ROLES["mask"]
    unmasked(folder)
    assert load_model(spec(folder, mask_token="<|mask|>")).special.mask == ROLES["mask"]


def test_a_causal_model_needs_no_mask(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3", tmp_path, seed=5)
    unmasked(folder)
    special = load_model(spec(folder)).special
    assert special.mask == ROLES["mask"], "the last id that is no other special token"
    assert special.mask not in (special.eos, special.eot, special.pad, special.bos)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert load_model(spec(folder)).special.mask == ROLES["mask"]


def test_several_eos_ids(folder: Path) -> None:
    """Llama and Gemma name several in config.json, Qwen in generation_config.json."""
    eos, eot = ROLES["eos"], ROLES["eot"]

    def ends() -> tuple[int, ...]:
        return load_model(spec(folder)).special.ends

    for ids in (eot, [7, eos, eot]):
        edit(folder / "config.json", eos_token_id=ids)
        assert ends() == (eos, eot)
    edit(folder / "tokenizer_config.json", eos_token="<|eot|>")
    for ids, expected in (([7, eos, eot], (7, eot)), (eos, (eos, eot)), (eot, (eot,))):
        edit(folder / "config.json", eos_token_id=ids)
        assert ends() == expected
    for more in ([eot, eos], eos):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": more}))
        assert ends() == (eos, eot)


# --- LoRA adapters: merged as peft merges them, unmerged as peft runs them, or an error -----------


def test_a_merge_equals_peft(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    folder = tiny_checkpoint("dream", tmp_path / "base", 5)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=4, lora_alpha=12, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(0)
    adapted = get_peft_model(tiny_denoiser("dream", seed=5).module, config)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    ours = load_model(spec(folder, lora=str(tmp_path / "adapter"))).denoiser.module.state_dict()
    theirs = adapted.merge_and_unload().state_dict()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, atol=1e-6, rtol=1e-6)


def write_adapter(path: Path, key: str, sides: tuple[Tensor, Tensor], **changes: Any) -> Path:
    path.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none"} | changes
    (path / "adapter_config.json").write_text(json.dumps(config))
    stem = f"base_model.model.{key.removesuffix('.weight')}"
    pair = {f"{stem}.lora_{side}.weight": t for side, t in zip("AB", sides, strict=True)}
    save_file(pair, path / "adapter_model.safetensors")
    return path


SIDES = torch.ones(2, 32), torch.ones(32, 2)
PART = {"target_modules": ["attn_out", "o_proj"]}
ABSENT = KEY.replace(".1.", ".0.").replace(".", r"\.")


@pytest.mark.parametrize(
    ("key", "sides", "changes", "words"),
    [
        (KEY, SIDES, {"use_dora": True}, "use_dora=True"),
        (KEY, SIDES, {"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        (KEY, SIDES, {"alora_invocation_tokens": [1]}, r"alora_invocation_tokens=\[1\]"),
        (KEY, (torch.ones(2, 31), SIDES[1]), {}, rf"{KEY} \(32, 31\)"),
        ("model.nothing.weight", SIDES, {}, "nothing"),
        (KEY, SIDES, {"r": 16}, "says r=16 and holds 1 pairs of rank 2;"),
        (KEY, None, {}, "holds 0 pairs of rank none;"),
        (KEY, SIDES, {"r": None}, "adapter_config.json has no 'r'"),
        (KEY, SIDES, {"r": [2]}, r"adapter_config.json has r \[2\]; give a whole number"),
        (KEY, SIDES, {"lora_alpha": "2"}, "has lora_alpha '2'; give a number"),
        (KEY, (torch.ones(2), torch.ones(2)), {}, "no LoRA pair"),
        (KEY, SIDES, PART, rf"holds no pair for \({ABSENT}\)"),
        (KEY, SIDES, {**PART, "layers_to_transform": [1]}, None),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(key, sides, changes, words, tmp_path) -> None:
    folder = tiny_checkpoint("dream", tmp_path / "base", 5)
    adapter = write_adapter(tmp_path / "adapter", key, sides or SIDES, **changes)
    if sides is None:
        save_file({}, adapter / "adapter_model.safetensors")
    with nullcontext() if words is None else pytest.raises(DllmBenchError, match=words):
        load_model(spec(folder, lora=str(adapter)))


def test_an_unmerged_adapter_equals_the_merged_one(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llada", tmp_path / "base", 5)
    sides = torch.randn(2, 32), torch.randn(32, 2)
    adapter = write_adapter(tmp_path / "adapter", LLADA_KEY, sides, use_rslora=True)
    merged = load_model(spec(folder, lora=str(adapter)))
    assert not resident(folder / "model.safetensors"), "weights are no longer parts of the file"
    plain = load_model(spec(folder))
    assert resident(folder / "model.safetensors")
    unmerged = load_model(spec(folder, lora=str(adapter), merge_lora=False))
    torch.testing.assert_close(logits(unmerged), logits(merged), atol=1e-4, rtol=1e-4)
    assert (logits(unmerged) - logits(plain)).abs().max() > 1e-2
    assert content_hash(spec(folder)) != content_hash(spec(folder, lora=str(adapter)))
    layer = unmerged.denoiser.module.model.layers[1].self_attn.o_proj
    assert torch.equal(layer.base_layer.weight, tensors(folder)[LLADA_KEY])
    assert unmerged.metadata.parameters == merged.metadata.parameters + 2 * 2 * 32


def test_an_adapter_on_a_fused_tensor_must_be_merged(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llada2", tmp_path / "base", seed=5)
    name = "model.layers.1.attention.query_key_value.weight"
    rows, columns = tensors(folder)[name].shape
    sides = torch.randn(2, columns), torch.randn(rows, 2)
    adapter = write_adapter(tmp_path / "adapter", name, sides)
    merged = load_model(spec(folder, lora=str(adapter))).denoiser.module.model.layers[1].self_attn
    whole = tensors(folder)[name] + 3 * sides[1] @ sides[0]
    found = torch.cat([getattr(merged, f"{side}_proj").weight for side in "qkv"])
    torch.testing.assert_close(found, whole)
    with pytest.raises(DllmBenchError, match="query_key_value.*merge_lora: true"):
        load_model(spec(folder, lora=str(adapter), merge_lora=False))


# --- prefetch and its manifest, with a fake download that writes a snapshot -----------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Return what was asked of a hub whose repositories are tiny Dreams."""
    asked: list[dict[str, Any]] = []

    def snapshot_download(hub_id: str, **wanted: Any) -> str:
        asked.append({"hub_id": hub_id, **wanted})
        repository = f"models--{hub_id.replace('/', '--')}"
        folder = Path(wanted["cache_dir"]) / repository / "snapshots" / COMMIT
        folder.mkdir(parents=True)
        if "Lora" in hub_id:
            (folder / "adapter_config.json").write_text("{}")
            save_file({}, folder / "adapter_model.safetensors")
        elif "Pickled" not in hub_id:
            tiny_checkpoint("dream", folder, seed=5)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


def on_hub(**changes: Any) -> ModelSpec:
    return ModelSpec(**{"name": "m", "path": "some-org/Dream", "revision": "main"} | changes)


def test_an_imported_model_of_a_given_file_is_identified_without_it(tmp_path, monkeypatch) -> None:
    """So that stored runs of it are found, and tables rendered, where it was never imported."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, other = "a" * 64, "b" * 64
    imported = on_hub(path="imported/tiny", revision=one)
    hashed = sources.content_hash(imported)
    assert hashed != sources.content_hash(on_hub(path="imported/tiny", revision=other))
    with pytest.raises(DllmBenchError, match="make real"):
        load_model(imported)
    folder = tiny_checkpoint("dream", tmp_path / "dllm-bench" / "imported" / "tiny", seed=5)
    assert sources.content_hash(imported) == hashed
    with pytest.raises(DllmBenchError, match=f"not imported from the file whose sha256 is {one}"):
        load_model(imported)
    edit(folder / "config.json", imported_from={"file": "tiny.gguf", "sha256": one})
    assert load_model(on_hub(path="imported/tiny", revision=one, device="cpu")).denoiser


def test_what_cannot_be_downloaded_is_one_message(hub, tmp_path, monkeypatch) -> None:
    with pytest.raises(DllmBenchError, match=r"lacks model\.safetensors"):
        list(sources.prefetch([on_hub(path="some-org/Pickled")], tmp_path))
    assert hub[0]["revision"] == "main"

    def refuse(hub_id: str, **wanted: Any) -> str:
        raise OSError("no route to host\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(DllmBenchError, match=r"cannot be downloaded \(no route to host\)"):
        sources.download_snapshot("some-org/Dream", None, tmp_path)


def test_the_command(hub: list[dict[str, Any]], tmp_path: Path, command) -> None:
    cache, moved = tmp_path / "cache", tmp_path / "cluster"
    words = f"prefetch --to {cache} model=d2f-dream-base dream-base tiny-llada"
    printed = command(words, here=False)
    assert "Dream-org/Dream-v0-Base-7B: " in printed and "D2F_Dream_Base_7B_Lora: " in printed
    assert "assets/tiny-llada: not on the hub" in printed
    assert [asked["hub_id"].partition("/")[0] for asked in hub] == ["Dream-org", "SJTU-Deng-Lab"]
    assert not [p for p in hub[0]["allow_patterns"] if p.endswith((".bin", ".py", ".pt"))]
    shutil.move(cache, moved)
    verify = "prefetch --verify --to"
    command(f"{verify} {moved}", here=False)
    other = on_hub(path="Dream-org/Dream-v0-Base-7B", revision="f" * 40)
    (_, (missing,)) = next(sources.verify_manifest(moved, [other]))
    assert missing.startswith(f"is there at commit {COMMIT}")
    named = command(f"prefetch dream-base llada-base --verify --to {moved}", code=1, here=False)
    assert "ok  Dream-org/" in named and "LLaDA-8B-Base  is not in the manifest" in named
    assert "Lora" not in named
    (weights,) = moved.rglob("model.safetensors")
    assert load_model(spec(weights.parent)).metadata.revision == COMMIT
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    weights.with_name("config.json").write_text("{}")
    weights.with_name("tokenizer.json").unlink()
    printed = command(f"{verify} {moved}", code=1, here=False)
    for words in ("config.json has 2 bytes", "safetensors has other", "tokenizer.json is missing"):
        assert words in printed
    for words, named in ((verify, sources.MANIFEST), ("prefetch --to", "names of models")):
        assert named in command(f"{words} {tmp_path}", code=2, here=False)
