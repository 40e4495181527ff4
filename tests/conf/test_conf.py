"""Every configuration composes, and every piece, decoder, model and benchmark can be made from it.

Parametrised by directory listing: a new yaml is tested without touching this file.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

from dllm_bench.api.compose import as_override, compose
from dllm_bench.cli.main import main
from dllm_bench.core.declared import Probability
from dllm_bench.core.decoder import Piece
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.canvas import CanvasDecoder
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.methods.likelihood import LikelihoodDecoder
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.spec import ModelSpec
from dllm_bench.paths import CONFIG_DIR, conf_dir, options
from dllm_bench.registry import PIECES, instantiate, name_of
from dllm_bench.store.groups import ModelGroup, role_of
from dllm_bench.store.inputs import engine_of
from dllm_bench.store.spec import leaves
from tests.speculative import with_drafter
from tests.tiers import covering

COMBINATORS = {"stop.any_of"}  # made of other pieces, written out in a decoder's yaml
NOT_OF_A_RUN = {"hydra", "table", "figure", "profile", "claim"}
DECODERS = (MaskedDecoder, SpeculativeDecoder, LikelihoodDecoder, CanvasDecoder)
SLOTS = sorted(path.name for path in (conf_dir() / "decoder").iterdir() if path.is_dir())
HOMES = dict.fromkeys(("draft", "verify", "length"), "dspark")
HOMES |= dict.fromkeys(("accept", "renoise", "anneal", "settle"), "diffusion_gemma")
"""Slot that most decoders lack -> a decoder that has it."""


def within(choice: str) -> list[str]:
    """Overrides that choose a piece: within a decoder that has its slot."""
    if home := HOMES.get(slot_of(choice)):
        return [f"decoder={home}", choice]
    return [f"+{choice}" if choice.startswith("experiment=") else choice]


def slot_of(choice: str) -> str:
    """Return the slot of `decoder/SLOT=NAME`, else the group."""
    return choice.removeprefix("decoder/").partition("=")[0]


def groups() -> list[str]:
    """Return all groups a run is composed of, `decoder/score` and its like included."""
    folders = {path.parent.relative_to(conf_dir()) for path in conf_dir().rglob("*.yaml")}
    names = sorted(folder.as_posix() for folder in folders if folder.parts)
    return [name for name in names if name.split("/")[0] not in NOT_OF_A_RUN]


CHOICES = [f"{group}={name}" for group in groups() for name in options(group)]


@pytest.mark.parametrize("choice", covering(6, CHOICES))
def test_every_choice_composes_and_every_decoder_and_piece_can_be_made(choice, tmp_path) -> None:
    config = compose(within(choice))
    assert all(role_of(key) for key, _ in leaves(config))
    assert not [value for _, value in leaves(config) if str(value) in ("???", "${")]
    if choice.startswith("decoder"):
        whole = with_drafter(config["decoder"], tmp_path)
        slot = slot_of(choice)
        plain = {"decoder": {k: v for k, v in whole.items() if k != "name"}, **whole}[slot]
        made = instantiate(plain, slot)
        assert isinstance(made, (Piece, *DECODERS)) and hash(made) == hash(made)
    if choice.startswith("decoder="):
        assert_a_refused_length_names_settings_it_has(choice, config["decoder"])


def assert_a_refused_length_names_settings_it_has(choice: str, plain: dict[str, Any]) -> None:
    schedule = "schedule" in plain and instantiate(plain["schedule"], "schedule")
    try:
        if schedule and schedule.block:
            schedule.grid(10, schedule.block + 1)
    except DllmBenchError as refused:
        assert "decoder.schedule.block" in str(refused)
        (switch,) = re.findall(r"decoder\.(schedule\.\w+=true)", str(refused))
        other = compose([choice, f"decoder.{switch}"])["decoder"]["schedule"]
        instantiate(other, "schedule").grid(10, schedule.block + 1)


@pytest.mark.parametrize("name", ["credit", "credit_lopa", "klass"])
def test_long_blocks_end_any_length_with_a_short_one(name: str) -> None:
    schedule = compose([f"decoder={name}"])["decoder"]["schedule"]
    assert (schedule["block"], schedule["short"]) == (64, True)


def test_every_threshold_is_declared_as_a_probability() -> None:
    """But for two in nats. What is declared refuses values that no probability can equal, which
    would force every commit, or pass everything."""
    hints = {n: get_type_hints(k, include_extras=True) for n, k in concrete_pieces().items()}
    others = {n for n, types in hints.items() if types.get("tau", Probability) != Probability}
    assert others == {"select.entropy", "select.near_entropy"}


@pytest.mark.parametrize("slot", SLOTS)
def test_every_piece_has_a_yaml(slot: str) -> None:
    written = {
        f"{kind.__module__}.{kind.__qualname__}"
        for name, kind in concrete_pieces().items()
        if name.startswith(f"{slot}.") and name not in COMBINATORS
    }
    yamls = (conf_dir() / "decoder" / slot).glob("*.yaml")
    assert written == {yaml.safe_load(path.read_text())["_target_"] for path in yamls}


@cache
def concrete_pieces() -> dict[str, type[Piece]]:
    """Registered name -> class, of every module that holds pieces; each has to be registered."""
    folders = [importlib.import_module(home) for home in PIECES]
    modules = [m for m in folders if not hasattr(m, "__path__")]
    for folder in (m for m in folders if hasattr(m, "__path__")):
        names = [found.name for found in pkgutil.iter_modules(folder.__path__)]
        modules += [importlib.import_module(f"{folder.__name__}.{name}") for name in names]
    kinds = [(m, k) for m in modules for k in vars(m).values() if isinstance(k, type)]
    pieces = [k for m, k in kinds if issubclass(k, Piece) and k.__module__ == m.__name__]
    return {name_of(kind): kind for kind in pieces if not inspect.isabstract(kind)}


@pytest.mark.parametrize("name", covering(4, options("model")))
def test_every_model_is_weights_or_a_served_engine(name: str) -> None:
    model = compose([f"model={name}"])["model"]
    found = engine_of(model) if ModelGroup(model).is_served else ModelSpec(**model)
    assert found.name == name
    if isinstance(found, ModelSpec):
        assert found.adapter in ADAPTERS and not (found.chat and found.bos)


@pytest.mark.parametrize("name", covering(3, options("benchmark")))
def test_every_benchmark_can_be_made(name: str, real_data: Path) -> None:
    plain = compose([f"benchmark={name}", f"paths.data={real_data}"])["benchmark"]
    if "evalplus" in plain["_target_"]:
        pytest.importorskip("evalplus", reason="code benchmarks need the extra [code]")
    assert instantiate(plain, "benchmark").name == plain["name"]


@pytest.mark.parametrize("name", options("hydra/launcher"))
def test_every_launcher_composes(name: str) -> None:
    if name == "slurm":
        plugin = "hydra_plugins.hydra_submitit_launcher"
        pytest.importorskip(plugin, reason="hydra/launcher=slurm needs the extra [slurm]")
    assert compose([f"hydra/launcher={name}"]) == compose([])


def test_an_experiment_chooses_the_launcher(tmp_path, monkeypatch, capsys) -> None:
    """Its jobs go where it says; a single run, for which Hydra starts no launcher, is refused."""
    for name, text in (
        ("hydra/launcher/queue", "_target_: hydra_plugins.hydra_queue.QueueLauncher"),
        ("experiment/sent", "# @package _global_\ndefaults: [{override /hydra/launcher: queue}]"),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.setenv(CONFIG_DIR, str(tmp_path))
    assert main(["run", "+experiment=sent", f"paths.results={tmp_path}"]) == 2
    assert "hydra/launcher=queue submits the jobs of -m" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="QueueLauncher"):  # Hydra looks for it
        main(["run", "-m", "+experiment=sent", "seed=0,1", f"paths.results={tmp_path}"])


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["decoder=lopa", "decoder.schedule.tau_add=0.2", "benchmark=gsm8k", "paths.data=null"],
        ["model=served", "decoder/score=margin", "decoder.forbid_mask=false", "paths.results=x/y"],
        ["+decoder.cache.extra=[1,2]", "decoder.cache.attention='full'", "~seed"],
        ["+experiment=first_run", "decoder=vanilla"],
        ["benchmark=deepspec_gsm8k", "model=llada2.1-mini", "hardware=h200"],
        ["limit=1", "decoder=fast_dllm", "limit=2", "logger=wandb", "logger.mode=offline"],
    ],
    ids=str,
)
def test_the_quick_way_composes_what_hydra_composes(overrides: list[str]) -> None:
    """`compose` puts plain values on a cached choice of groups; Hydra alone gives the same."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = hydra.compose("run", overrides=overrides)
    expected = OmegaConf.to_container(cfg, resolve=True)
    found = compose(overrides)
    found["decoder"].pop("name")
    assert found == expected


