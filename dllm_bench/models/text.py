"""Text to token ids and back (`TextCodec`), and the special tokens of a checkpoint.

Plain text is encoded as it is, with a BOS token if the model's yaml asks for one; chat turns go
through the checkpoint's template; nothing else is added. Ids of special tokens come from
config.json and the tokenizer, which must agree on the mask and the end of text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dllm_bench.core.benchmark import Turns
from dllm_bench.core.declared import fits, refusal
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import SpecialTokens
from dllm_bench.models.adapters import PublishedConfig

TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|role_end|>", "<turn|>", "<end_of_turn>", "<|eot|>")
"""Of LLaDA, Llama; Dream, SDAR, Qwen; LLaDA-MoE, LLaDA2; Gemma (2); embedded models."""
VOCABULARIES = ("tokenizer.json", "vocab.json")  # added_tokens.json lists but a few tokens
FILES = (*VOCABULARIES, "merges.txt", "added_tokens.json")
SETTINGS = (
    "tokenizer_config.json special_tokens_map.json chat_template.jinja generation_config.json"
).split()


MAX_FILE_BYTES = 128 * 2**20
"""Of a JSON or text file of a checkpoint; the largest known tokenizer.json has 35 MB."""
MAX_PROMPT_CHARACTERS = 2**24
"""Of what a chat template may make; the tokenizer needs many times their memory."""
SHOWN_CHARACTERS = 500  # of an error of another library
FETCH_AGAIN = "fetch the tokenizer's files again"
GIVE_UNICODE = f"give texts of valid Unicode, or {FETCH_AGAIN}"
MAX_ADDED_TOKENS = 50_000
"""That a tokenizer's files may list beside its vocabulary; the most known are 6,415."""
ADDED = ("added_tokens", "added_tokens_decoder", "additional_special_tokens")


def require_regular(path: Path) -> None:
    """Raise DllmBenchError unless a path is a regular file of at most `MAX_FILE_BYTES`."""
    if not path.is_file():
        raise DllmBenchError(
            f"{path} is to be read and is no regular file (a device, a pipe or a folder); fetch "
            "the checkpoint again."
        )
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise DllmBenchError(
            f"{path} has {size:,} bytes, and at most {MAX_FILE_BYTES:,} are read; fetch it again."
        )


def _check_tokenizer_files(folder: Path) -> None:
    """Raise DllmBenchError for files that are not regular, too large, or list too many tokens."""
    for path in (folder / name for name in (*FILES, *SETTINGS)):
        if not path.exists():
            continue
        require_regular(path)
        if path.suffix != ".json" or path.name == "vocab.json":
            continue
        with suppress(ValueError, RecursionError):  # the library names what is no JSON
            listed = _added_tokens(path.name, json.loads(path.read_text(encoding="utf-8")))
            if listed > MAX_ADDED_TOKENS:
                raise DllmBenchError(
                    f"{path} lists {listed:,} added tokens, and at most {MAX_ADDED_TOKENS:,} are "
                    "read; fetch it again."
                )


def _added_tokens(file: str, content: Any) -> int:
    if not isinstance(content, dict):
        return 0
    lists = [content] if file == "added_tokens.json" else [content.get(key) for key in ADDED]
    return sum(len(one) for one in lists if isinstance(one, (list, dict)))


@contextmanager
def library_errors_named(failed: str, todo: str) -> Iterator[None]:
    """Turn an error of any kind into a DllmBenchError: what does not fit fails anywhere in a
    library. So does a panic of the tokenizers library, which is no Exception.

    failed: what could not be done. todo: what to do, without a full stop.
    """
    try:
        yield
    except DllmBenchError:
        raise
    except BaseException as error:
        # pyo3 makes the class of panics, no module exports it
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        found = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DllmBenchError(f"{failed} ({found[:SHOWN_CHARACTERS]}); {todo}.") from error


