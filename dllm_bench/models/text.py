"""Text to ids and back, and the special tokens of a checkpoint.

`TextCodec.encode` takes text as it is (with BOS where the model asks for it) or chat turns through
the checkpoint's template; nothing is added silently. Ids come from config.json and tokenizer,
which must agree on mask and end of text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dllm_bench.core.benchmark import Turns
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import SpecialTokens
from dllm_bench.models.layouts import PublishedConfig

TURN_ENDS = (  # LLaDA, Llama; Dream, SDAR, Qwen; LLaDA-MoE, LLaDA2; Gemma; the embedded models
    "<|eot_id|>",
    "<|im_end|>",
    "<|role_end|>",
    "<turn|>",
    "<end_of_turn>",
    "<|eot|>",
)
FILES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json")
SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def read_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer without running its code; None where there is none."""
    if not any((folder / name).is_file() for name in FILES):
        return None
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    single_file = (folder / "tokenizer.json").is_file()
    kind = PreTrainedTokenizerFast if single_file else Qwen2Tokenizer  # Dream: vocab + merges
    try:
        return kind.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # a damaged file leads to errors of any kind
        raise DllmBenchError(
            f"The tokenizer in {folder} cannot be read ({type(error).__name__}: {error}); fetch "
            f"its files again."
        ) from error


def tokenizer_files(folder: Path) -> list[Path]:
    """Files that decide how text becomes ids."""
    return [folder / name for name in (*FILES, *SETTINGS) if (folder / name).is_file()]


@dataclass(frozen=True)
class Sources:
    """Where a checkpoint names its special tokens."""

    published: PublishedConfig
    tokenizer: Any
    generation: PublishedConfig  # generation_config.json, {} without one

    def config_ids(self, role: str) -> list[int]:
        """The ids config.json gives for a role; some give several ends."""
        found = self.published.get(f"{role}_token_id")
        return found if isinstance(found, list) else [] if found is None else [found]

    def tokenizer_id(self, role: str) -> int | None:
        """The id the tokenizer gives for a role."""
        found: int | None = getattr(self.tokenizer, f"{role}_token_id", None)
        return found

    def id_of(self, *texts: str) -> int | None:
        """The id of the first of these token texts that the vocabulary has."""
        vocab = self.tokenizer.get_vocab() if self.tokenizer is not None else {}
        return next((vocab[text] for text in texts if text in vocab), None)

    def agreed(self, role: str) -> int | None:
        """The id config and tokenizer both name, or the one that is named."""
        named, own = self.config_ids(role), self.tokenizer_id(role)
        if named and own is not None and own not in named:
            raise DllmBenchError(
                f"config.json says {role}_token_id={self.published[f'{role}_token_id']}, the "
                f"tokenizer {own}; mend the checkpoint so that exactly one {role} token is named."
            )
        return own if own is not None else next(iter(named), None)

    def preferred(self, role: str) -> int | None:
        """The tokenizer's id (Dream's config names another BOS than it does), else config's."""
        own = self.tokenizer_id(role)
        return own if own is not None else next(iter(self.config_ids(role)), None)

    def ends(self) -> tuple[int, int | None]:
        """(end of text, end of a turn); a chat model's eos may be its turn's end."""
        eos, turn = self.agreed("eos"), self.id_of(*TURN_ENDS)
        if eos is None:
            raise DllmBenchError(
                "Neither config.json nor the tokenizer names an eos token; mend the checkpoint so "
                "that exactly one eos token is named."
            )
        more = self.generation.get("eos_token_id")
        named = [*self.config_ids("eos"), *(more if isinstance(more, list) else [])]
        others = [token for token in named if token != turn]
        return (others[0] if eos == turn and others else eos), turn

    def mask(self, text: str | None) -> int | None:
        """The id of the mask; `text`, where the model's yaml gives it, must be of that id."""
        named = self.agreed("mask")
        wanted = self.id_of(text) if text is not None else None
        if text is not None and wanted is None and self.tokenizer is not None:
            raise DllmBenchError(
                f"The model's yaml says mask_token: {text!r}, which is no token of the "
                f"checkpoint's tokenizer; correct mask_token."
            )
        if wanted is not None and named not in (None, wanted):
            raise DllmBenchError(
                f"The mask token {text!r} has id {wanted}, but the checkpoint says "
                f"mask_token_id={named}; use config.json and tokenizer of one checkpoint."
            )
        return wanted if named is None else named


def special_tokens(
    sources: Sources, vocab_size: int, mask_token: str | None = None, causal: bool = False
) -> SpecialTokens:
    """Ids by role; a disagreement of config and tokenizer on mask or eos is an error.

    A causal model needs no mask: an id no text uses stands for positions without a token.
    """
    eos, eot = sources.ends()
    pad, bos = sources.preferred("pad"), sources.preferred("bos")
    mask = sources.mask(mask_token)
    if mask is None and causal:
        mask = _unused(sources.tokenizer, vocab_size, {eos, eot, pad, bos})
    if mask is None or mask in (eos, eot):
        raise DllmBenchError(
            f"A masked diffusion model needs a mask token of its own, found mask={mask} beside "
            f"eos={eos} and eot={eot} in config.json and tokenizer; name its text with mask_token "
            f"in the model's yaml."
        )
    special = SpecialTokens(mask=mask, eos=eos, pad=pad, bos=bos, eot=eot)
    named = asdict(special).items()
    outside = [f"{role}={i}" for role, i in named if i is not None and not 0 <= i < vocab_size]
    if outside:
        raise DllmBenchError(
            f"Special ids {', '.join(outside)} lie outside of the model's {vocab_size} tokens; "
            f"use config.json and tokenizer of one checkpoint."
        )
    return special


def _unused(tokenizer: Any, vocab_size: int, taken: set[int | None]) -> int:
    """The last row of the embedding that the tokenizer does not use, else the last plain token."""
    used = set(tokenizer.get_vocab().values()) if tokenizer is not None else set()
    free = [i for i in range(vocab_size - 1, -1, -1) if i not in taken]
    return next((i for i in free if i not in used), free[0])


@dataclass(frozen=True)
class TextCodec:
    """A tokenizer with the model's habits: `chat` allows turns, `bos` is put before plain text,
    `thinking` is what the template is told about it.
    """

    name: str
    tokenizer: Any
    special: SpecialTokens
    chat: bool = False
    bos: bool = False
    thinking: bool | None = None

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
        told = {} if self.thinking is None else {"enable_thinking": self.thinking}
        prompt = self._tokenizer().apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, **told
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
