"""Token pools and batches for training the embedded models.

A pool holds the tokenised train split of one task: prompt, answer, then EOS up to the end. A batch
draws rows that fit a length L and fills them with EOS, so there is no padding to hide from
attention. Drill rows hold bare equations or facts. Objectives are in `objectives.py`.

Shapes: B rows of a batch, L positions of a row, S sentences of a drill row (6 tokens each), E
equations, P people, F facts; in a pool N rows of W positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scripts.embedded.items import task_pairs
from scripts.embedded.tasks import minigsm, miniread
from scripts.embedded.tokenizer import build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RESULT = 4  # column of an equation's result, and of the word to recall in a fact


@dataclass(frozen=True)
class Pool:
    """Rows sorted by length."""

    ids_NW: Tensor
    """int16, EOS after the answer."""
    prompt_N: Tensor
    """Tokens of the prompt."""
    total_N: Tensor
    """Tokens of prompt and answer, without EOS."""

    def fitting(self, length: int) -> int:
        """Return the number of rows, the shortest ones, that leave room for an EOS in `length`."""
        return int((self.total_N < length).sum())


@dataclass(frozen=True)
class Batch:
    """Rows of one length, of several tasks and drills."""

    ids_BL: Tensor
    """int64."""
    prompt_B: Tensor
    """Where the answer starts; 0 in a drill."""
    total_B: Tensor
    """Where the answer ends (exclusive) and EOS starts."""
    drill_B: Tensor
    """Whether the row is a drill."""
    asked_BL: Tensor
    """Tokens that a drill asks for; False in other rows."""


def chat_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """Return the plain prompt as a user turn, followed by the start of the assistant's turn."""
    turns = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))


def make_pool(pairs: list[tuple[str, str]], chat: bool) -> Pool:
    """Tokenise pairs into a pool, with the whole vocabulary (its later pieces do not change the
    tokens of the first tasks).
    """
    tokenizer = build_tokenizer(chat)
    backend = tokenizer.backend_tokenizer
    if chat:
        pairs = [(chat_prompt(tokenizer, prompt), answer) for prompt, answer in pairs]
    prompts = [e.ids for e in backend.encode_batch([p for p, _ in pairs], add_special_tokens=False)]
    answers = [e.ids for e in backend.encode_batch([a for _, a in pairs], add_special_tokens=False)]
    order = sorted(range(len(pairs)), key=lambda i: len(prompts[i]) + len(answers[i]))
    widest = len(prompts[order[-1]]) + len(answers[order[-1]])
    ids_NW = torch.full((len(pairs), widest), tokenizer.eos_token_id, dtype=torch.int16)
    for row, i in enumerate(order):
        line = prompts[i] + answers[i]
        ids_NW[row, : len(line)] = torch.tensor(line, dtype=torch.int16)
    prompt_N = torch.tensor([len(prompts[i]) for i in order])
    return Pool(ids_NW, prompt_N, prompt_N + torch.tensor([len(answers[i]) for i in order]))


def load_pool(task: str, count: int, seed: int, chat: bool, cache: Path | None) -> Pool:
    """Return the training pool of a task; the folder `cache` keeps it for later trainings."""
    path = cache / f"{task}-{count}-{seed}-{int(chat)}.pt" if cache else None
    if path and path.exists():
        return Pool(**torch.load(path))
    pool = make_pool(task_pairs(task, "train", count, seed), chat)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(vars(pool), path)
    return pool


def draw_rows(
    pool: Pool, count: int, length: int, rng: torch.Generator, eos: int, prefer_long: bool
) -> Batch:
    """Return `count` random rows of a pool that fit `length`, filled with EOS.

    Drawn uniformly, or with a preference for long ones.
    """
    fitting = pool.fitting(length)
    if prefer_long:
        rows = (torch.rand(count, generator=rng).sqrt() * fitting).long()
    else:
        rows = torch.randint(fitting, (count,), generator=rng)
    ids_BL = torch.full((count, length), eos, dtype=torch.int64)
    width = min(length, pool.ids_NW.shape[1])
    ids_BL[:, :width] = pool.ids_NW[rows, :width].long()
    nothing_BL = torch.zeros_like(ids_BL, dtype=torch.bool)
    return Batch(ids_BL, pool.prompt_N[rows], pool.total_N[rows], nothing_BL[:, 0], nothing_BL)


SMALL_OPERANDS = {"+": range(1, 21), "-": range(1, 21), "*": range(2, 6)}
ALL_OPERANDS = {"+": range(1, 100), "-": range(1, 100), "*": range(2, 50)}
"""Operation -> second operands that occur in minigsm, and in minimath."""


