"""DeepSpec's, z-lab's and DDTree's own loops, token for token: DFlash, DSpark, EAGLE-3, trees.

Every round is compared: what was drafted, proposed, accepted, committed, the rows the drafter was
fed. The reference goes on until the limit is exceeded, so one token more is asked for here; z-lab's
counts tokens behind a stop, which are left out of the comparison, and with DFlash 2 a round of
theirs ends at the limit, ours behind it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.core.speculative import Context, Draft, Proposal, Sampler, VerifyResult, drawn_path
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.speculative import GreedyMatch, Rejection, SpeculativeDecoder
from dllm_bench.methods.drafting import NoDraft
from dllm_bench.methods.trained_drafts import DFlash, DFlash2, Eagle3, likeliest_tree
from dllm_bench.metrics.definitions import measure
from dllm_bench.metrics.drafts import depths, rounds_of
from dllm_bench.models.drafters import TrainedBlockDrafter
from dllm_bench.models.transformer import TransformerDenoiser
from tests.golden.cases import (
    GOLDEN,
    Case,
    Settings,
    agreement,
    cases,
    decoder_with,
    each,
    replayed,
)
from tests.helpers import DEVICE, fed_causally, load_denoiser, noting
from tests.sample_stats import drafted
from tests.speculative import Chain, scripted

FOLDER = GOLDEN / "spec"
KINDS = ("dflash", "dspark_markov", "dspark_gated", "dspark_rnn", "eagle3", "zlab_dflash")
DSPARKS = KINDS[1:4]
TOLERANCE = 1e-4
NO_END = -1

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason=f"no golden traces at {FOLDER}")


@cache
def read(name: str) -> Any:
    file = FOLDER / name
    return json.loads(file.read_text()) if file.exists() else {}


@cache
def tensors(name: str | Path) -> dict[str, Tensor]:
    return load_file(FOLDER / name, device=DEVICE)


def close(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)


@cache
def target() -> TransformerDenoiser:
    return load_denoiser(FOLDER / "ckpt" / "target")


def generate(decoder: Any, prompt: Sequence[int], new: int, eos: int = NO_END) -> Generation:
    """Return what the decoder makes of a prompt with the target, in which `eos` ends a text."""
    target().special = SpecialTokens(mask=0, eos=eos)
    return decoder.generate(target(), Request("golden", tuple(prompt), new))


def end_of(case: Case) -> int:
    """Return the token that ends the recorded text, if it is a stop."""
    last = case["output"][-1]
    return last if last in (case["stop_token_ids"] or []) else NO_END


def source(kind: str) -> str:
    return str(FOLDER / "ckpt" / ("zlab_dflash_b16" if kind == "zlab_dflash" else kind))


def speculative(decoder: str, settings: Settings) -> SpeculativeDecoder:
    made = decoder_with(decoder, json.dumps(settings))
    assert isinstance(made, SpeculativeDecoder)
    return made


def draft(kind: str) -> Draft:
    """Return the drafter of a kind as its decoder has it."""
    return speculative(*decoder_of({"file": f"trace_{kind}"}, True)).draft


def decoder_of(run: Case, checks_first: bool) -> tuple[str, dict[str, Any]]:
    """Return the decoder of conf/decoder, and the numbers of a run."""
    kind, tau = Path(run["file"]).stem.removeprefix("trace_"), run.get("confidence_threshold")
    settings = {"draft.drafter.source": source(kind), "temperature": run.get("temperature", 0.0)}
    if kind in DSPARKS:
        return ("dspark_threshold", settings | {"length.tau": tau}) if tau else ("dspark", settings)
    if kind == "eagle3":
        return "eagle3", settings
    settings["checks_first"] = checks_first
    zlab = {"verify": "greedy_match", "draft.slots": run.get("block_size")}
    return "dflash", settings | (zlab if kind == "zlab_dflash" else {})


def decode(run: Case, checks_first: bool = True) -> tuple[Generation, list[Proposal]]:
    """Return what the run's decoder makes of its prompt, and the drafts before they are cut."""
    plain = speculative(*decoder_of(run, checks_first))
    length, noted = noting(plain.length, keep=list)
    decoder = scripted(plain, run.get("uniforms") or [0.5] * 4096, length=length)
    eos = (run["stop_token_ids"] or [NO_END])[0]
    generation = generate(decoder, run["prompt"], run["max_new_tokens"] + 1, eos)
    return generation, [draft for (draft,), _ in noted]