TEXTS = [
    *("\n", "é", "a\\b", "${home:x}", "\\${x}", "\\\\${x}$${", "it's", "\\'", "a\\", "'", '"', ""),
    *("null", "1e3", "a, b]", " {x: 1} ", "\\n", "<|mask|>"),
]  # fmt: skip


def test_a_text_of_an_override_arrives_as_it_is() -> None:
    texts = [*TEXTS, TEXTS, []]
    values = {f"text_{i}": text for i, text in enumerate([*texts, *([text, 1] for text in texts)])}
    overrides = [as_override(f"++decoder.{name}", value) for name, value in values.items()]
    for given in (overrides, ["~seed", *overrides]):  # quickly, and by Hydra alone
        decoder = compose(["decoder=vanilla", *given])["decoder"]
        assert {name: decoder[name] for name in values} == values


def test_a_decoder_with_other_pieces_is_called_after_them() -> None:
    def name(*overrides: str) -> str:
        return str(compose(overrides)["decoder"]["name"])

    assert name("decoder=vanilla", "decoder/select=factor") == "vanilla+select.factor"
    assert name("decoder=vanilla", "decoder/select=topk") == "vanilla", "its yaml's own piece"
    assert name("decoder=credit", "decoder.score.alpha=0.1") == "credit"
    assert name("decoder=vanilla", "decoder/select=factor", "+decoder.name=mine") == "mine"
