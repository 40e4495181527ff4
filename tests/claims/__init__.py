"""Tests of `dllm_bench/claims`, the check of published statements against stored runs."""
