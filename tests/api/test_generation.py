"""`import dllm_bench as db`: decoders, completions, tokens while they are committed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import dllm_bench as db
from dllm_bench.api.generation import Committed
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.common import Threshold
from tests.api.models import GAPS, PROMPTS, loaded


def test_what_is_offered_is_there_and_named_in_the_stub() -> None:
    assert all(hasattr(db, name) for name in db.__all__)
    with pytest.raises(AttributeError, match="tabel"):
        db.tabel  # noqa: B018
    stub = Path(db.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    assert all(f" {name}" in stub or f"\n{name}:" in stub for name in db.__all__)


def test_masks_within_a_prompt_are_filled_as_the_loop_fills_between_pinned_tokens() -> None:
    model = loaded("tiny-llada")
    ids, mask = model.encode(GAPS), model.special.mask
    first = ids.index(mask)
    pinned = {at: token for at, token in enumerate(ids[first:]) if token != mask}
    (done,) = db.generate(model, GAPS, "lopa_dream")
    request = Request("", tuple(ids[:first]), len(ids) - first, pinned=tuple(pinned.items()))
    without_ends = replace(cast(MaskedDecoder, db.decoder("lopa_dream")), forbid="ends")
    assert done.sample.ids == list(without_ends.generate(model.denoiser, request).ids)
    assert all(done.sample.ids[at] == token for at, token in pinned.items())
    gaps = {token for at, token in enumerate(done.sample.ids) if at not in pinned}
    assert len(done.sample.ids) == len(ids) - first and not gaps & {mask, *model.special.ends}
    assert done.text.endswith(" apples.")
    assert done.sample.counts["emitted"] == len(ids) - first - len(pinned) == GAPS.count("<|mask|>")


@pytest.mark.parametrize("name", ["lopa_dream", "fast_dllm"])
def test_no_gap_gets_an_end_token_even_where_the_model_would_end_the_text(name: str) -> None:
    model, text = loaded("tiny-llada"), f"{PROMPTS[0]} 3 + 4 = 7. The answer is 7."
    ending = db.decoder(name).generate(model.denoiser, Request("", tuple(model.encode(text)), 8))
    assert {*ending.ids} & {*model.special.ends}
    (done,) = db.generate(model, text + "<|mask|>" * 8, name)
    assert not {*done.sample.ids} & {*model.special.ends}


def test_pins_of_the_decoder_are_added_to_the_tokens_of_the_prompt() -> None:
    model = loaded("tiny-llada")
    ids, mask = model.encode(GAPS), model.special.mask
    new = ids[ids.index(mask) :]
    last, token = max(at for at, one in enumerate(new) if one == mask), model.encode(" 7")[-1]
    (done,) = db.generate(model, GAPS, db.decoder("prophet", **{"select.pinned": [[last, token]]}))
    given = {last: token, **{at: one for at, one in enumerate(new) if one != mask}}
    assert {at: done.sample.ids[at] for at in given} == given
    assert done.sample.counts["emitted"] == len(new) - len(given) == GAPS.count("<|mask|>") - 1


@pytest.mark.parametrize("name", ["d2f", "d3llm", "d3llm_early_stop", "lopa", "lopa_dist", "ssd"])
def test_a_block_that_does_not_divide_the_gaps_is_named_as_what_to_set(name: str) -> None:
    with pytest.raises(DllmBenchError) as refused:
        db.generate(loaded("tiny-llada"), GAPS, name)
    assert "set decoder.schedule.block to a divisor of 12," in str(refused.value)
    assert "floor" not in str(refused.value), "no block fits"
    (done,) = db.generate(loaded("tiny-llada"), GAPS, db.decoder(name, **{"schedule.block": 4}))
    assert loaded("tiny-llada").special.mask not in done.sample.ids


def test_a_canvas_of_random_tokens_is_reported_once_it_is_finished() -> None:
    model, seen = loaded("tiny-diffusion-gemma"), list[Committed]()
    prompt = "Rule: Remove item 3.\nQuestion: Apply the rule to Ann Mia Tom Max.\nAnswer:"
    (done,) = db.generate(model, prompt, "diffusion_gemma", 32, on_commit=seen.append)
    assert done.text.strip() == "Ann Mia Max."
    places = [place for event in seen for place in event.positions]
    assert places == list(range(len(done.sample.ids))), "each position once, in order"
    assert [token for event in seen for token in event.ids] == done.sample.ids


def test_an_end_token_of_the_prompt_stops_no_gap_before_it() -> None:
    """As behind a user's turn of a chat; the text ends there."""
    model = loaded("tiny-llada")
    turn_end = model.text.decode_visibly([model.special.eot or model.special.eos])
    for stop in ("eos", "filled"):
        chosen = db.decoder("fast_dllm", stop=stop, **{"schedule.block": 4, "schedule.short": True})
        (done,) = db.generate(model, f"{GAPS}{turn_end}\nIs it <|mask|>?", chosen)
        assert model.special.mask not in done.sample.ids and done.text.endswith(" apples.")


