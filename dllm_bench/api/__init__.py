"""The public functions of `import dllm_bench`, which the command line uses too; one module per
subject."""
