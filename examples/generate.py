"""Decode a prompt with a model that ships with the package, and see what it took."""

import dllm_bench as db

model = db.load_model("tiny-llada")
decoder = db.decoder("lopa_dream", **{"select.tau": 0.8})
prompts = [
    "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:",
    "Question: Ana reads 5 pages a day for 3 days. How many pages does she read?\nAnswer:",
]


def show(committed):
    print(f"forward {committed.forward}: {len(committed.ids)} tokens")


for completion in db.generate(model, prompts, decoder, max_new_tokens=64, on_commit=show):
    print(completion.text)
    print(f"{completion.metrics()['tpf/emitted']:.2f} tokens per forward")
