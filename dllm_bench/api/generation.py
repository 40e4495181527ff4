"""Models, decoders and text as objects: `load_model`, `wrap`, `decoder`, `decoders`, `generate`,
`stream`.

`generate` decodes prompts with a model and a decoder as `dllm-bench run` decodes a benchmark's
requests, and gives a `Completion` for each: text, tokens, trace, metrics, and in a notebook the
order in which the text was filled. `on_commit` is called with the tokens of every forward, and
`stream` yields them.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from queue import SimpleQueue
from textwrap import shorten
from typing import Any, Literal, cast

from torch import Tensor

from dllm_bench.api.compose import as_override, compose, compose_decoder
from dllm_bench.benchmarks.items import likelihoods_of, option_of, request_of
from dllm_bench.core.benchmark import Turns
from dllm_bench.core.declared import Positive, fits, refusal, shown
from dllm_bench.core.decoder import BatchedDecoder, Decoder, Piece
from dllm_bench.core.denoiser import ForwardPlan, KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Likelihood, Request, filling
from dllm_bench.core.trace import ForwardKind, Trace
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.metrics.definitions import measure_all
from dllm_bench.metrics.sample_stats import SampleStats
from dllm_bench.models import wrapped
from dllm_bench.models.load import LoadedModel
from dllm_bench.models.load import load_model as load_checkpoint
from dllm_bench.models.spec import CANVAS
from dllm_bench.models.text import library_errors_named
from dllm_bench.paths import conf_dirs, options
from dllm_bench.registry import describe, require_known
from dllm_bench.runs.dependencies import Loaded
from dllm_bench.runs.runner import ready, require_memory, sample_record, timed
from dllm_bench.runs.sessions import check_batched
from dllm_bench.site.decoding_order import DecodingOrder, colours_of_forward, decoding_order
from dllm_bench.store.groups import BenchmarkGroup, Hardware, ModelGroup, Seed
from dllm_bench.store.inputs import decoder_of, model_spec, resolve_model
from dllm_bench.store.record import SampleRecord
from dllm_bench.store.spec import RunSpec

SHOWN_CHARACTERS = 60  # characters of a text in a completion's short form
MASKED = "░"  # how a masked position is shown
NEW_TOKENS = 128  # after a prompt, if no number is given
ATTENTION_FORMS = {"full": "full", "block": "block_causal", "causal": "causal"}


# --- models --------------------------------------------------------------------------------------


def load_model(source: str | Path, **settings: Any) -> LoadedModel:
    """Load a model; nothing is downloaded.

    source: a name of `conf/model` ("tiny-llada"), a checkpoint folder, or a hub id in the cache.
    settings: replace those of the model's yaml, for example `dtype="bfloat16"`, `device="cuda:1"`;
        `dllm_bench.models.spec.ModelSpec` lists them.

    Raises DllmBenchError, which names what is missing or does not fit.
    """
    changed = [as_override(f"++model.{key}", value) for key, value in settings.items()]
    model = compose([as_override("model", str(source)), *changed])["model"]
    loaded = load_checkpoint(model_spec(resolve_model(model, Hardware({}))))
    made = {"dtype": loaded.metadata.dtype, "attention": loaded.metadata.attention}
    return replace(loaded, settings={**model, **made})


def wrap(
    model: Any | Callable[[Tensor], Tensor],
    tokenizer: Any,
    *,
    mask_token: str | None = None,
    attention: Literal["full", "block", "causal"] = "full",
    block: int | None = None,
    shifted: bool | None = None,
    bos: bool = False,
    weights_hash: str | None = None,
) -> LoadedModel:
    """Return a model that is already loaded, ready for `generate`, `run` and `evaluate`.

    model: a `*ForCausalLM` object of transformers, which keeps its modes, flags and config; or any
        function from ids (B, L), int64, to logits (B, L, V). A function has no cache: each forward
        feeds the whole canvas, and decoders that cache are refused.
    tokenizer: its tokenizer, of transformers; with a chat template prompts may be chats.
    mask_token: text of the mask token, if neither config nor tokenizer names it.
    attention: which positions a position attends to, as in training: all, its own and earlier
    blocks, or earlier positions only (an autoregressive model). block: block length in positions,
    with attention="block". shifted: whether the logits at position i predict i + 1 (Dream); None:
    only if causal. bos: whether plain text begins with the BOS token. weights_hash: only for a
    function: a text that changes whenever its weights or code do. `run` needs it to tell stored
    runs apart. For a torch module the weights themselves are hashed.

    Raises DllmBenchError for a class that cannot be run, a missing mask token, and a function that
    does not return logits.
    """
    if not (callable(model) and hasattr(tokenizer, "get_vocab")):
        given = (type(one).__name__ for one in (model, tokenizer))
        raise DllmBenchError(
            f"wrap was given {' and '.join(given)} as model and tokenizer; give a loaded model or "
            "a function of ids, and a tokenizer of transformers."
        )
    require_known("form of attention", attention, ATTENTION_FORMS)
    if (block is not None) != (attention == "block"):
        raise DllmBenchError(
            f"wrap was given attention={attention!r} with block={block}; a block length goes with "
            'attention="block", and only with it.'
        )
    return wrapped.wrap_object(
        model,
        tokenizer,
        mask_token=mask_token,
        attention_form=ATTENTION_FORMS[attention],
        block=block,
        shifted=attention == "causal" if shifted is None else shifted,
        bos=bos,
        weights_hash=weights_hash,
    )


# --- decoders ------------------------------------------------------------------------------------


def decoders() -> list[str]:
    """Return the names of all decoders, those of plug-ins included."""
    return options("decoder")


def decoder(name: str, **settings: Any) -> Decoder:
    """Return a decoder by name, with some of its settings replaced.

    settings: a number of a piece by its dotted name (`**{"select.tau": 0.8}`); another piece for a
        slot, by name (`cache="none"`) or as an object (`select=Coin()`).

    DllmBenchError for unknown names and for pieces that do not fit together.
    """
    pieces = {key: value for key, value in settings.items() if isinstance(value, Piece)}
    changes = [slot_override(key, value) for key, value in settings.items() if key not in pieces]
    plain = compose_decoder(name, changes)
    unknown = sorted(pieces.keys() - plain.keys())
    if unknown:
        raise DllmBenchError(
            f"Decoder {name!r} has no slot {unknown[0]!r} for a piece; it has "
            f"{', '.join(key for key, value in plain.items() if isinstance(value, dict))}."
        )
    return decoder_of({**plain, **{key: describe(value) for key, value in pieces.items()}})


def composed_decoder(name: str, overrides: Sequence[str]) -> Decoder:
    """Return the decoder of a name with overrides as on the command line."""
    return decoder_of(compose_decoder(name, overrides))


def slot_override(key: str, value: Any) -> str:
    """Return the override for a setting of a decoder: a slot with a name chooses a piece."""
    if isinstance(value, Mapping):
        dotted = ", ".join(f'"{key}.{name}": {inner!r}' for name, inner in value.items())
        raise DllmBenchError(
            f"A decoder was given {key}={value!r}; settings of a piece are named with a dot: "
            f"**{{{dotted}}}."
        )
    is_slot = any((folder / "decoder" / key).is_dir() for folder in conf_dirs())
    chooses = is_slot and isinstance(value, str)
    return as_override(f"decoder/{key}" if chooses else f"decoder.{key}", value)


# --- generation ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Committed:
    """The tokens that one forward committed."""

    prompt: int  # index of the prompt among those given
    forward: int  # number of forwards so far, including this one
    positions: tuple[int, ...]  # offsets after the prompt, from 0
    ids: tuple[int, ...]  # their tokens
    text: str  # the text so far, with ░ at masked positions


@dataclass(frozen=True, repr=False)
class Completion:
    """The result of decoding one prompt."""

    prompt: str
    """The prompt; chat turns as Python shows them."""
    sample: SampleRecord = field(repr=False)
    """Everything that a run would store about it."""
    model: LoadedModel = field(repr=False)
    """The model."""
    decoder: Mapping[str, Any] = field(repr=False)
    """The decoder as plain data."""

    @property
    def text(self) -> str:
        """The answer, cut at the first end token or stop string."""
        return self.sample.text

    @property
    def tokens(self) -> list[int]:
        """Ids of the answer, up to the first reason to end."""
        return self.sample.ids[: min(self.sample.cut.values())]

    @property
    def trace(self) -> Trace:
        """What each forward did."""
        return Trace.from_columns(self.sample.trace)

    @property
    def order(self) -> DecodingOrder:
        """Which forward committed which token."""
        return decoding_order(self.sample, self.model.text.decode_visibly, self.decoder)

    def metrics(self) -> dict[str, float]:
        """Return metrics by name (`tpf/emitted`, …); those that one sample does not define are left
        out.

        Completions of a batch have no timings of their own.
        """
        found = measure_all([self.sample.stats()])
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        size = f"{len(self.tokens)} tokens in {len(self.trace)} forwards"
        return f"Completion({shorten(self.text, SHOWN_CHARACTERS)!r}, {size})"

    def _repr_html_(self) -> str:
        """Return the filled canvas; a token's background is the colour of its forward, dark to
        light."""
        order = self.order
        spans = "".join(self._spans(order))
        size = f"{len(order.tokens)} positions in {len(order.steps)} forwards"
        return f'<pre style="white-space: pre-wrap">{spans}</pre><small>{size}</small>'

    def _spans(self, order: DecodingOrder) -> Iterator[str]:
        for position, token in enumerate(order.tokens[: order.end]):
            if token.born is None:
                yield MASKED
                continue
            ink, background = colours_of_forward(token.born, len(order.steps))
            style = f"color: {ink}; background: rgb{background}"
            title = f"position {position}, forward {token.born}"
            yield f'<span style="{style}" title="{title}">{escape(token.text)}</span>'


Prompt = str | Turns
OnCommit = Callable[[Committed], object]


def generate(
    model: LoadedModel | str | Path,
    prompts: Prompt | Sequence[Prompt],
    decoder: Decoder | str,
    max_new_tokens: int | None = None,
    *,
    batch: int = 1,
    stop: Sequence[str] = (),
    seed: int = 0,
    on_commit: OnCommit | None = None,
) -> list[Completion]:
    """Decode prompts; one completion for each, in their order.

    model: made by `load_model` or `wrap`, or an argument of `load_model`.
    prompts: a text, a chat ([{"role": "user", "content": …}, …]), or a list of such. Masks in a
        prompt are filled in place, and nothing comes after it; the completion's text begins with
        the first of them.
    decoder: an object made by `decoder`, or a name.
    max_new_tokens: length of the canvas after the prompt, 128 if None; block decoders open whole
        blocks.
    batch: how many requests share a forward; above 1, completions have no timings of their own.
    stop: strings that end a text.
    seed: seed of the random numbers of decoders that sample.
    on_commit: called with the `Committed` tokens of every forward while it decodes; needs batch=1.

    DllmBenchError if model, decoder and settings do not fit together.
    """
    several, stops = as_list(prompts), as_stops(stop)
    batch, seed = as_whole("batch", batch, Positive), as_whole("seed", seed, Seed)
    if max_new_tokens is not None:
        max_new_tokens = as_whole("max_new_tokens", max_new_tokens, Positive)
    if not (on_commit is None or callable(on_commit)):
        raise DllmBenchError(f"generate has on_commit {on_commit!r}; give a function, or None.")
    if on_commit is not None and batch != 1:
        raise DllmBenchError(
            f"on_commit follows one request at a time, and batch={batch} was given; leave one out."
        )
    loaded = model if isinstance(model, LoadedModel) else load_model(model)
    chosen = composed_decoder(decoder, []) if isinstance(decoder, str) else decoder
    if not hasattr(chosen, "summary"):
        raise DllmBenchError(f"The decoder is {chosen!r}; give a name, or an object of `decoder`.")
    valid = "give texts of valid Unicode, or chats that the model's template takes"
    with library_errors_named("A prompt cannot be encoded", valid):
        gaps = [loaded.special.mask in loaded.encode(one) for one in several]
    if any(gaps):
        chosen = gap_filler(chosen, all(gaps), max_new_tokens)
    new = NEW_TOKENS if max_new_tokens is None and not any(gaps) else max_new_tokens
    spec = spec_of(loaded, chosen, seed=seed, batch=batch)
    generator = PromptGenerator(spec, chosen, loaded)
    requests = (generator.request(one, new, stops) for one in several)
    if batch == 1:
        samples = [generator.decode(one, i, on_commit) for i, one in enumerate(requests)]
    else:
        check_batched(spec)
        waiting, started_at = list(requests), time.time()
        made = zip(waiting, decode_together(loaded, chosen, waiting, batch), strict=True)
        samples = [sample_record(*one, loaded, started_at) for one in made]
    pairs = zip(several, samples, strict=True)
    return [Completion(str(one), sample, loaded, spec.decoder) for one, sample in pairs]


def gap_filler(decoder: Decoder, every: bool, max_new_tokens: int | None) -> MaskedDecoder:
    """Return a decoder that fills the masks of prompts and puts no end token into a gap.

    every: whether all prompts have masks.

    DllmBenchError if they cannot be filled.
    """
    if not isinstance(decoder, MaskedDecoder):
        raise DllmBenchError(
            f"The prompt has masks to fill, but {type(decoder).__name__} writes a text "
            "after the prompt; choose a decoder that fills masks, such as fast_dllm."
        )
    if max_new_tokens is not None:
        raise DllmBenchError(
            "In a prompt with masks only these are filled, but "
            f"max_new_tokens={max_new_tokens} was given; leave that out, or end the prompt before "
            "the first mask."
        )
    if not every:
        raise DllmBenchError(
            "Some prompts have masks to fill and others are to be continued; give those with masks "
            "in a call of their own."
        )
    return replace(decoder, forbid="ends")


def stream(
    model: LoadedModel | str | Path,
    prompt: Prompt,
    decoder: Decoder | str,
    *args: Any,
    **kwargs: Any,
) -> Iterator[Committed]:
    """Yield the tokens of each forward as soon as it committed them, for one prompt.

    Further arguments are those of `generate`, which decodes in another thread. Closing the iterator
    early waits until decoding has finished. Errors of `generate` are raised here.
    """
    committed = SimpleQueue[Committed | None]()
    if kwargs.get("on_commit") is not None:
        raise DllmBenchError(
            "stream was given on_commit, and yields what that would be called with; leave it out, "
            "or use generate."
        )
    kwargs["on_commit"] = committed.put
    with ThreadPoolExecutor(1) as thread:
        decoding = thread.submit(generate, model, prompt, decoder, *args, **kwargs)
        decoding.add_done_callback(lambda _: committed.put(None))
        while (tokens := committed.get()) is not None:
            yield tokens
        decoding.result()


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a single text, chat or turn of a chat becomes a list of one."""
    is_one = isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable)
    every: list[Any] = [prompts] if is_one else list(prompts)
    every = [every] if every and isinstance(every[0], Mapping) else every
    for one in every:
        if not (isinstance(one, str) or fits(one, Sequence[Mapping[str, Any]])):
            raise DllmBenchError(
                f"A prompt is {shown(one)}; give a text, a chat "
                '([{"role": "user", "content": …}, …]), or a list of such.'
            )
    return every