@cache
def greedy_runs(kind: str) -> list[tuple[Generation, list[Proposal]]]:
    """Return the reference's four prompts decoded greedily; its traces have rounds of three."""
    plain = {"file": f"trace_{kind}.json", "max_new_tokens": 48, "stop_token_ids": None}
    prompts = [case["prompt"] for case in read("target_greedy.json")["cases"]]
    return [decode(plain | {"prompt": prompt}) for prompt in prompts]


def verified(generation: Generation) -> list[tuple[Any, list[int]]]:
    """(forward, tokens it committed) of every round."""
    rows = enumerate(generation.trace.forwards)
    new = {i: [] for i, row in rows if row.kind == ForwardKind.VERIFY}
    for token, born in zip(generation.ids, generation.born, strict=True):
        new.get(born, []).append(token)
    return [(generation.trace.forwards[i], tokens) for i, tokens in new.items()]


RUNS = [run for kind in KINDS for run in cases(f"spec/trace_{kind}.json")]
ZLAB = cases("spec/trace_zlab_dflash.json")[:1]


@each(RUNS)
def test_the_authors_loop(case: Case) -> None:
    generation, drafts = decode(case)
    assert list(generation.ids[: len(case["output"])]) == case["output"]
    rounds, found = case["rounds"], verified(generation)
    if "proposal_lengths" in case:
        own = rounds_of(generation.trace, generation.born)
        assert [r.committed for r in own] == case["acceptance_lengths"]
        assert [r.proposed for r in own] == case["proposal_lengths"]
    assert len(found) == len(rounds) == len(drafts)
    for (row, new), proposal, entry in zip(found, drafts, rounds, strict=True):
        assert new == committed(entry, case["stop_token_ids"] or [])
        check_round(row, proposal, entry)


@each(ZLAB)
def test_zlabs_blocks_of_one_slot_are_the_plain_loop(case: Case) -> None:
    """A block holds nothing but the anchor: one token a round, and no drafter."""
    generation, _ = decode(case | {"block_size": 1})
    assert list(generation.ids[: len(case["output"])]) == case["target_greedy"]
    rounds = rounds_of(generation.trace, generation.born)
    assert {(r.committed, r.proposed) for r in rounds} == {(1, 0)}
    assert {f.kind for f in generation.trace.forwards} == {ForwardKind.PREFILL, ForwardKind.VERIFY}
    with pytest.raises(DllmBenchError, match="choose 1 to 16"):
        decode(case | {"block_size": 0})


@pytest.mark.parametrize("checks_first", [True, False])
@each(ZLAB)
def test_zlab_makes_a_round_after_a_first_token_that_stops(case: Case, checks_first: bool) -> None:
    """Their loop looks for stop tokens after a round only; the round is the recorded one."""
    generation, _ = decode(case | {"stop_token_ids": [case["first_token"]]}, checks_first)
    rounds = rounds_of(generation.trace, generation.born)
    assert [r.committed for r in rounds] == ([] if checks_first else case["acceptance_lengths"][:1])
    assert generation.cut["eos"] == 0, "the text is the same"


def committed(entry: dict[str, Any], stops: list[int]) -> list[int]:
    """Return what a recorded round added to the text, up to an accepted token that stops it."""
    accepted = (entry.get("proposed") or entry["drafted"])[: entry["n_accepted"]]
    at = next((i for i, token in enumerate(accepted) if token in stops), None)
    return [*accepted, entry["next_token"]] if at is None else accepted[: at + 1]