def read_tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer, without running code of the checkpoint; None if it has
    none."""
    _check_tokenizer_files(folder)
    if not any((folder / name).is_file() for name in VOCABULARIES):
        return None
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer  # slow to import

    single_file = (folder / "tokenizer.json").is_file()
    kind = PreTrainedTokenizerFast if single_file else Qwen2Tokenizer  # vocab.json, merges.txt
    with library_errors_named(f"The tokenizer in {folder} cannot be read", FETCH_AGAIN):
        return kind.from_pretrained(str(folder), trust_remote_code=False)


def read_token_texts(folder: Path) -> Callable[[Sequence[int]], str] | None:
    """Return a function that decodes token ids as `read_tokenizer`'s does, special tokens included.

    It is read without transformers, which takes seconds to import. None if tokenizer.json does not
    hold all tokens.
    """
    from tokenizers import Tokenizer

    _check_tokenizer_files(folder)
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    # `read_tokenizer` says what is wrong with a file
    failed = f"The tokenizer in {folder} cannot be read"
    with library_errors_named(failed, FETCH_AGAIN), suppress(Exception):
        tokenizer = Tokenizer.from_file(str(file))
        plain = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
        added = [int(key) for key in plain.get("added_tokens_decoder", {})]
        if all(tokenizer.id_to_token(token) is not None for token in added):
            return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    return None


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder that decide how text becomes ids."""
    return [folder / name for name in (*FILES, *SETTINGS) if (folder / name).is_file()]


@dataclass(frozen=True)
class SpecialTokenSources:
    """The three places where a checkpoint names its special tokens."""

    published: PublishedConfig
    """config.json."""
    tokenizer: Any
    """The tokenizer, None without one."""
    generation: PublishedConfig
    """generation_config.json, {} without one."""

    def config_ids(self, role: str) -> list[int]:
        """Return the ids config.json gives for a role; some checkpoints give several eos ids."""
        return _listed_ids("config.json", self.published, f"{role}_token_id")

    def id_of(self, *texts: str) -> int | None:
        """Return the id of the first of these token texts that is in the vocabulary."""
        vocab = self.tokenizer.get_vocab() if self.tokenizer is not None else {}
        return next((vocab[text] for text in texts if text in vocab), None)

    def agreed(self, role: str) -> int | None:
        """Return the id of a role; DllmBenchError if config.json and the tokenizer name different
        ones."""
        config_ids, found = self.config_ids(role), self.preferred(role)
        if config_ids and found not in config_ids:
            raise DllmBenchError(
                f"config.json says {role}_token_id={self.published[f'{role}_token_id']}, the "
                f"tokenizer {found}; change the checkpoint's files so that exactly one {role} "
                f"token is named."
            )
        return found

    def preferred(self, role: str) -> int | None:
        """Return the tokenizer's id (Dream's config.json names another BOS), else that of
        config.json."""
        own: int | None = getattr(self.tokenizer, f"{role}_token_id", None)
        return own if own is not None else next(iter(self.config_ids(role)), None)

    def ends(self) -> tuple[int, int | None]:
        """Return (end of text, end of a turn); if eos ends a turn, another eos id ends the text."""
        eos, turn = self.preferred("eos"), self.id_of(*TURN_ENDS)
        if turn not in (eos, *self.config_ids("eos")):  # else each may name one of the two ends
            self.agreed("eos")
        if eos is None:
            raise DllmBenchError(
                "Neither config.json nor the tokenizer names an eos token; change the checkpoint's "
                "files so that exactly one eos token is named."
            )
        generated = _listed_ids("generation_config.json", self.generation, "eos_token_id")
        ends = [eos, *self.config_ids("eos"), *generated]
        return next((token for token in ends if token != turn), eos), turn

    def mask(self, text: str | None) -> int | None:
        """Return the id of the mask; `text` (`mask_token` in the model's yaml) must be the text of
        it."""
        agreed = self.agreed("mask")
        if text is None or self.tokenizer is None:
            return agreed
        wanted = self.id_of(text)
        if wanted is None:
            raise DllmBenchError(
                f"mask_token is {text!r}, which is no token of the model's tokenizer; correct it."
            )
        if agreed not in (None, wanted):
            raise DllmBenchError(
                f"The mask token {text!r} has id {wanted}, but the checkpoint says "
                f"mask_token_id={agreed}; use config.json and tokenizer of one checkpoint."
            )
        return wanted


def _listed_ids(file: str, config: PublishedConfig, key: str) -> list[int]:
    """Return the id or the list of ids that a file gives for a key, [] without one."""
    given = config.get(key)
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not fits(ids, list[int]):
        raise refusal(file, key, int, given)
    return ids


