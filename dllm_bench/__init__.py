"""dllm-bench: reproducible measurement of decoding methods for diffusion language models.

`import dllm_bench as db` offers what the command line does, for models and decoders as objects; see
docs/python.md. The functions are imported when they are first used, so the import takes no time.
Their types are in `__init__.pyi`.
"""

import importlib
from typing import Any

__version__ = "0.2.0"
DECODING_VERSION = 2  # raised with every change that alters the tokens a decoder produces

_HOMES = {  # public name -> module below `api` that defines it
    "load_model": "generation",
    "wrap": "generation",
    "decoder": "generation",
    "decoders": "generation",
    "generate": "generation",
    "stream": "generation",
    "run": "runs",
    "evaluate": "runs",
    "records": "runs",
    "compare": "runs",
    "table": "runs",
    "acceptance": "runs",
    "figure": "runs",
    "verdicts": "runs",
    "trade_off": "runs",
}
__all__ = ["DECODING_VERSION", "__version__", *_HOMES]  # noqa: PLE0604 (names of `_HOMES`)


def __getattr__(name: str) -> Any:
    """Return a public function, imported now."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.api.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