def check_round(row: Any, proposal: Proposal, entry: dict[str, Any]) -> None:
    assert proposal.tokens_D.tolist() == (entry.get("drafted") or entry["proposed"])
    assert row.cached == entry["anchor_pos"]
    if "proposed" in entry:
        assert proposal.tokens_D[: row.proposed].tolist() == entry["proposed"]
        assert entry["n_proposed"] == row.proposed
        assert row.accepted == entry["n_accepted"]
        assert row.cached + row.fed == entry["target_cache_len_before_crop"]
    if "confidence_logit" in entry:
        assert proposal.survival_D is not None
        close(proposal.survival_D.cpu(), torch.tensor(entry["confidence_logit"]))
    if "draft_context_rows" in entry:
        first, last = entry["draft_position_range"]
        assert (proposal.cached, proposal.cached + proposal.fed) == (first, last)
        assert entry["draft_context_rows"] == entry["anchor_pos"] - proposal.cached


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_the_authors_acceptance_metrics(kind: str) -> None:
    """Over the four prompts of the reference; `test_the_authors_loop` has rounds of three."""
    recorded = read(f"trace_{kind}.json")
    rounds = [rounds_of(generation.trace, generation.born) for generation, _ in greedy_runs(kind)]
    every, summary = [r for own in rounds for r in own], recorded["metrics"]["summary"]
    assert len(every) == summary["proposal_count"]
    assert sum(r.committed for r in every) == summary["acceptance_length_sum"]
    samples, row = [drafted(own) for own in rounds], recorded["metrics"]["row"]
    wanted = {f"survival@{k}": x for k, x in enumerate(row["accept_rates_by_position"], start=1)}
    wanted |= {"length": row["acceptance_length"], "verify_rate": row["verify_rate"]}
    wanted["proposed"] = row["draft_tokens_per_proposal"]
    measured = {name: measure(f"acceptance/{name}", samples) for name in wanted}
    assert measured == pytest.approx(wanted)


# --- single modules ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dflash", *DSPARKS, "zlab_dflash"])
def test_drafter_forwards_sharing_one_cache(kind: str) -> None:
    zlab = kind == "zlab_dflash"
    stored = tensors("zlab_modules.safetensors" if zlab else "modules.safetensors")
    feature_layers = stored["taps" if zlab else "target/taps"]
    ids_L = stored["input_ids" if zlab else "target/input_ids"][0]
    recorded = read(f"trace_{kind}.json")["drafter_forward"] if zlab else None
    entries = recorded or read("modules.json")["drafter_forward"][kind]
    piece = draft(kind)
    assert isinstance(piece, DFlash)
    network, kv = piece.drafter.on(target()), piece.new_cache(target(), 64)
    assert [entry["start"] for entry in entries] == [12, 15, 16, 23]
    for entry in entries:
        start, (first, last) = entry["start"], entry["new_context_rows"]
        context = Context(ids_L[: start + 1], feature_layers[:, first:last], target(), kv)
        hidden_DH, logits_DV = network.block(context, piece.drafter.config.slots)
        assert kv is not None and kv.length == start
        name = f"fwd/{start}" if zlab else f"fwd/{kind}/{start}"
        close(hidden_DH, stored[f"{name}/hidden"][0, 1 if zlab else 0 :])
        close(logits_DV, stored[f"{name}/logits_slots1_15" if zlab else f"{name}/base_logits"][0])
        if piece.drafter.config.has_transition_head:
            check_heads(network, entry, ids_L[start], stored, name)


def check_heads(network: Any, entry: Any, anchor: Any, stored: Any, name: str) -> None:
    """Corrected logits and confidences of a block whose tokens are known."""
    hidden_DH, base_NV = stored[f"{name}/hidden"][0], stored[f"{name}/base_logits"][0]
    before = [anchor, *torch.tensor(entry["tokens"][:-1], device=DEVICE)]
    corrected_NV, state, survival = base_NV.clone(), None, []
    for token, hidden_H, logits_1V in zip(before, hidden_DH, corrected_NV.split(1), strict=True):
        survival.append(network.survival(token, hidden_H))
        state = network.transition(logits_1V, token, hidden_H, state)
    close(corrected_NV, stored[f"{name}/corrected_logits"][0])
    close(torch.stack(survival), stored[f"{name}/confidence_logits"][0])
    assert corrected_NV.argmax(-1).tolist() == entry["tokens"]