def special_tokens(
    sources: SpecialTokenSources,
    vocab_size: int,
    mask_token: str | None = None,
    maskless: bool = False,
) -> SpecialTokens:
    """Return ids of the special tokens; DllmBenchError where the sources disagree on mask or eos.

    A model without a mask (`MASKLESS`) gets an id that no text uses, for positions without a token.
    """
    eos, eot = sources.ends()
    pad, bos = sources.preferred("pad"), sources.preferred("bos")
    mask = sources.mask(mask_token)
    if mask is None and maskless:
        mask = _unused(sources.tokenizer, vocab_size, {eos, eot, pad, bos})
    if mask is None or mask in (eos, eot):
        raise DllmBenchError(
            f"A masked diffusion model needs a mask token of its own, found mask={mask} with "
            f"eos={eos} and eot={eot} in config and tokenizer; name its text: "
            f"model.mask_token=TEXT, or mask_token=TEXT in Python."
        )
    special = SpecialTokens(mask=mask, eos=eos, pad=pad, bos=bos, eot=eot)
    ids = asdict(special).items()
    outside = [f"{role}={i}" for role, i in ids if i is not None and not 0 <= i < vocab_size]
    if outside:
        raise DllmBenchError(
            f"Special ids {', '.join(outside)} lie outside of the model's {vocab_size} tokens; "
            f"use config.json and tokenizer of one checkpoint."
        )
    return special


def _unused(tokenizer: Any, vocab_size: int, taken: set[int | None]) -> int:
    """Return the last id that the tokenizer does not use; if it uses all, the last not in
    `taken`."""
    used = set(tokenizer.get_vocab().values()) if tokenizer is not None else set()
    free = set(range(vocab_size)) - taken
    return max(free - used or free)


@dataclass(frozen=True)
class TextCodec:
    """A tokenizer, used as the model's yaml says."""

    name: str
    """Name of the model, for messages."""
    tokenizer: Any
    """A tokenizer of transformers, None if the checkpoint has none."""
    special: SpecialTokens
    """Ids of the special tokens."""
    chat: bool = False
    """Whether prompts may be chat turns."""
    bos: bool = False
    """Whether plain text begins with BOS."""
    thinking: bool | None = None
    """`enable_thinking` for the chat template; None does not pass it."""

    def __post_init__(self) -> None:
        if self.chat and self.tokenizer is not None and not self.tokenizer.chat_template:
            raise DllmBenchError(
                f"Model {self.name!r} has chat: true, but its tokenizer has no chat template; set "
                f"chat: false or add chat_template.jinja."
            )
        if self.bos and self.special.bos is None:
            raise DllmBenchError(
                f"Model {self.name!r} has bos: true, and no file names a BOS token; set bos: false."
            )

    @property
    def template_sha256(self) -> str | None:
        """sha256 of the chat template; None if the model takes plain text only."""
        if not self.chat:
            return None
        todo = "add chat_template.jinja, or set chat: false"
        with library_errors_named(f"Model {self.name!r} has no default chat template", todo):
            return hashlib.sha256(self._tokenizer().get_chat_template().encode()).hexdigest()

    def encode(self, text: str | Turns) -> list[int]:
        """Return the prompt ids of plain text, or of chat turns and the start of the assistant's
        turn.

        A last turn of the assistant is the beginning of its answer, which is continued.
        """
        if isinstance(text, str):
            start = [self.special.bos] if self.bos and self.special.bos is not None else []
            return start + self._plain(text)
        if not self.chat:
            raise DllmBenchError(
                f"Model {self.name!r} was given chat turns to encode, but has chat: false; give "
                f"plain text or choose an instruct model."
            )
        turns = [dict(turn) for turn in text]
        options = {} if self.thinking is None else {"enable_thinking": self.thinking}
        begun = bool(turns) and turns[-1].get("role") == "assistant"
        how = {"continue_final_message" if begun else "add_generation_prompt": True}
        failed = f"The chat template of model {self.name!r} does not take these turns"
        with library_errors_named(failed, "give turns that it takes, or set chat: false"):
            prompt = self._tokenizer().apply_chat_template(turns, tokenize=False, **how, **options)
            if len(prompt) > MAX_PROMPT_CHARACTERS:
                raise ValueError(f"it makes {len(prompt):,} characters of them")
        return self._plain(prompt)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        return self.decode_visibly(ids, skip_special_tokens=True)

    def decode_visibly(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids, special tokens included."""
        with library_errors_named(f"Model {self.name!r} cannot decode its tokens", FETCH_AGAIN):
            decode = partial(self._tokenizer().decode, clean_up_tokenization_spaces=False)
            return str(decode(list(ids), skip_special_tokens=skip_special_tokens))

    def _plain(self, text: str) -> list[int]:
        with library_errors_named(f"Model {self.name!r} cannot encode a text", GIVE_UNICODE):
            return list(self._tokenizer().encode(text, add_special_tokens=False))

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise DllmBenchError(
                f"Model {self.name!r} has no tokenizer files; add tokenizer.json and its config."
            )
        return self.tokenizer
