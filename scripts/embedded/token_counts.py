"""Count the tokens of the embedded models' training text, for PC-Sampler's score.

`python -m scripts.embedded.token_counts` writes `assets/token_counts/embedded.json`, in the form in
which PC-Sampler's authors release theirs: 1,000 problems of the train split of each task.
"""

from __future__ import annotations

import json
from collections import Counter

from dllm_bench.paths import assets_dir
from scripts.embedded.items import TRAINED, task_pairs
from scripts.embedded.tokenizer import build_tokenizer

PER_TASK, SEED = 1000, 1


def main() -> None:
    """Count and write."""
    counts, tokenizer = Counter[int](), build_tokenizer()
    for task in TRAINED:
        for prompt, answer in task_pairs(task, "train", PER_TASK, SEED):
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
