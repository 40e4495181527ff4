"""Module paths that runs of version 0.1 stored in place of registered names, for `convert_results`.

Until schema version 3 a stored specification named the class of every piece by its module path, and
that path entered the run hash. `upgraded` rewrites such a specification, which gives it today's
hash; `former` is the inverse, by which the earlier hash is checked. New pieces are never added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dllm_bench.registry import TARGET

FORMER_PATHS = {
    "benchmark.evalplus": "dllm_bench.benchmarks.evalplus.EvalPlusBenchmark",
    "benchmark.lm_eval": "dllm_bench.benchmarks.lm_eval.LmEvalBenchmark",
    "benchmark.prompts": "dllm_bench.benchmarks.prompts.PromptsBenchmark",
    "cache.block": "dllm_bench.decoding.cache.block.BlockCache",
    "cache.causal": "dllm_bench.decoding.cache.causal.CausalCache",
    "cache.dual": "dllm_bench.decoding.cache.dual.DualCache",
    "cache.none": "dllm_bench.decoding.cache.none.NoCache",
    "cache.prefix": "dllm_bench.decoding.cache.prefix.PrefixCache",
    "cache.vicinity": "dllm_bench.decoding.cache.vicinity.VicinityCache",
    "decoder.masked": "dllm_bench.decoding.masked.MaskedDecoder",
    "decoder.speculative": "dllm_bench.decoding.speculative.SpeculativeDecoder",
    "draft.adversarial": "dllm_bench.decoding.draft.adversarial.Adversarial",
    "draft.dflash": "dllm_bench.decoding.draft.dflash.DFlash",
    "draft.dspark": "dllm_bench.decoding.draft.dspark.DSpark",
    "draft.eagle3": "dllm_bench.decoding.draft.eagle3.Eagle3",
    "draft.model": "dllm_bench.decoding.draft.model.DraftModel",
    "draft.ngram": "dllm_bench.decoding.draft.ngram.NGram",
    "draft.none": "dllm_bench.decoding.draft.none.NoDraft",
    "draft.random": "dllm_bench.decoding.draft.random.RandomDraft",
    "drafter.block": "dllm_bench.models.drafters.TrainedBlock",
    "drafter.chain": "dllm_bench.models.drafters.TrainedChain",
    "drafter.model": "dllm_bench.models.drafters.SmallModel",
    "explore.greedy": "dllm_bench.decoding.explore.greedy.Greedy",
    "explore.lookahead": "dllm_bench.decoding.explore.lookahead.Lookahead",
    "filter.learned": "dllm_bench.models.filters.LearnedFilter",
    "length.asynchronous": "dllm_bench.decoding.length.asynchronous.Asynchronous",
    "length.fixed": "dllm_bench.decoding.length.fixed.Fixed",
    "length.hardware_aware": "dllm_bench.decoding.length.hardware_aware.HardwareAware",
    "length.read_step_profile": "dllm_bench.decoding.length.profile.read_profile",
    "length.read_temperatures": "dllm_bench.decoding.length.chances.read_temperatures",
    "length.step_profile": "dllm_bench.decoding.length.profile.StepProfile",
    "length.temperatures": "dllm_bench.decoding.length.chances.Temperatures",
    "length.threshold": "dllm_bench.decoding.length.threshold.Threshold",
    "model.served": "dllm_bench.serving.engine.Engine",
    "schedule.blocks": "dllm_bench.decoding.schedule.blocks.Blocks",
    "schedule.pipeline": "dllm_bench.decoding.schedule.pipeline.Pipeline",
    "score.confidence": "dllm_bench.decoding.score.confidence.Confidence",
    "score.credit": "dllm_bench.decoding.score.credit.Credit",
    "score.gumbel": "dllm_bench.decoding.score.gumbel.Gumbel",
    "score.margin": "dllm_bench.decoding.score.margin.Margin",
    "score.neg_entropy": "dllm_bench.decoding.score.neg_entropy.NegEntropy",
    "score.sampled": "dllm_bench.decoding.score.sampled.Sampled",
    "select.epsilon": "dllm_bench.decoding.select.epsilon.Epsilon",
    "select.factor": "dllm_bench.decoding.select.factor.Factor",
    "select.filter": "dllm_bench.decoding.select.filter.Filter",
    "select.first_of_block": "dllm_bench.decoding.select.first_of_block.FirstOfBlock",
    "select.hierarchy": "dllm_bench.decoding.select.hierarchy.Hierarchy",
    "select.oracle": "dllm_bench.decoding.select.oracle.Oracle",
    "select.origin": "dllm_bench.decoding.select.origin.Origin",
    "select.ration": "dllm_bench.decoding.select.ration.Ration",
    "select.threshold": "dllm_bench.decoding.select.threshold.Threshold",
    "select.topk": "dllm_bench.decoding.select.topk.TopK",
    "select.union": "dllm_bench.decoding.select.union.Union",
    "stop.any_of": "dllm_bench.decoding.stop.any_of.AnyOf",
    "stop.budget": "dllm_bench.decoding.stop.budget.Budget",
    "stop.eos": "dllm_bench.decoding.stop.eos.Eos",
    "stop.eotp": "dllm_bench.decoding.stop.eotp.EndOfTextPrediction",
    "stop.filled": "dllm_bench.decoding.stop.filled.Filled",
    "verify.greedy_match": "dllm_bench.decoding.verify.greedy_match.GreedyMatch",
    "verify.rejection": "dllm_bench.decoding.verify.rejection.Rejection",
}
"""Registered name -> module path under which stored runs named it."""

NAMES = {path: name for name, path in FORMER_PATHS.items()}


def upgraded(plain: Any) -> Any:
    """Stored plain data with registered names in place of module paths, at any depth."""
    return _renamed(plain, NAMES)


def former(plain: Any) -> Any:
    """Plain data with module paths as they were stored, the inverse of `upgraded`."""
    return _renamed(plain, FORMER_PATHS)


def _renamed(plain: Any, names: Mapping[str, str]) -> Any:
    if isinstance(plain, Mapping):
        return {
            key: names.get(value, value)
            if key == TARGET and isinstance(value, str)
            else _renamed(value, names)
            for key, value in plain.items()
        }
    if isinstance(plain, (list, tuple)):
        return [_renamed(value, names) for value in plain]
    return plain
