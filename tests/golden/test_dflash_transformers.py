"""Our DFlash and the candidate generator that transformers ships draft the same tokens.

transformers has no Qwen3 drafter; its Muse Glimmer assistant is the same network under other names
(context projection, its norm), so z-lab's recorded weights fit. Its generator skips the anchor's
slot like z-lab's, and proposes no more than the limit leaves room for.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dllm_bench.core.request import Request, SpecialTokens
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.methods.trained_drafts import DFlash
from dllm_bench.models.drafters import TrainedBlockDrafter
from tests.helpers import golden_dir, load_denoiser
from tests.speculative import WatchedLength

FOLDER = golden_dir() / "spec" / "ckpt"
DRAFTER = FOLDER / "zlab_dflash_b16"
PROMPTS = [(95, 15, 108, 36, 67), (37, 72, 39, 32, 65, 7, 21, 76, 3, 56, 43, 110)]
NEW = 40
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "layer_types",
    "block_size",
)

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason=f"no golden data at {FOLDER}")


def assistant() -> Any:
    """z-lab's recorded drafter in transformers' class."""
    from safetensors.torch import load_file
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    published = json.loads((DRAFTER / "config.json").read_text())
    config = MuseGlimmerAssistantConfig(
        **{key: published[key] for key in SIZES},
        **published["dflash_config"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    renamed = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}
    weights = load_file(DRAFTER / "model.safetensors")
    model = MuseGlimmerAssistantModel(config).eval()
    for own, name in renamed.items():
        weights[f"{name}.weight"] = weights.pop(f"{own}.weight")
    model.load_state_dict(weights)
    return model


def test_the_two_draft_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3ForCausalLM
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    theirs: list[tuple[int, list[int]]] = []
    official = DFlashTokenCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: Any, **rest: Any) -> Any:
        ids, logits = official(self, input_ids, **rest)
        theirs.append((input_ids.shape[1], ids[0, input_ids.shape[1] :].tolist()))
        return ids, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", noted)
    plain = Qwen3ForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float32).eval()
    own = load_denoiser(FOLDER / "target")
    own.special = SpecialTokens(mask=0, eos=-1)
    model, accepted = assistant(), 0
    for prompt in PROMPTS:
        theirs.clear()
        text = plain.generate(
            torch.tensor([prompt]),
            assistant_model=model,
            speculation_type="dflash",
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
        )
        watched = WatchedLength()
        decoder = SpeculativeDecoder(DFlash(TrainedBlockDrafter(str(DRAFTER))), length=watched)
        generation = decoder.generate(own, Request("dflash", prompt, NEW))
        assert list(generation.ids[:NEW]) == text[0, len(prompt) :].tolist()
        rows = [row for row in generation.trace.forwards if row.kind == "verify"]
        ours = {
            row.cached + 1: proposal.tokens_D.tolist()
            for row, proposal in zip(rows, watched.seen, strict=True)
        }
        compared = [(length, tokens) for length, tokens in theirs if tokens]
        assert compared
        assert all(ours[length][: len(tokens)] == tokens for length, tokens in compared)
        accepted += sum(row.accepted for row in rows)
    assert accepted > NEW / 2, "the comparison saw accepted tokens"