def test_eagle3_chain_and_update() -> None:
    stored, recorded = tensors("modules.safetensors"), read("modules.json")["eagle3"]
    chain, update = recorded["chain"], recorded["update"]
    piece, ids_L = draft("eagle3"), stored["target/input_ids"][0]
    assert isinstance(piece, Eagle3)
    network, kv = piece.drafter.on(target()), piece.new_cache(target(), 64)
    assert kv is not None
    anchor, feature_layers = chain["anchor_pos"], stored["target/taps"]
    context = Context(ids_L[: anchor + 1], feature_layers[:, :anchor], target(), kv)
    assert context.tokens_L[1:].tolist() == chain["prefill_input_ids"]
    hidden_11H, logits_1V = network.extend(context)
    close(hidden_11H, stored["eagle3/prefill_hidden"][:, -1:])
    hiddens, logits = [], [logits_1V]
    for token in torch.tensor(chain["tokens"], device=DEVICE):
        hidden_11H, logits_1V = network.step(token, hidden_11H, context)
        hiddens.append(hidden_11H[0, 0])
        logits.append(logits_1V)
    assert kv.length == chain["cache_len_after"]
    wanted_NV = stored["eagle3/chain_logits"][0]
    close(torch.cat(logits[:-1]), wanted_NV)
    assert wanted_NV.argmax(-1).tolist() == chain["tokens"]
    kv.crop(anchor)
    text_L = torch.cat([ids_L[: anchor + 1], torch.tensor(update["committed"], device=DEVICE)])
    grown = Context(text_L, feature_layers[:, anchor : len(text_L) - 1], target(), kv)
    hidden_11H, logits_1V = network.extend(grown)
    close(hidden_11H, stored["eagle3/after_update_hidden_last"])
    assert int(logits_1V.argmax()) == update["argmax"]


# --- the verification rule -----------------------------------------------------------------------


class Given(Chain):
    """A target that repeats the prompt's token and whose next forward has the given logits."""

    def __init__(self, logits_DV: Tensor, ends: list[int] | None) -> None:
        special = SpecialTokens(mask=NO_END, eos=(ends or [NO_END])[0])
        super().__init__(special, torch.eye(logits_DV.shape[1]))
        self.logits_DV = logits_DV

    def forward(self, tokens_KL: Tensor, plan: Any, kv: Any) -> Tensor:
        first_1RV = super().forward(tokens_KL, plan, kv)
        return first_1RV if plan.kind == ForwardKind.PREFILL else self.logits_DV[None]


@dataclass(frozen=True)
class Told(NoDraft):
    """A draft of given tokens; their distribution is that of given logits."""

    proposal: Proposal = field(compare=False)

    @property
    def longest(self) -> int:
        return len(self.proposal)

    def propose(self, context: Any, sampler: Any) -> Proposal:
        law_DV = None if sampler.greedy else sampler.probabilities(self.proposal.probabilities_DV)
        return replace(self.proposal, probabilities_DV=law_DV)


VERIFIER = read("modules.json").get("verifier", {}).get("cases", [])


@pytest.mark.parametrize("case", VERIFIER, ids=lambda case: case["name"])
def test_the_verifier(case: dict[str, Any]) -> None:
    target_RV = torch.tensor(case["target_logits"])
    logits_DV = torch.tensor(case["draft_logits"]).reshape(-1, target_RV.shape[1])
    proposal = Proposal(torch.tensor(case["draft_tokens"], dtype=torch.long), logits_DV)
    script = (*([0.5] if case["temperature"] else []), *case["uniforms"], *[0.5] * 8)
    plain = SpeculativeDecoder(Told(proposal), temperature=case["temperature"])
    decoder = scripted(plain, script)
    model = Given(target_RV, case["stop_token_ids"])
    start = 1 if case["stop_token_ids"] == [0] else 0
    ((row, new),) = verified(decoder.generate(model, Request("verifier", (start,), 2)))
    stopped = case["terminated_by_stop_token"]  # the reference draws a next token and drops it
    assert new == (case["committed"][:-1] if stopped else case["committed"])
    assert (row.accepted, row.proposed) == (case["accepted"], len(case["draft_tokens"]))
    if case["draft_tokens"]:
        check_distributions(case, proposal, target_RV)


