"""A benchmark of your own: what to ask, and how to grade the answers."""

import dllm_bench as db
from dllm_bench.core.benchmark import Benchmark, SampleScore
from dllm_bench.core.request import Request

SUMS = {f"sums/{a}+{b}": (a, b) for a in range(2, 6) for b in range(2, 4)}


class Sums(Benchmark):
    """Small sums; an answer is right if it holds the sum."""

    name = "sums"

    def requests(self, encode):
        texts = {key: f"Question: What is {a} + {b}?\nAnswer:" for key, (a, b) in SUMS.items()}
        return [Request(key, tuple(encode(text)), 32, (), text) for key, text in texts.items()]

    def dataset_hash(self):
        return "sums of 2 to 5 and 2 to 3"

    def score(self, texts):
        right = {key: str(sum(SUMS[key])) in text for key, text in texts.items()}
        return {key: SampleScore(float(ok), "", {"right": ok}) for key, ok in right.items()}


records = [db.evaluate("tiny-llada", name, Sums()) for name in ("vanilla", "fast_dllm")]
for record in records:
    print(f"{record.score.mean:.2f} right, {record.summary['tpf/emitted']:.2f} tokens per forward")
print(db.compare(*records))
