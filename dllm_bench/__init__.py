"""dllm-bench: reproducible measurement of decoding methods for diffusion language models."""

__version__ = "0.2.0"
DECODING_VERSION = 2  # raised with every change that alters the tokens a decoder produces