def as_stops(stop: Any) -> tuple[str, ...]:
    """Return stop strings; DllmBenchError for anything but texts in a list."""
    is_list = isinstance(stop, Iterable) and not isinstance(stop, str)
    stops: tuple[Any, ...] = tuple(stop) if is_list else (None,)
    if not all(isinstance(one, str) for one in stops):
        raise DllmBenchError(f"generate has stop {shown(stop)}; give a list of texts.")
    return stops


def as_whole(name: str, value: Any, declared: Any) -> int:
    """Return a whole number, NumPy's included; DllmBenchError if it is not as declared."""
    number = value.__index__() if hasattr(value, "__index__") else value
    if not fits(number, declared):
        raise refusal("generate", name, declared, value)
    return int(number)


def spec_of(model: LoadedModel, decoder: Decoder, **settings: Any) -> RunSpec:
    """Return a specification of what is decoded, for a model and a decoder that are objects; its
    hash says nothing of the weights.
    """
    return RunSpec(
        model=ModelGroup({"name": model.metadata.name}),
        decoder=describe(decoder),
        benchmark=BenchmarkGroup({}),
        hardware=Hardware({"device": model.denoiser.device.type}),
        **settings,
    )


@dataclass
class PromptGenerator:
    """Decodes prompts from outside a benchmark, one at a time: those of `generate` and of lm-eval.

    Requests are prepared, decoded and cut as in the runner, so all three give the same text for a
    prompt. A repeated prompt is another sample with another seed, as repetitions of a task intend.
    """

    spec: RunSpec
    decoder: Decoder
    loaded: Loaded
    seen: Counter[str] = field(default_factory=Counter)  # prompt hash -> how often it came
    stats: list[SampleStats] = field(default_factory=list)  # one per text so far

    @property
    def name(self) -> str:
        """Model, decoder and hash of the settings."""
        return f"{self.spec.model.name}-{self.spec.label}-{self.spec.short}"

    def request(self, prompt: Prompt, max_new_tokens: int | None, stop: tuple[str, ...]) -> Request:
        """Return the request for a prompt, ready for the decoder; without `max_new_tokens` the
        prompt's own masks are filled.
        """
        ids = tuple(self.loaded.encode(prompt))
        new = 1 if max_new_tokens is None else max_new_tokens
        request = Request(self.id_of(ids), ids, new, stop, str(prompt))
        if max_new_tokens is None:
            request = filling(request, self.loaded.denoiser.special)
        require_memory(self.spec, self.decoder, self.loaded, request)
        return ready(self.spec, self.decoder, self.loaded, request)

    def id_of(self, ids: tuple[int, ...]) -> str:
        """Return the id of a request, from its tokens and how often they came."""
        key = hashlib.sha256(repr(ids).encode()).hexdigest()
        self.seen[key] += 1
        return f"{key}#{self.seen[key] - 1}"

    def __call__(self, prompt: Prompt, max_new_tokens: int, stop: tuple[str, ...]) -> str:
        """Return the text for a prompt."""
        return self.decode(self.request(prompt, max_new_tokens, stop)).text

    def likelihood(self, context: Prompt, continuation: str) -> Likelihood:
        """Return the log-likelihood of a continuation; of a whole text after an empty context.

        DllmBenchError if the decoder generates texts.
        """
        if not self.decoder.summary().scores_options:
            raise DllmBenchError(
                f"A likelihood was asked for, and {self.spec.label} generates text; choose "
                "decoder=likelihood (LLaDA's Monte-Carlo bound; decoder.draws, decoder.guidance) "
                "or decoder=likelihood_exact (decoder.block)."
            )
        option = option_of(context, continuation, self.loaded.encode)
        made = request_of(self.id_of((*option.prompt_ids, -1, *option.ids)), [option])
        asked = ready(self.spec, self.decoder, self.loaded, made)
        return likelihoods_of(self.decode(asked).text)[0]

    def decode(
        self, request: Request, index: int = 0, on_commit: OnCommit | None = None
    ) -> SampleRecord:
        """Decode a prepared request under the clock and keep its counts.

        index: of its prompt, which `on_commit` is told while the request is decoded.
        """
        model: Any = self.loaded.denoiser
        if on_commit is not None:
            loaded = cast(LoadedModel, self.loaded)
            model = WatchedDenoiser(loaded, request, index, on_commit)
        started_at = time.time()
        generation, seconds = timed(lambda: self.decoder.generate(model, request), model.device)
        sample = sample_record(request, generation, self.loaded, started_at, seconds=seconds)
        if on_commit is not None:
            model.finish(sample)
        self.stats.append(sample.stats())
        return sample

    def metrics(self) -> dict[str, float | None]:
        """Return the metrics of all texts so far, by name."""
        return measure_all(self.stats)


