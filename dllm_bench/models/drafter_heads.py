"""DSpark's small heads (§3.1): what the token before a slot says about the slot.

W1 embeds a token in rank r, W2 turns r numbers into logits. Markov: bias = W2 W1[x]. Gated: W1[x]
is scaled by sigmoid(Wg [h; W1[x]]). RNN: z = [s; W1[x]; h] gives gate, candidate and output; the
bias is W2 tanh(o), from the state before the update. `ConfidenceHead`: how likely a token survives.
All work on any leading dimensions, so that training can run them over blocks at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

State = Tensor | None


class MarkovHead(nn.Module):
    """The default: a transition table of low rank."""

    def __init__(self, vocabulary: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)

    def forward(self, token: Tensor, hidden_D: Tensor, state: State) -> tuple[Tensor, State]:
        """Bias (V,) of a slot with hidden state h after `token`, and the state after the slot."""
        return self.markov_w2(self.markov_w1(token)), None


class GatedHead(MarkovHead):
    """The transition looks at the slot too (released code, not in the paper)."""

    def __init__(self, vocabulary: int, rank: int, hidden: int) -> None:
        super().__init__(vocabulary, rank, hidden)
        self.gate_proj = nn.Linear(hidden + rank, rank)

    def gate(self, token: Tensor, hidden_D: Tensor) -> Tensor:
        """How much of each of the r numbers passes."""
        return self.gate_proj(torch.cat([hidden_D, self.markov_w1(token)], dim=-1)).sigmoid()

    def forward(self, token: Tensor, hidden_D: Tensor, state: State) -> tuple[Tensor, State]:
        return self.markov_w2(self.gate(token, hidden_D) * self.markov_w1(token)), None


class RnnHead(MarkovHead):
    """A recurrent state sees the whole drafted prefix; it begins at 0."""

    def __init__(self, vocabulary: int, rank: int, hidden: int) -> None:
        super().__init__(vocabulary, rank, hidden)
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(self, token: Tensor, hidden_D: Tensor, state: State) -> tuple[Tensor, State]:
        embedded = self.markov_w1(token)
        if state is None:
            state = torch.zeros_like(embedded)
        joint = self.joint_proj(torch.cat([state, embedded, hidden_D], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        state = gate * state + (1 - gate) * candidate.tanh()
        return self.markov_w2(output.tanh()), state


HEADS: Mapping[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedHead,
    "rnn": RnnHead,
}


class ConfidenceHead(nn.Module):
    """Logit of survival from [h; W1[x]], or from h alone where rank is 0."""

    def __init__(self, hidden: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden + rank, 1)

    def forward(self, *parts: Tensor) -> Tensor:
        logit: Tensor = self.proj(torch.cat(parts, dim=-1))[..., 0]
        return logit
