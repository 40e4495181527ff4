"""The embedded tokenizer is lossless, stable and agrees with every shipped asset."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.models.sources import SHIPPED_MODELS
from dllm_bench.paths import assets_dir
from scripts.embedded import tokenizer as embedded
from scripts.embedded.recipes import RECIPES
from scripts.embedded.tasks import minicode, minigsm

MAX_ASSET_BYTES = 4 * 2**20
FOLDERS = [assets_dir() / name for name in SHIPPED_MODELS]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return embedded.build_tokenizer(chat=True)


def _random_text(rng: random.Random) -> str:
    planes = ((0, 128), (0, 0xD800), (0xE000, 0x110000))
    return "".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(rng.randrange(40)))


def test_any_unicode_text_survives(tokenizer: Any) -> None:
    rng = random.Random(0)
    texts = [_random_text(rng) for _ in range(500)]
    texts += ["<0x41>", " <0x0A>", "naïve café", "1234567 apples", "\t\n  \r\n", "▁ \x00", "𝛼 = ½"]
    for text in texts:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_byte_has_a_token(tokenizer: Any) -> None:
    ids = tokenizer.convert_tokens_to_ids(list(embedded.BYTES))
    assert len(set(ids)) == 256
    assert tokenizer.unk_token_id not in ids


def test_ids_follow_the_list_of_pieces(tokenizer: Any) -> None:
    pieces = embedded.pieces()
    assert len(set(pieces)) == len(pieces) == len(tokenizer)
    assert tokenizer.convert_tokens_to_ids(pieces) == list(range(len(pieces)))
    assert [tokenizer.mask_token, tokenizer.eos_token] == pieces[:2]


def test_numbers_and_words_are_single_tokens(tokenizer: Any) -> None:
    for piece in [f" {n}" for n in range(100)] + [" apples", " buys", "####", "def", "    "]:
        assert len(tokenizer(piece).input_ids) == 1


def test_later_pieces_leave_the_texts_of_the_first_tasks_as_they_were(tokenizer: Any) -> None:
    first = embedded.build_tokenizer(first=True)
    assert embedded.pieces()[: len(first)] == embedded.first_pieces()
    problems = [*minigsm.TASK.problems("train", 300), *minicode.TASK.problems("train", 300)]
    texts = [p.prompt + p.continuation for p in problems]
    for text in texts:
        assert tokenizer(text).input_ids == first(text).input_ids


def test_chat_template_wraps_the_plain_prompt(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "Question: 1?\nAnswer:"}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>Question: 1?\nAnswer:<|eot|><|assistant|>"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_asset_is_small_and_its_ids_agree(folder: Path, tokenizer: Any) -> None:
    assert sum(f.stat().st_size for f in folder.iterdir()) <= MAX_ASSET_BYTES
    if (folder / "config.json").exists():
        file = json.loads((folder / "tokenizer.json").read_text())
        saved = [piece for piece, _ in file["model"]["vocab"]]
        assert saved in (embedded.first_pieces(), embedded.pieces())
        whole = json.loads((folder / "config.json").read_text())
        config = whole.get("text_config", whole)
        assert config["vocab_size"] == len(saved)
        for kind in ("eos", "pad", "bos", *(["mask"] if config is whole else [])):
            assert config[f"{kind}_token_id"] == getattr(tokenizer, f"{kind}_token_id")
    else:
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == RECIPES[folder.name].start
