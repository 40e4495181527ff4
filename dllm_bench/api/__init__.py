"""What `import dllm_bench` offers, and the command line is built on; one module per subject."""