MASKED = "fast_dllm lopa_dream learn2pd_eotp fast_dllm_prefix".split()


@pytest.mark.parametrize("decoder", [*MASKED, "ar", "ngram_speculative"])
def test_every_token_is_reported_once_when_it_is_committed(decoder: str) -> None:
    model, seen = "tiny-llada" if decoder in MASKED else "tiny-qwen3", list[Committed]()
    given = (loaded(model), PROMPTS[0], decoder, 64)
    (done,) = db.generate(*given, on_commit=seen.append)
    places = [place for one in seen for place in one.positions]
    assert len(places) == len(set(places))
    ids = {p: i for one in seen for p, i in zip(one.positions, one.ids, strict=True)}
    filled = {p: i for p, i in enumerate(done.sample.ids) if done.sample.born[p] >= 0}
    assert filled.items() <= ids.items()
    assert len(seen) > 1 and [one.forward for one in seen] == sorted(one.forward for one in seen)
    (plain,) = db.generate(*given)
    assert plain.sample.ids == done.sample.ids
    assert list(db.stream(*given)) == seen and next(db.stream(*given)) == seen[0]


def test_tokens_that_were_masked_again_are_reported_again() -> None:
    seen = list[Committed]()
    (done,) = db.generate(loaded("tiny-llada"), PROMPTS[0], "saber", 128, on_commit=seen.append)
    masked_again = sum(len(changes) for changes in done.sample.trace["changes"])
    assert masked_again > 0
    assert sum(len(one.ids) for one in seen) == len(done.sample.ids) + masked_again


def test_a_completion_has_text_tokens_trace_metrics_and_a_picture() -> None:
    (done,) = db.generate(loaded("tiny-llada"), PROMPTS[0], "fast_dllm", 32)
    assert done.text == loaded("tiny-llada").decode(done.tokens) == str(done)
    metrics = done.metrics()
    decoded = sum(b >= 0 for b in done.sample.born)
    assert metrics["tpf/committed"] == pytest.approx(decoded / len(done.trace))
    assert metrics["tps/e2e"] > 0
    prompts, two = np.array(PROMPTS), np.int64(2)  # as of a data frame
    (of_batch, _) = db.generate(loaded("tiny-llada"), prompts, "fast_dllm", 16 * two, batch=two)
    assert of_batch.sample.ids == done.sample.ids and "tps/e2e" not in of_batch.metrics()
    page = done._repr_html_()
    assert page.count("<span") == len(done.tokens) and f"in {len(done.trace)} forwards" in page


def test_a_chat_is_one_prompt() -> None:
    chat = [{"role": "user", "content": "What is 2 + 2?"}]
    model = loaded("tiny-dream-instruct")
    (one,) = db.generate(model, chat, "fast_dllm_dream", 16)
    for given in ([chat], chat[0]):
        (same,) = db.generate(model, given, "fast_dllm_dream", 16)
        assert one.sample.ids == same.sample.ids


def test_settings_and_pieces_of_a_decoder_can_be_replaced() -> None:
    assert "lopa_dream" in db.decoders()
    every = Threshold(0.0)
    made: Any = db.decoder("fast_dllm", cache="dual", select=every, **{"schedule.block": 8})
    assert made.select == every
    assert (type(made.cache).__name__, made.schedule.block) == ("DualCache", 8)
    (done,) = db.generate(loaded("tiny-llada"), PROMPTS[0], made, 32)
    assert len(done.trace) <= 2 * 32 / 8


def test_the_state_of_hydra_stays_as_it_was() -> None:
    from hydra import version
    from hydra.core.global_hydra import GlobalHydra

    from dllm_bench.api import compose

    version.setbase("1.2")
    compose.compose_groups.cache_clear()
    db.decoder("vanilla")
    assert not GlobalHydra.instance().is_initialized()
    assert str(version.getbase()) == "1.2"
