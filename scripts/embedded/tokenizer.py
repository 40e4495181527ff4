"""The tokenizer of the embedded models.

Unigram with one token per word (leading space included) and per number 0 to 99, and byte fallback,
so that any text encodes and decodes without loss. Every model folder holds a copy in the format of
Hugging Face tokenizers, which is what the package loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MASK, EOS, EOT, PAD, BOS = "<|mask|>", "<|endoftext|>", "<|eot|>", "<|pad|>", "<|bos|>"
USER, ASSISTANT, UNK = "<|user|>", "<|assistant|>", "<|unk|>"
SPECIALS = (MASK, EOS, EOT, PAD, BOS, USER, ASSISTANT, UNK)
BYTES = tuple(f"<0x{b:02X}>" for b in range(256))
PUNCTUATION = ("\n", "    ", "        ", '"""', "####", *"()[],.:?")
SPACED_SYMBOLS = (" %", " *", " +", " -", " <", " =", " ==", " >", " [")
BARE_WORDS = """
Answer Change If Keep Question Return Start a b c def if r return x xs y ys zs
""".split()
SPACED_WORDS = """
Add Amy Ann Ben Cap Change Dan Eva He How If Ivy Keep Leo Max Mia Multiply Raise Reduce Return Sam
She Start Subtract Then Tom Zoe a apples apply are as at b books borrows breaks build buys by c calc
cards change coins collects combine compute count cups does drops each earns eggs else end equal
exchanges finds for gets gives greater has have he hides if in is item items largest least len lends
less loses makes many marbles max min minus modulo more most now of otherwise owns pens picks plus
process r return run sells she shells smallest so solve stamps starts stones sum swaps than the them
there throws tickets times to trades uses when wins with work x xs y ys zs
""".split()
NUMBERS = tuple(str(n) for n in range(100))
DIGITS = NUMBERS[:10]
HEX = tuple("<>ABCDEF")
"""With "x" and the digits these spell `<0x41>`, so that such a text is not read as a byte."""
LATER_BARE = ("}", *"Compute Find Passage Problem Rule Solution What".split())
LATER_SPACED = (" \\boxed{", " (", " )", " @")
LATER_WORDS = """
A Apply B C D Drop Move Remove Reverse So Swap The Turn What Where Which Who and answer becomes
behind beside black blue bridge church do first green home into last list live lives market means
mill near new old or people red rule school small tall together tower unanswerable under white
yellow
""".split()
"""Words of minimath, miniread and minirule; models made before these tasks lack later pieces."""
BYTE_SCORE, PIECE_SCORE = -100.0, -1.0

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'user' %}{{ '<|eot|>' }}{% else %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The user turn is exactly the plain prompt, the assistant turn the gold answer and EOS."""


def first_pieces() -> list[str]:
    """Return the first vocabulary in id order: specials, bytes, punctuation, words, numbers.

    Never change it: shipped models depend on it.
    """
    words = [*PUNCTUATION, *SPACED_SYMBOLS, *BARE_WORDS, *(" " + w for w in SPACED_WORDS)]
    return [*SPECIALS, *BYTES, *words, *(" " + n for n in NUMBERS), *DIGITS, *HEX]


def later_pieces() -> list[str]:
    """Pieces added with later tasks, in id order. Append only."""
    return [*LATER_BARE, *LATER_SPACED, *(" " + word for word in LATER_WORDS)]


def pieces() -> list[str]:
    """Return the whole vocabulary in id order; it begins with that of the older models."""
    return first_pieces() + later_pieces()


def build_tokenizer(chat: bool = False, first: bool = False) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the embedded models; `chat` adds the chat template.

    `first` leaves out the later pieces. All words have the same score, so a text is cut into as few
    pieces as possible.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = first_pieces() if first else pieces()
    scores = [BYTE_SCORE if p in BYTES else PIECE_SCORE for p in vocab]
    model = models.Unigram(
        list(zip(vocab, scores, strict=True)), vocab.index(UNK), byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, bos_token=BOS, unk_token=UNK,
        mask_token=MASK, clean_up_tokenization_spaces=False, padding_side="left",
        model_max_length=2048,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE if chat else None
    return fast