def check_distributions(case: Case, proposal: Any, target_RV: Tensor) -> None:
    """Probabilities of acceptance, and the distribution of the next token."""
    sampler = Sampler(case["temperature"], lambda n: torch.zeros(n))
    assert proposal.probabilities_DV is not None
    laws = [sampler.probabilities(each_V) for each_V in (proposal.probabilities_DV, target_RV)]
    probability_D = Rejection.acceptance_probability(proposal.tokens_D, *laws)
    close(probability_D, torch.tensor(case["accept_prob"]), 1e-6)
    if not case["terminated_by_stop_token"]:
        next_V = Rejection.next_distribution(torch.tensor(sum(case["accept_prefix_mask"])), *laws)
        close(next_V, torch.tensor(case["next_dist"]), 1e-6)


# --- DDTree: the tree, the accepted path and what the next draft reads ----------------------------


def ddtree_of(case: Case) -> tuple[SpeculativeDecoder, list[tuple[list[int], VerifyResult]]]:
    """Return the decoder of a case, with its random numbers, and what will be noted of its rounds:
    the target's most probable tokens and what was accepted. A tree of no nodes is not fed."""
    budget = case["tree_budget"]
    settings: dict[str, Any] = {
        "draft.drafter.source": source("zlab_dflash"),
        "draft.slots": case["block_size"],
        "draft.budget": None if budget is None else max(budget, 1),
        "draft.released": True,
        "length.tokens": None if budget is None or budget > 0 else 0,
        "temperature": case["temperature"],
        "checks_first": False,
    }
    plain = speculative("ddtree", settings)
    verify, noted = noting(GreedyMatch(), keep=lambda _, rows_RV, __: rows_RV.argmax(-1).tolist())
    return scripted(plain, case.get("uniforms") or [], verify=verify), noted


@replayed("new2026/ddtree.json")
def test_ddtree(case: Case) -> None:
    (decoder, noted), eos = ddtree_of(case), end_of(case)
    generation = generate(decoder, case["prompt"], case["max_new_tokens"] + 1, eos)
    assert list(generation.ids[: len(case["output"])]) == case["output"]
    found, rounds, made = verified(generation), case["rounds"], list[int]()
    with agreement(case):
        for (row, new), (own, result), entry in zip(found, noted, rounds, strict=False):
            nodes = len(entry["nodes"])
            assert [*row.drafted[:nodes]] == entry["nodes"]
            assert [*row.parents[:nodes]] == entry["parents"]
            assert depths(row.parents[:nodes])[1:] == entry["depths"]
            assert (row.proposed, row.fed, row.cached) == (nodes, nodes + 1, entry["anchor_pos"])
            if not case["temperature"]:
                assert own == entry["target_tokens"]
            places, following = drawn_path(result.own_X.tolist(), row.drafted, row.parents)
            assert [place + 1 for place in places] == entry["accepted_path"]
            assert following == entry["next_token"]
            made.append(len(places) + 1)
            assert row.accepted + 1 == len(new) or eos != NO_END
        assert made == case["acceptance_lengths"]


@replayed("new2026/ddtree_build.json")
def test_a_tree_is_built(case: Case) -> None:
    logits_NV, budget = torch.tensor(case["logits"]), case["budget"]
    with agreement(case):
        tokens_D, parents_D = likeliest_tree(logits_NV, budget)
        assert (tokens_D.tolist(), parents_D.tolist()) == (case["nodes"], case["parents"])
        path_DR = Proposal(tokens_D, parents_D=parents_D).path_DR
        rows = ["".join(str(int(seen)) for seen in row) for row in path_DR]
        assert rows == case["visibility_rows"][1:]


# --- DFlash 2 -------------------------------------------------------------------------------------

MODULES = GOLDEN / "new2026" / "dflash2_modules.json"
CHECKPOINTS = ("dflash2_b8", "dflash2_b16_swa")
CONFIGURED = tempfile.TemporaryDirectory()  # removed at exit


