"""`import dllm_bench as db`: decoders, completions, tokens while they are committed.

One prompt through every door: the command line, Python, lm-eval and transformers agree. What a call
refuses, and what the message says to do instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import AutoModelForCausalLM

import dllm_bench as db
from dllm_bench.api.compose import compose
from dllm_bench.api.custom_generate import generate_with
from dllm_bench.api.generation import Committed, PromptGenerator, spec_of
from dllm_bench.api.lm_eval_model import DllmBenchLM, generator
from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import Blocks, Confidence, Threshold
from dllm_bench.methods.remasking import Wino
from dllm_bench.registry import describe
from dllm_bench.store.inputs import benchmark_of
from dllm_bench.store.record import SampleRecord
from dllm_bench.store.store import Store, read_samples
from tests.api.models import GAPS, PROMPTS, loaded, logits, transformers_object, wrapped
from tests.tiers import covering


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


NEW = 64
DECODERS = {
    **dict.fromkeys("vanilla fast_dllm_dual credit lopa_dream hierarchy".split(), "tiny-llada"),
    "fast_dllm_dream": "tiny-dream-instruct",
    **dict.fromkeys(("ar", "ngram_speculative"), "tiny-qwen3"),
}
ATTENTION = {"tiny-qwen3": {"attention": "causal"}, "tiny-dream-instruct": {"shifted": True}}
SETTINGS = ("benchmark=minigsm", f"benchmark.max_new_tokens={NEW}", "hardware=cpu", "limit=1")


def by_command(model: str, decoder: str, folder: Path) -> SampleRecord:
    """Return the first sample of `dllm-bench run`."""
    choice = (f"model={model}", f"decoder={decoder}", f"paths.results={folder}")
    assert main(["run", *choice, *SETTINGS]) == 0
    (run,) = Store(folder / "runs").folders()
    return next(iter(read_samples(run).values()))


def first_request(model: str) -> tuple[Any, Request]:
    """Return the benchmark's first prompt, a text or a chat, and its request."""
    tasks = benchmark_of(compose([f"model={model}", *SETTINGS])["benchmark"])
    request = next(iter(tasks.requests(loaded(model).encode)))
    chat = request.prompt.startswith("[{")
    return json.loads(request.prompt) if chat else request.prompt, request


def by_lm_eval(model: str, decoder: str, prompt: Any, request: Request) -> tuple[str, Generation]:
    """lm-eval's answer to the prompt, and what was decoded for it."""
    generate = generator([f"model={model}", f"decoder={decoder}", *SETTINGS])
    lm, made, kind = DllmBenchLM(generate), list[Generation](), type(generate.decoder)
    decoded = kind.generate
    text = prompt if isinstance(prompt, str) else lm.apply_chat_template(prompt)
    settings = {"until": list(request.stop), "max_gen_toks": NEW}
    asked = Instance("generate_until", {}, (text, settings), 0)
    with patch.object(kind, "generate", lambda *given: made.append(decoded(*given)) or made[-1]):
        return lm.generate_until([asked], disable_tqdm=True)[0], made[0]


def by_transformers(model: str, decoder: str, request: Request, folder: Path) -> Generation:
    """`model.generate` of a checkpoint on disk, with the exported decoder."""
    transformers_object(model).save_pretrained(folder / "model")
    module = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert main(["export", "custom-generate", decoder, "--to", str(folder / "door")]) == 0
    ids = torch.tensor([request.prompt_ids])
    output = module.generate(
        ids,
        custom_generate=str(folder / "door"),
        trust_remote_code=True,
        max_new_tokens=NEW,
        tokenizer=loaded(model).text.tokenizer,
        return_dict_in_generate=True,
        **ATTENTION.get(model, {}),
    )
    new = output.sequences[0, ids.shape[1] :].tolist()
    assert new == list(output.generations[0].ids[: len(new)])
    return output.generations[0]


