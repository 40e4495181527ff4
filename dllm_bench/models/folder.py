"""What a checkpoint's folder holds, by its JSON files alone: no weight is opened.

Importing this module is cheap, so that missing files are reported before torch is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.adapters import ADAPTERS, recognised_adapter
from dllm_bench.models.spec import MASKLESS, ModelSpec
from dllm_bench.models.text import FILES, require_regular

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
LORA_CONFIG = "adapter_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SHOWN = 6  # pickled files that are named
TEMPLATE = "chat_template"  # key of tokenizer_config.json, and stem of a file


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; DllmBenchError where it is missing or is no JSON object."""
    if not path.exists():
        raise DllmBenchError(
            f"{path.parent} holds no {path.name}; point the model's path at a checkpoint folder."
        )
    require_regular(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DllmBenchError(f"{path} is not valid JSON ({error}); fetch it again.") from None
    if not isinstance(content, dict):
        raise DllmBenchError(f"{path} is not a JSON object; fetch it again.")
    return content


def is_lora(folder: Path) -> bool:
    """Return whether a folder holds a LoRA adapter and no model."""
    return (folder / LORA_CONFIG).is_file() and not (folder / CONFIG).is_file()


def adapted_model(folder: Path) -> str | None:
    """Return the checkpoint that a LoRA adapter was trained on, as its config names it (a folder or
    a hub id); None if it names none.
    """
    base: str | None = read_json(folder / LORA_CONFIG).get("base_model_name_or_path")
    return base or None


def published_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a checkpoint; DllmBenchError where it is missing, or for a LoRA
    adapter."""
    if is_lora(folder):
        base = adapted_model(folder) or "BASE"
        raise DllmBenchError(
            f"{folder} holds a LoRA adapter ({LORA_CONFIG}) and no model; load the model that it "
            f"adapts with it: model={base} model.lora={folder}, or in Python "
            f'load_model("{base}", lora="{folder}").'
        )
    return read_json(folder / CONFIG)


def no_adapter(what: str, published: Mapping[str, Any]) -> str:
    """Return the sentence about a config.json of an architecture that no adapter reads.

    what: names the checkpoint.
    """
    made = ", ".join(map(str, published.get("architectures") or ())) or "of no named class"
    return (
        f"{what} has model_type {published.get('model_type')!r} ({made}), which no adapter reads "
        f"(there are {', '.join(ADAPTERS)}); load it with its own code and pass it to "
        "dllm_bench.wrap, or add a layout (CONTRIBUTING.md, A model). Another value of "
        "model.adapter does not help."
    )


def has_template(folder: Path) -> bool:
    """Return whether the tokenizer can write chat turns."""
    file = folder / TOKENIZER_CONFIG
    settings = read_json(file) if file.is_file() else {}
    return TEMPLATE in settings or (folder / f"{TEMPLATE}.jinja").is_file()


def settings_of(folder: Path) -> dict[str, Any]:
    """Return all settings of a model but its name and path, as the checkpoint itself says them."""
    adapter = recognised_adapter(published_config(folder))
    layout = ADAPTERS[adapter] if adapter else None
    absent = {field.name: None for field in fields(ModelSpec) if field.default is None}
    return {
        **absent,
        "adapter": adapter,
        "attention_form": layout and layout.attention,
        "shifted": layout and layout.shifted,
        "chat": has_template(folder),
        "bos": False,
    }


def pickled_weights(folder: Path) -> str:
    """Return the names of the pickled files in the folder, which nothing here opens."""
    names = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    return ", ".join(names[:SHOWN])


def lacking(folder: Path, model: ModelSpec) -> Iterator[str]:
    """Yield what a run of `model` (settings of its yaml) does not find in the folder.

    DllmBenchError if the folder holds no config.json, or one that no adapter reads.
    """
    published = published_config(folder)
    name = recognised_adapter(published)
    if name is None:
        raise DllmBenchError(no_adapter(str(folder), published))
    if not any(folder.glob("*.safetensors")):
        pickled = pickled_weights(folder)
        why = f"; it holds pickled weights only ({pickled}), which can run code" if pickled else ""
        yield f"weights (*.safetensors{why})"
    if not any((folder / file).is_file() for file in FILES):
        yield f"a tokenizer ({FILES[0]})"
    elif not model.mask_token and not _names_mask(folder, published, name, model):
        yield "the id of a mask token in its JSON files; name its text with model.mask_token=TEXT"
    if model.chat and not has_template(folder):
        yield f"a chat template ({TEMPLATE}.jinja); add it or set model.chat=false"


def _names_mask(folder: Path, published: Mapping[str, Any], adapter: str, model: ModelSpec) -> bool:
    """Return whether config or tokenizer name a mask token, or the model needs none."""
    layout = ADAPTERS[adapter]
    if (model.attention_form or layout.attention) in MASKLESS:
        return True
    config = {**layout.text_config(published), **published}
    if config.get("mask_token_id") is not None:
        return True
    files = (folder / TOKENIZER_CONFIG, folder / "special_tokens_map.json")
    return any(read_json(file).get("mask_token") for file in files if file.is_file())
