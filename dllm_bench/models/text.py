"""Text to ids and back, and the special tokens of a checkpoint.

`TextFront.encode` takes text as it is (with BOS where the model asks for it) or chat turns through
the checkpoint's template; nothing is added silently. Ids come from config.json and tokenizer,
which must agree on mask and end of text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dllm_bench.core.protocols import Turns
from dllm_bench.core.request import DllmBenchError, SpecialTokens
from dllm_bench.models.layout import Published

TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|eot|>")  # LLaDA; Dream; the embedded models
FILES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def read_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer without running its code; None where there is none."""
    if not any((folder / name).is_file() for name in FILES):
        return None
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    single_file = (folder / "tokenizer.json").is_file()
    kind = PreTrainedTokenizerFast if single_file else Qwen2Tokenizer  # Dream: vocab + merges
    return kind.from_pretrained(str(folder), trust_remote_code=False)


def tokenizer_files(folder: Path) -> list[Path]:
    """Files that decide how text becomes ids."""
    return [folder / name for name in (*FILES, *SETTINGS) if (folder / name).is_file()]


def special_tokens(published: Published, tokenizer: Any, vocab_size: int) -> SpecialTokens:
    """Ids by role; a disagreement of config and tokenizer on mask or eos is an error."""
    special = SpecialTokens(
        mask=_agreed("mask", published, tokenizer),
        eos=_agreed("eos", published, tokenizer),
        pad=_preferred("pad", published, tokenizer),
        bos=_preferred("bos", published, tokenizer),
        eot=_turn_end(tokenizer),
    )
    named = asdict(special).items()
    outside = [f"{role}={i}" for role, i in named if i is not None and i >= vocab_size]
    if outside:
        raise DllmBenchError(
            f"Special ids {', '.join(outside)} lie outside of the model's {vocab_size} tokens; "
            f"use config.json and tokenizer of one checkpoint."
        )
    return special


def _agreed(role: str, published: Published, tokenizer: Any) -> int:
    """The id both name, or the one that is named."""
    in_config = published.get(f"{role}_token_id")
    in_tokenizer = getattr(tokenizer, f"{role}_token_id", None)
    found = {i for i in (in_config, in_tokenizer) if i is not None}
    if len(found) != 1:
        raise DllmBenchError(
            f"config.json says {role}_token_id={in_config}, the tokenizer {in_tokenizer}; mend the "
            f"checkpoint so that exactly one {role} token is named."
        )
    return int(found.pop())


def _preferred(role: str, published: Published, tokenizer: Any) -> int | None:
    """The tokenizer's id (Dream's config names another BOS than its tokenizer), else config's."""
    in_tokenizer = getattr(tokenizer, f"{role}_token_id", None)
    return in_tokenizer if in_tokenizer is not None else published.get(f"{role}_token_id")


def _turn_end(tokenizer: Any) -> int | None:
    vocab = tokenizer.get_vocab() if tokenizer is not None else {}
    return next((vocab[text] for text in TURN_ENDS if text in vocab), None)


@dataclass(frozen=True)
class TextFront:
    """A tokenizer with the model's habits: `chat` allows turns, `bos` is put before plain text."""

    name: str
    tokenizer: Any
    special: SpecialTokens
    chat: bool = False
    bos: bool = False

    def __post_init__(self) -> None:
        if self.chat and self.tokenizer is not None and not self.tokenizer.chat_template:
            raise DllmBenchError(
                f"Model {self.name!r} has chat: true, but its tokenizer has no chat template; set "
                f"chat: false or add chat_template.jinja."
            )
        if self.bos and self.special.bos is None:
            raise DllmBenchError(
                f"Model {self.name!r} has bos: true, but neither tokenizer nor config names a BOS "
                f"token; set bos: false."
            )

    @property
    def template_sha256(self) -> str | None:
        """Hash of the chat template, None where turns are not used."""
        if not self.chat:
            return None
        return hashlib.sha256(self._tokenizer().chat_template.encode()).hexdigest()

    def encode(self, text: str | Turns) -> list[int]:
        """Prompt ids of plain text, or of chat turns followed by the assistant's opening."""
        if isinstance(text, str):
            ids = self._plain(text)
            start = [self.special.bos] if self.bos and self.special.bos is not None else []
            return start + ids
        if not self.chat:
            raise DllmBenchError(
                f"Model {self.name!r} was asked to encode chat turns, but has chat: false; give "
                f"plain text or choose an instruct model."
            )
        turns = [dict(turn) for turn in text]
        prompt = self._tokenizer().apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        return self._plain(prompt)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self._tokenizer().decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer().encode(text, add_special_tokens=False))

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise DllmBenchError(
                f"Model {self.name!r} has no tokenizer files beside its weights; add "
                f"tokenizer.json and tokenizer_config.json to the checkpoint folder."
            )
        return self.tokenizer