@pytest.mark.parametrize("decoder", covering(6, DECODERS))
def test_every_door_gives_the_same_text_tokens_and_forwards(decoder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    model = DECODERS[decoder]
    prompt, request = first_request(model)
    run = by_command(model, decoder, tmp_path / "results")
    (ours,) = db.generate(loaded(model), [prompt], decoder, NEW, stop=request.stop)
    text, *others = by_lm_eval(model, decoder, prompt, request)
    others.append(by_transformers(model, decoder, request, tmp_path))
    assert run.text.strip() and run.text == ours.text == text
    assert run.ids == ours.sample.ids and len(run.trace["kind"]) == len(ours.trace)
    assert all((list(made.ids), len(made.trace)) == (run.ids, len(ours.trace)) for made in others)


def test_a_batch_of_padded_prompts_gives_the_rows_of_single_ones() -> None:
    module, model = transformers_object("tiny-llada").eval(), loaded("tiny-llada")
    plain, pad = describe(db.decoder("remdm", **{"score.temperature": 3.0})), model.special.eos
    rows = [model.encode(text) for text in ("Tom has 3 apples.", "What is 2 + 5 in words?")]
    width = max(map(len, rows))
    padded = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    settings = {"max_new_tokens": NEW, "tokenizer": model.text.tokenizer}
    both = generate_with(module, plain, padded, attention_mask=seen, **settings)
    for row, whole in zip(rows, both.tolist(), strict=True):
        new = generate_with(module, plain, torch.tensor([row]), **settings)[0].tolist()[len(row) :]
        assert whole[width : width + len(new)] == new


OBJECT = "is an object and stays as it is"
HIDES = "hides positions from each other .*choose another decoder"
ALONE = MaskedDecoder(Confidence(), Threshold(0.9), Blocks(32, sees_rest=False), NoCache())
Call = Callable[[Path], Any]
never = Mock(side_effect=AssertionError("a token was committed before the refusal"))


def generate(*prompts: str, decoder="fast_dllm", model="tiny-llada", **settings: Any) -> Call:
    return lambda _: db.generate(loaded(model), [*prompts], decoder, on_commit=never, **settings)


def decoder(**settings: Any) -> Call:
    return lambda _: db.decoder("fast_dllm", **settings)


def wrap(model: Any, **settings: Any) -> Call:
    return lambda _: wrapped(model, **settings)


def of_function(decoder: Any) -> Call:
    return lambda _: db.generate(wrapped(logits), "2 + 2 =", decoder, 32)


def load(source: str, **settings: Any) -> Call:
    return lambda _: db.load_model(source, **settings)


def run(model: Any = "tiny-llada", **settings: Any) -> Call:
    return lambda results: db.run(model, "vanilla", "minigsm", results=results, **settings)


def of_object(benchmark: Any = "minigsm", **settings: Any) -> Call:
    model, given = transformers_object("tiny-llada"), {"limit": 1, **settings}
    return lambda results: db.run(wrapped(model), "fast_dllm", benchmark, results=results, **given)


def of_transformers(**settings: Any) -> Call:
    asked = {"max_new_tokens": 8, **settings}
    model = transformers_object("tiny-llada")
    return lambda _: generate_with(model, {}, torch.tensor([[5]]), **asked)


def pin(place: int, name: str) -> Call:
    model = loaded("tiny-llada")
    request = Request("", tuple(model.encode("3 + 4 =")), 6, pinned=((place, 5),))
    return lambda _: db.decoder(name).generate(model.denoiser, request)


def prompt_with_masks(_: Path) -> None:
    made = db.decoder("fast_dllm")
    PromptGenerator(spec_of(loaded("tiny-llada"), made), made, loaded("tiny-llada"))(GAPS, 32, ())


def unknown_class(_: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    wrapped(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=2048)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (generate(GAPS, decoder="ngram_speculative"), "writes a text after the prompt"),
        (generate(GAPS, decoder="daedal"), "keep their places, which schedule Daedal does not"),
        (generate("fast_dllm", decoder="2 + 2 ="), "There is no decoder '2 [+] 2 ='"),
        (generate(GAPS, max_new_tokens=32), "max_new_tokens=32 was given; leave that"),
        (generate(GAPS, "2 + 2 ="), "those with masks in a call of their own"),
        (generate("<|mask|> 4 = 7"), "begin the prompt with a text"),
        (generate("2 + 2 =", "3 =", max_new_tokens=32, batch=2), "batch=2"),
        (generate(GAPS, model="tiny-diffusion-gemma", decoder="diffusion_gemma"), "writes a text"),
        (generate("2 +", batch=0), "batch 0; give a whole number of 1 or more"),
        (generate("2 +", max_new_tokens=0), "max_new_tokens 0; give a whole number of 1"),
        (generate("2 +", stop="."), "stop '.'; give a list"),
        (generate("2 +", "a\udc80b"), "cannot encode a text .*give texts of valid Unicode"),
        (generate("2 +", seed="a"), "seed 'a'; give a whole number of 0 or more"),
        (lambda _: db.generate("", "2", "ar", on_commit=3), "on_commit 3; give a function"),
        (lambda _: db.compare(1, 2), "A run is 1; give a record or the hash"),
        (lambda _: db.compare(), "compare got none; name two or more"),
        (lambda _: db.compare(["a", "b"]), r"compare got \['a', 'b'\]; name two or more, one by"),
        (lambda results: db.table([], results=results), r"There is no table '\[\]'"),
        (lambda results: db.figure([], results=results), r"There is no figure '\[\]'"),
        (lambda results: db.trade_off(3, results=results), "no complete run of 3 on any"),
        (lambda _: db.wrap(logits, None), "given function and NoneType as model and tokenizer"),
        (lambda _: next(db.stream("tiny-llada", "2", "ar", on_commit=never)), "leave it out"),
        (generate("2 +", max_new_tokens=10**12), "lower benchmark.max_new_tokens"),
        (generate("2 +", 5), "A prompt is 5; give a text, a chat"),
        (pin(-1, "fast_dllm"), "new position -1 and has 6 new tokens"),
        (pin(6, "sdar"), "new position 6 and has 6"),  # of a canvas of two whole blocks of 4
        (lambda _: next(db.stream(loaded("tiny-llada"), "2 +", "fast_dllm", batch=2)), "batch=2"),
        (prompt_with_masks, "has 4 mask tokens to fill.*answered, not filled"),
        (decoder(tau=0.7), r"select\.tau"),
        (decoder(**{"select.tau": "x"}), "tau .x.; give a number"),
        (decoder(draft=Threshold(0.9)), "no slot 'draft'"),
        (decoder(schedule={"block": 4}), r'named with a dot: \*\*{"schedule.block": 4}'),
        (of_function("fast_dllm_dual"), "has no cache"),
        (of_function("block_diffusion"), "keeps keys and values|attention"),
        (of_function(replace(ALONE, schedule=Blocks(32), revise=Wino())), HIDES),
        (of_function(ALONE), HIDES),
        (wrap(lambda ids: ids), "returned"),
        (wrap(logits, mask_token="<nothing>"), "no token of the model's tokenizer"),
        (wrap(logits, attention="blocks"), "full, block, causal"),
        (wrap(logits, block=8), "block=8"),
        (wrap(transformers_object("tiny-llada"), weights_hash="v1"), "leave weights_hash out"),
        (unknown_class, "wrap a function in place of it"),
        (load("tiny-lada"), "did you mean 'tiny-llada'"),
        (load("nobody/nothing"), "not in the local Hugging Face cache"),
        (load("tiny-llada", dtipe="float32"), "dtipe"),
        (load("tiny-llada", dtype="int3"), "float32, bfloat16"),
        (lambda results: db.trade_off("tiny-llada", results=results), "`dllm-bench run -m"),
        (run(limit=object()), "limit is <object .*give a number"),
        (run(logits), "The model is a function; give a name.*wrap"),
        (generate("2 +", decoder=None), "The decoder is None; give a name"),
        (lambda _: db.records(5), "The results directory is 5; name one"),
        (of_object(**{"model.chat": True}), OBJECT),
        (of_object(**{"hardware.dtype": "bfloat16"}), OBJECT),
        (of_object(hardware="cpu-dp2"), "asks for several processes"),
        (of_object(3), "use evaluate"),
        (run(wrapped(logits)), "weights_hash=TEXT"),
        (lambda results: db.records(results, by="token"), "by='sample'"),
        (of_transformers(num_beams=4, stop_strings=["x"]), "stop_strings, num_beams"),
        (of_transformers(max_new_tokens=0), "no max_new_tokens"),
    ],
)
def test_a_refused_call_says_what_to_do(call: Call, words: str, tmp_path: Path) -> None:
    with pytest.raises(DllmBenchError, match=words):
        call(tmp_path)