def checkpoint(case: Case) -> str:
    """Return the folder of a case's drafter, with the config that the case asks for. One case has
    more slots than its drafter was trained with, which is refused here."""
    published = GOLDEN / "new2026" / "ckpt" / case["checkpoint"]
    config = json.loads((published / "config.json").read_text())
    longer = case["block_size"] > config["dflash_config"]["block_size"]
    if not (case["config_override"] or longer):
        return str(published)
    made = Path(tempfile.mkdtemp(dir=CONFIGURED.name))
    config |= case["config_override"] or {}
    config["dflash_config"] |= {"block_size": case["block_size"]} if longer else {}
    config = {key: value for key, value in config.items() if value is not None}
    (made / "config.json").write_text(json.dumps(config))
    (made / "model.safetensors").symlink_to(published / "model.safetensors")
    return str(made)


def dflash2_of(case: Case) -> tuple[SpeculativeDecoder, list[tuple[list[Proposal], list[int]]]]:
    """Return the decoder of a case, with its random numbers, and what will be noted of drafts."""
    settings = {
        "draft.drafter.source": checkpoint(case),
        "draft.slots": case["block_size"],
        "temperature": case["temperature"],
        "top_p": case["top_p"],
        "top_k": case["top_k"] or None,
    }
    plain = speculative("dflash2", settings)
    length, noted = noting(plain.length, keep=list)
    return scripted(plain, case.get("uniforms") or [], length=length), noted


@replayed("new2026/dflash2.json")
def test_dflash2(case: Case) -> None:
    (decoder, noted), limit = dflash2_of(case), case["max_new_tokens"]
    generation = generate(decoder, case["prompt"], limit, end_of(case))
    with agreement(case):
        assert list(generation.ids[:limit]) == case["output"]
        found, rounds = verified(generation), case.get("rounds", [])
        made = [len(new) for _, new in found]
        if made:
            made[-1] -= max(0, len(generation.ids) - limit)
        assert made == case["acceptance_lengths"]
        for (row, new), ((proposal,), _), entry in zip(found, noted, rounds, strict=bool(rounds)):
            assert proposal.tokens_D.tolist() == entry["drafted"]
            assert row.cached == entry["anchor_pos"]
            first, last = entry["position_range"]
            assert (proposal.cached, proposal.cached + proposal.fed) == (first, last)
            assert new[: len(entry["committed"])] == entry["committed"]
            if proposal.probabilities_DV is not None:
                drawn_D = proposal.probabilities_DV.gather(1, proposal.tokens_D[:, None])[:, 0]
                close(drawn_D, torch.tensor(entry["draft_prob"], device=DEVICE))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_dflash2_forwards_sharing_one_cache(name: str) -> None:
    recorded, stored = json.loads(MODULES.read_text()), tensors(MODULES.with_suffix(".safetensors"))
    ids_L = torch.tensor(recorded["sequence"], device=DEVICE)
    features_1FC = fed_causally(target(), recorded["sequence"], (0, 1, 2))[1].features
    piece = DFlash2(TrainedBlockDrafter(str(GOLDEN / "new2026" / "ckpt" / name)))
    network: Any = piece.drafter.on(target())
    kv = piece.new_cache(target(), 64)
    for entry in (call for call in recorded["calls"] if call["checkpoint"] == name):
        start, (first, last) = entry["start"], entry["new_context_rows"]
        context = Context(ids_L[: start + 1], features_1FC[:, first:last], target(), kv)
        with torch.inference_mode():
            hidden_DH, logits_DV = network.block(context, piece.drafter.config.slots)
        key = f"{name}/{start}"
        close(hidden_DH, stored[f"{key}/hidden"][1:])
        close(logits_DV, stored[f"{key}/logits"])
        assert logits_DV.argmax(-1).tolist() == entry["unary_argmax"]
        ids_DK = stored[f"{key}/candidates"].long()
        assert logits_DV.topk(ids_DK.shape[1]).indices.tolist() == ids_DK.tolist()
        if f"{key}/edge_scores" in stored:
            before_DK = torch.stack([ids_L[start].expand(ids_DK.shape[1]), *ids_DK[:-1]])
            bias_DKK = network.path_biases(before_DK, hidden_DH, ids_DK)
            close(bias_DKK + logits_DV.gather(1, ids_DK)[:, None], stored[f"{key}/edge_scores"])