def equation_table(
    tokenizer: PreTrainedTokenizerFast, operands: Mapping[str, range] = SMALL_OPERANDS
) -> Tensor:
    """Return all equations as tokens (E, 6): ` a op b = c.` with the result at column `RESULT`."""
    lines = []
    for op, rights in operands.items():
        for left in range(minigsm.MAX_VALUE + 1):
            for right in rights:
                result = minigsm.apply_op(op, left, right)
                if 0 <= result <= minigsm.MAX_VALUE:
                    lines.append(f" {left} {op} {right} = {result}.")
                    if op != "-":
                        lines.append(f" {right} {op} {left} = {result}.")
    return torch.tensor(tokenizer(lines).input_ids)


def draw_drills(
    equations_E6: Tensor, count: int, length: int, rng: torch.Generator, eos: int
) -> Batch:
    """Drill rows of random equations, which ask for the results."""
    per_row = (length - 1) // 6
    pick = torch.randint(len(equations_E6), (count, per_row), generator=rng)
    asked_BS6 = (torch.arange(6) == RESULT).expand(count, per_row, 6)
    return _drill(equations_E6[pick], asked_BS6, length, eos)


def fact_table(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return all facts about people as tokens (P, 4 forms, F, 6).

    The forms are ` So Ann has 5 cups.`, ` Ann lives near the mill.`, and the same two reversed:
    ` The 5 cups has Ann.` and ` The mill near has Ann.`. The word to recall is at column `RESULT`.
    """
    things = [f"{n} {item}" for n in range(*miniread.COUNTS) for item in miniread.ITEMS]
    places = [(side, name) for side in miniread.SIDES for name in miniread.BUILDINGS]
    facts = list(zip(things, cycle(places), strict=False))
    lines = [
        (
            [f" So {who} has {own}." for own, _ in facts],
            [f" {who} lives {side} the {name}." for _, (side, name) in facts],
            [f" The {own} has {who}." for own, _ in facts],
            [f" The {name} {side} has {who}." for _, (side, name) in facts],
        )
        for who in miniread.NAMES
    ]
    return torch.tensor(
        [[tokenizer(sentences).input_ids for sentences in forms] for forms in lines]
    )


def draw_recalls(
    facts_P4F6: Tensor, count: int, length: int, rng: torch.Generator, eos: int
) -> Batch:
    """Drill rows that repeat a few facts in random order and form; they ask for the last two words
    of every fact that the row has stated before.
    """
    per_row = (length - 1) // 6
    people, _, facts, _ = facts_P4F6.shape
    chosen = max(2, per_row // 4)  # people of a row, two facts each
    who_BT = torch.rand(count, people, generator=rng).argsort(1)[:, :chosen].repeat(1, 2)
    fact_BT = torch.randint(facts, who_BT.shape, generator=rng)
    pick_BS = torch.randint(2 * chosen, (count, per_row), generator=rng)
    form_BS = pick_BS // chosen + 2 * torch.randint(2, pick_BS.shape, generator=rng)
    who_BS, fact_BS = who_BT.gather(1, pick_BS), fact_BT.gather(1, pick_BS)
    again_BS = (pick_BS[:, :, None] == pick_BS[:, None]).tril(-1).any(2)
    asked_6 = torch.tensor([column in (RESULT - 1, RESULT) for column in range(6)])
    asked_BS6 = again_BS[:, :, None] & asked_6
    return _drill(facts_P4F6[who_BS, form_BS, fact_BS], asked_BS6, length, eos)


def _drill(sentences_BS6: Tensor, asked_BS6: Tensor, length: int, eos: int) -> Batch:
    """Drill rows of these sentences, filled with EOS."""
    count, width = len(sentences_BS6), sentences_BS6.shape[1] * sentences_BS6.shape[2]
    ids_BL = torch.full((count, length), eos, dtype=torch.int64)
    asked_BL = torch.zeros((count, length), dtype=torch.bool)
    ids_BL[:, :width], asked_BL[:, :width] = sentences_BS6.flatten(1), asked_BS6.flatten(1)
    ends = torch.full((count,), width)
    every_B = torch.ones(count, dtype=torch.bool)
    return Batch(ids_BL, torch.zeros_like(ends), ends, every_B, asked_BL)


def join(batches: list[Batch]) -> Batch:
    """Return the rows of all batches, which have one length, as one batch."""
    fields = ("ids_BL", "prompt_B", "total_B", "drill_B", "asked_BL")
    return Batch(*(torch.cat([getattr(b, name) for b in batches]) for name in fields))
