"""Run a decoder at several thresholds, read the runs as a DataFrame, plot score over speed."""

import matplotlib

matplotlib.use("Agg")
import dllm_bench as db

for tau in (0.5, 0.7, 0.9):
    settings = {"limit": 8, "benchmark.max_new_tokens": 64, "decoder.select.tau": tau}
    db.run("tiny-llada", "fast_dllm", "minigsm", **settings)  # into ./results; looked up if there

runs = db.records().sort_values("decoder.select.tau")
print(runs[["decoder.select.tau", "tpf/emitted", "score"]].to_string(index=False))
runs.to_parquet("sweep.parquet")

axes = runs.plot("tpf/emitted", "score", marker="o", legend=False, ylabel="score")
for _, run in runs.iterrows():
    axes.annotate(f"τ = {run['decoder.select.tau']}", (run["tpf/emitted"], run["score"]))
axes.figure.savefig("sweep.png")