def decode_together(
    model: LoadedModel, decoder: Decoder, requests: Sequence[Request], batch: int
) -> list[Generation]:
    """Decode prepared requests, `batch` at a time; generations in the order of the requests."""
    stream = cast(BatchedDecoder, decoder).generate_stream(model.denoiser, requests, batch)
    made = {generation.request_id: generation for generation in stream}
    return [made[request.id] for request in requests]


# --- tokens while they are committed -------------------------------------------------------------


@dataclass(eq=False, repr=False)
class WatchedDenoiser:
    """Wraps a model and reports, before each forward, the tokens committed since the previous
    forward.

    All calls are passed on to the model. Only committed tokens are reported: of the branches of a
    forward, those of the base branch (the last row); of a verification, those before its first
    wanted row, since the rest is a draft; of a canvas of random tokens, none until it is finished.
    A token is reported again if it was masked in between, or if a longer canvas moved it.
    """

    _model: LoadedModel
    _request: Request
    _index: int
    _on_commit: OnCommit
    _known: dict[int, int] = field(default_factory=dict)
    _forwards: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.denoiser, name)

    def forward(self, tokens_KL: Tensor, plan: ForwardPlan, kv: KVCache) -> Tensor:
        """See `Denoiser.forward`."""
        canvas = tokens_KL[-1].tolist()
        tentative = plan.kind is ForwardKind.VERIFY or self._model.attention_form == CANVAS
        committed = plan.rows[0] if tentative else len(canvas)
        mask = self._model.special.mask
        place = len(self._request.prompt_ids)
        filled = [token if i < committed else mask for i, token in enumerate(canvas)][place:]
        self._report(filled, range(len(filled)))
        self._forwards += 1
        return self._model.denoiser.forward(tokens_KL, plan, kv)

    def finish(self, sample: SampleRecord) -> None:
        """Report what the last forward committed."""
        self._report(sample.ids, [place for place, at in enumerate(sample.born) if at >= 0])

    def _report(self, canvas: Sequence[int], places: Sequence[int]) -> None:
        mask = self._model.special.mask
        stands = ((i, token) for i, token in self._known.items() if i < len(canvas))
        self._known = {i: token for i, token in stands if canvas[i] == token}
        new = [i for i in places if canvas[i] not in (mask, self._known.get(i))]
        if not new:
            return
        ids = tuple(canvas[i] for i in new)
        self._known.update(zip(new, ids, strict=True))
        text = "".join(
            MASKED if token == mask else self._model.text.decode_visibly([token])
            for token in canvas
        )
        self._on_commit(Committed(self._index, self._forwards, tuple(new), ids, text))
