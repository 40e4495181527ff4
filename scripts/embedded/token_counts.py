"""Count the tokens of the embedded models' training text, for PC-Sampler's score.

`python -m scripts.embedded.token_counts` writes `assets/token_counts/embedded.json`, in the form in
which PC-Sampler's authors release theirs: 1,000 problems of the train split of each task.
"""

from __future__ import annotations

import json
from collections import Counter

from dllm_bench.paths import assets_dir
from dllm_bench.training.prompts import TASKS, train_pairs
from scripts.embedded.tokenizer import build_tokenizer

PER_TASK, SEED = 1000, 1


def main() -> None:
    """Count and write."""
    tasks, tokenizer = sorted(TASKS), build_tokenizer()
    counts: Counter[int] = Counter()
    for prompt, answer in train_pairs(tasks, PER_TASK * len(tasks), SEED):
        counts.update(tokenizer(prompt + answer, add_special_tokens=False)["input_ids"])
    stored = {
        "num_token": counts.total(),
        "p_baseline_dict": {str(token): counts[token] for token in sorted(counts)},
    }
    path = assets_dir() / "token_counts" / "embedded.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(stored) + "\n")


if __name__ == "__main__":
    main()
