"""Plans: everything that is fixed before any request is decoded, checked and chosen.

A plan is made from a target, a drafter and options, before any long work. Requests come beside it:
any that its programs support can be decoded with it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from specjax.controllers import Controller, DrafterSizes, Fixed, StepSizes
from specjax.core.language_model import LanguageModel
from specjax.core.none import NoDrafter
from specjax.core.plan import LoopPlan
from specjax.core.processor import Processor
from specjax.core.state import is_recurrent
from specjax.core.verify import check_rule_shapes
from specjax.distributed.sharding import (
    DATA,
    Placement,
    axis_size,
    first_device,
    placement_of,
    spread,
)
from specjax.drafters import DRAFTER_KIND, Drafter, LoadedDrafter, Turns
from specjax.engine.grammars import table_of
from specjax.engine.options import DecodeOptions
from specjax.engine.processing import check_processing, check_shapes, processors_of, union
from specjax.engine.requests import (
    Prompts,
    Request,
    SamplingParams,
    as_prompts,
    encode_prompt,
    one_per_prompt,
    stop_ids,
)
from specjax.errors import InputError
from specjax.loading.model import MODEL_KIND, Model
from specjax.loading.user_messages import note
from specjax.models.layers.attention import CACHE_BLOCK
from specjax.sampling import RULES, WarpFlags

_DISPATCH_S = {"cpu": 0.001, "accelerator": 0.005}
"""The host's overhead per step in seconds: measured as 1 to 2 ms with a CPU, 3 to 14 with a GPU."""
_PREFILL_CHUNKS = {"cpu": (256, 64)}
"""Prompt tokens of one forward, by platform; the smaller size is for what is left of a prompt."""
_ACCELERATOR_CHUNKS = (1024, 256)
"""At Llama-8B's shape an H100 computes with some 300 tokens as long as it reads the weights."""
GREEDY = WarpFlags(sampled=False, top_k=False, top_p=False, min_p=False)
_ENGINE_LENGTH = 2048
"""The default for an engine's maximum tokens per row, if the target has that many positions."""
MOST_STATES_OF_PROMPT = 4
"""The most states that are kept of a prompt, and per slot unless options give a number in all."""
_STOP_IDS = 8
"""The minimum number of stop token ids per row for which there is room."""


@dataclass(frozen=True)
class DecodePlan:
    """What is fixed for decoding any requests together: a target, a drafter, options, programs.

    `loop` is the resulting configuration of the compiled loop. `options` have all defaults filled
    in. At most `num_stop_ids` token ids end a row.
    """

    model: Model
    drafter: LoadedDrafter
    options: DecodeOptions
    loop: LoopPlan
    num_stop_ids: int

    @property
    def params(self) -> tuple[Any, Any]:
        """The parameters of the target, and those of the drafter."""
        return self.model.params, self.drafter.params

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the model, or None."""
        return self.model.mesh

    @property
    def placement(self) -> Placement:
        """The model's mesh or device, on which decoding runs."""
        return placement_of(self.model.params, self.mesh)

    @functools.cached_property
    def num_rows(self) -> int:
        """The number of rows on the devices (B), some of which may be idle.

        It is a power of two times the size of the `data` axis.
        """
        return self.rows_for(self.options.batch_size)

    def rows_for(self, batch_size: int) -> int:
        """Return the number of rows on the devices of a plan with that many slots."""
        return round_up(_power_of_two(batch_size), axis_size(self.mesh, DATA))

    @property
    def prefill_rows(self) -> int:
        """The number of prompts read together: one per device along `data`."""
        return axis_size(self.mesh, DATA)

    @functools.cached_property
    def keeps_states(self) -> bool:
        """Whether the target or a drafter has recurrent layers.

        What they have read is a state, which only allows continuing where it was kept.
        """
        loop = self.loop
        return _has_recurrent_layers(loop.target, loop.drafter, self.drafter.params)

    @property
    def num_kept_states(self) -> int | None:
        """The most states of recurrent layers that are kept for later rows; None if none are."""
        if not (self.options.enable_prefix_caching and self.keeps_states):
            return None
        return self.options.num_kept_states or MOST_STATES_OF_PROMPT * self.num_rows

    @property
    def step_sizes(self) -> StepSizes:
        """The sizes of the compiled step, which a length controller is told at the start."""
        drafters = [
            DrafterSizes(part.num_nodes, part.stops, part.num_speculative_tokens)
            for part in self.loop.drafter.parts
        ]
        on_cpu = first_device(self.placement).platform == "cpu"
        return StepSizes(
            tuple(drafters),
            self.loop.widths,
            self.num_rows,
            dispatch_s=_DISPATCH_S["cpu" if on_cpu else "accelerator"],
            wide_is_cheap=not on_cpu,
        )

    def is_lossy(self, sampling: SamplingParams) -> bool:
        """Return whether the rule changes the distribution of a request's tokens.

        Those of greedy requests are never changed.
        """
        return not self.loop.rule.exact and sampling.temperature > 0

    def stop_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Return the ids of the tokens that end a request's output."""
        return stop_ids(self.model, sampling)

    def controlled_by(self, controller: Controller | None) -> DecodePlan:
        """Return the plan with `controller` for draft lengths; None stands for fixed lengths."""
        options = self.options.controlled_by(controller)
        platform = first_device(self.placement).platform
        lengths = _lengths(options, self.loop.drafter, platform)
        if lengths["full_drafts"] == self.loop.full_drafts:
            return replace(self, options=options)
        return replace(self, options=options, loop=replace(self.loop, **lengths))

    def with_options(self, **changes: Any) -> DecodePlan:
        """Return the plan with other values of options that do not affect the loop."""
        return replace(self, options=replace(self.options, **changes))


def plan_requests(
    target: Model,
    prompts: Prompts,
    *,
    drafter: LoadedDrafter | Drafter | None = None,
    options: DecodeOptions = DecodeOptions(),  # noqa: B008 - frozen
    sampling: Any = SamplingParams(),  # noqa: B008 - frozen
) -> tuple[DecodePlan, list[Request]]:
    """Check and encode the arguments of a call; return its plan and its requests.

    The arguments are those of `generate.generate`. Nothing is measured. Raises InputError for bad
    input.
    """
    requests = encode_requests(target, prompts, sampling=sampling, max_length=options.max_length)
    options = replace(options, batch_size=min(options.batch_size, len(requests)))
    most = max(len(one.prompt) + one.sampling.max_new_tokens for one in requests)
    return plan_rows(target, drafter, options, most, [one.sampling for one in requests]), requests


def encode_requests(
    target: Model,
    prompts: Prompts,
    *,
    sampling: Any = SamplingParams(),  # noqa: B008 - frozen
    max_length: int | None = None,
    names: Sequence[str] | None = None,
) -> list[Request]:
    """Return the requests of prompts, in rows of at most `max_length` tokens.

    `sampling` is as of `generate.generate`, and `names` are the names of the prompts in errors.
    Raises InputError for bad input, NoRoomError for a prompt that leaves no room for a new token.
    """
    MODEL_KIND.check("target", target)
    prompts = as_prompts(prompts)
    each = one_per_prompt(sampling, len(prompts))
    names = names or [f"prompts[{i}]" for i in range(len(prompts))]
    encoded = [encode_prompt(target, p, name) for p, name in zip(prompts, names, strict=True)]
    for params in each:
        check_sampling(target, params)
    longest = longest_row(target, max_length)
    for name, ids, params in zip(names, encoded, each, strict=True):
        check_length(target, name, len(ids), longest, params)
    requests = [
        Request(number, tuple(ids), params)
        for number, (ids, params) in enumerate(zip(encoded, each, strict=True))
    ]
    if max_length is None:
        _say_beyond(target, names, requests)
    return requests


def _say_beyond(target: Model, names: Sequence[str], requests: Sequence[Request]) -> None:
    """Log a line if rows of some requests would exceed the positions that the target has."""
    positions = target.config.max_positions
    beyond = [
        (name, request)
        for name, request in zip(names, requests, strict=True)
        if len(request.prompt) + request.sampling.max_new_tokens > positions
    ]
    if not beyond:
        return
    name, request = beyond[0]
    others = f" ({len(beyond)} such prompts)" if len(beyond) > 1 else ""
    count = len(request.prompt)
    note(
        f"{name} has {count} tokens, and max_new_tokens={request.sampling.max_new_tokens} would "
        f"exceed the {positions} positions for which {target.name} is configured; its output ends "
        f"after {positions - count} tokens{others}"
    )


def plan_rows(
    target: Model,
    drafter: LoadedDrafter | Drafter | None,
    options: DecodeOptions,
    num_tokens: int,
    sampling: Sequence[SamplingParams],
) -> DecodePlan:
    """Return a plan for any prompts with up to `num_tokens` tokens per row, output included.

    Its programs support all of `sampling`. Raises InputError for bad input.
    """
    MODEL_KIND.check("target", target)
    for params in sampling:
        check_sampling(target, params)
    longest = longest_row(target, options.max_length)
    return _plan(
        target,
        drafter,
        replace(options, max_length=longest),
        capacity=min(num_tokens, longest),
        flags=flags_of(sampling),
        processors=processors_of(sampling, [table_of(target, params) for params in sampling]),
        logprobs=any(params.logprobs for params in sampling),
        num_stop_ids=max(_STOP_IDS, *(len(stop_ids(target, params)) for params in sampling)),
    )


def plan_engine(
    target: Model, drafter: LoadedDrafter | Drafter | None, options: DecodeOptions
) -> DecodePlan:
    """Return the plan of an engine, which takes any prompts.

    Raises InputError for options that do not fit the target or the drafter.
    """
    longest = longest_row(target, options.max_length)
    if options.max_length is None:
        longest = min(longest, _ENGINE_LENGTH)
    options = replace(options, max_length=longest)
    return _plan(target, drafter, options, capacity=longest, flags=WarpFlags())


def _plan(
    target: Model,
    drafter: LoadedDrafter | Drafter | None,
    options: DecodeOptions,
    *,
    capacity: int,
    flags: WarpFlags,
    processors: Sequence[Processor] = (),
    logprobs: bool = False,
    num_stop_ids: int = _STOP_IDS,
) -> DecodePlan:
    """Return the plan of rows of up to `capacity` tokens, rounded up to share programs.

    The programs support sampling with `flags` and `processors`, beside those of the options, and,
    with `logprobs`, return log-probabilities. Raises InputError for bad input.
    """
    max_length = options.max_length
    drafter = DRAFTER_KIND.check("drafter", NoDrafter() if drafter is None else drafter)
    drafter = drafter._replace(
        params=spread(drafter.params, placement_of(target.params, target.mesh))
    )
    most, table = options.fixed_draft_length, options.num_speculative_tokens_per_batch_size
    if most is None:
        most = max(drafter.drafter.num_speculative_tokens, *(count for _, _, count in table), 0)
    # No row could emit all tokens of a longer draft and the bonus token.
    turns = drafter.drafter.limited(min(most, max(max_length - 2, 1)))
    rule = options.verify
    longest, capacity = capacity, _capacity(capacity, max_length)
    platform = first_device(placement_of(target.params, target.mesh)).platform
    num_pages = _num_pages(target, turns, options, capacity, longest)
    loop = LoopPlan(
        target=target.architecture,
        drafter=turns,
        rule=rule,
        flags=flags,
        capacity=capacity,
        chunks=options.chunks(_chunks(platform, capacity, axis_size(target.mesh, DATA))),
        rounds_per_step=max(LoopPlan.rounds_per_step, options.rounds_per_step),
        logprobs=logprobs,
        processed_logprobs=options.logprobs_mode == "processed_logprobs",
        page_size=options.kv_page_size,
        num_pages=num_pages,
        processors=union(options.processors, processors),
        **_lengths(options, turns, platform),
    )
    for part in turns.parts:
        if part.branches and not rule.takes_trees:
            raise InputError(
                f"verify={rule.name}: {part.name} drafts trees, and {rule.name} verifies chains; "
                "use rejection, block or coupled, or draft chains"
            )
    if type(rule) not in map(type, RULES.values()):
        check_rule_shapes(rule, options.batch_size, loop.widths, target.config.vocab_size)
    for processor in options.processors:
        check_shapes(processor, options.batch_size, capacity, target.config.vocab_size)
    # No row outgrows its caches.
    options = replace(options, max_length=min(max_length, loop.capacity))
    plan = DecodePlan(target, drafter, options, loop, num_stop_ids)
    if options.enable_prefix_caching and plan.prefill_rows > 1 and plan.keeps_states:
        raise InputError(
            f"enable_prefix_caching=True: with mesh.data={plan.prefill_rows} states of recurrent "
            "layers are not kept; leave it out, or use mesh.data=1"
        )
    if options.num_kept_states is not None and not plan.keeps_states:
        raise InputError(
            f"num_kept_states={options.num_kept_states}: neither the target nor a drafter has "
            "recurrent layers; leave it out"
        )
    return plan


def _num_pages(
    target: Model, drafter: Turns, options: DecodeOptions, capacity: int, longest: int
) -> int:
    """Return the size of the pool of pages of a plan with caches of `capacity` tokens.

    Rows have at most `longest` tokens, of which the caches do not hold the last. Raises InputError
    for a pool that is too small for one row, or that the devices along `data` cannot share out, and
    for prefixes that cannot be shared with a drafter.
    """
    size, data = options.kv_page_size, axis_size(target.mesh, DATA)
    if size is None:
        return 0
    check_pages_on_mesh(options.num_kv_pages, data)
    if options.enable_prefix_caching and drafter.following_tokens is None:
        raise InputError(
            f"enable_prefix_caching=True: {drafter.name} has to observe all tokens of each prompt; "
            "leave it out, or use another drafter"
        )
    row_pages = -(-(longest - 1) // size)
    if options.num_kv_pages is not None and options.num_kv_pages < row_pages * data:
        enough = f"use {row_pages * data}, for mesh.data={data}," if data > 1 else "use that many"
        raise InputError(
            f"num_kv_pages={options.num_kv_pages}: a request of {longest} tokens needs {row_pages} "
            f"pages of {size}; {enough} at least, or set a smaller max_length"
        )
    rows = round_up(_power_of_two(options.batch_size), data)
    return options.num_kv_pages or rows * (capacity // size)


def _has_recurrent_layers(target: LanguageModel, drafter: Turns, draft_params: Any) -> bool:
    def caches(draft_params: Any) -> Any:
        return target.make_cache(1, CACHE_BLOCK), drafter.init(draft_params, 1, CACHE_BLOCK)

    return is_recurrent(jax.eval_shape(caches, draft_params))


def check_pages_on_mesh(num_pages: int | None, data: int) -> None:
    """Raise InputError for a number of pages that `data` devices cannot share out."""
    if num_pages is not None and num_pages % data:
        raise InputError(
            f"num_kv_pages={num_pages}: each of mesh.data={data} devices has as many pages; use a "
            f"multiple of {data}"
        )


def check_sampling(target: Model, sampling: SamplingParams) -> None:
    """Raise InputError for sampling parameters that the target does not support."""
    if target.tokenizer is None and sampling.stop:
        raise InputError(f"sampling.stop: {target.name} has no tokenizer; use stop_token_ids")
    check_processing(sampling, target.config.vocab_size)
    table_of(target, sampling)


def _lengths(options: DecodeOptions, drafter: Turns, platform: str) -> dict[str, Any]:
    """Return the fields of a LoopPlan that depend on whether draft lengths vary.

    On an accelerator a drafter whose drafts have a fixed length runs without waiting for data.
    """
    fixed = options.length_controller == Fixed() and len(drafter.parts) == 1
    if platform == "cpu" or not fixed or not drafter.num_nodes:
        return {"widths": widths(drafter.num_nodes, platform), "full_drafts": False}
    return {"widths": (1 + drafter.num_nodes,), "full_drafts": True}


def widths(most: int, platform: str) -> tuple[int, ...]:
    """Return the window sizes to compile for drafts of up to `most` nodes, ascending.

    `platform` is "cpu" or another name. On a CPU the cost of a pass grows with its width, so that a
    program for half the draft pays off. On accelerators a wider pass costs nearly the same (8
    tokens took 0.86 of the time of 1 token, with Llama-8B's shape on an H100).
    """
    half = {1 + -(-most // 2)} if platform == "cpu" else set()
    return tuple(sorted({1, *half, 1 + most}))


def longest_row(target: Model, max_length: int | None) -> int:
    """Return the maximum number of tokens per row.

    Raises InputError if `max_length` exceeds the target's positions.
    """
    longest = target.config.max_positions
    if max_length is None:
        return longest
    if max_length > longest:
        raise InputError(
            f"max_length={max_length} exceeds the {longest} positions of {target.name}: lower it"
        )
    return max_length


class NoRoomError(InputError):
    """The error for a prompt that leaves no room for a new token."""


def check_length(
    target: Model, name: str, count: int, longest: int, sampling: SamplingParams | None = None
) -> None:
    """Raise NoRoomError if a prompt of `count` tokens leaves no room for a new token.

    Nor must it leave too little for an output of the grammar that `sampling` asks for, if any. The
    prompt is called `name` in the error. A row may have `longest` tokens.
    """
    table = None if sampling is None else table_of(target, sampling)
    least = 1 if table is None else int(table.least[0])
    if count + least <= longest:
        return
    positions = target.config.max_positions
    room, remedy = f"the {positions} positions of {target.name}", "shorten it"
    if longest < positions:
        default = " (the default of engines)" if longest == _ENGINE_LENGTH else ""
        room, remedy = f"max_length={longest}{default}", "shorten it or raise max_length"
    output = "a new one" if least == 1 else f"the {least} tokens of the shortest output"
    raise NoRoomError(
        f"{name} has {count} tokens, which leaves no room for {output} in {room}: {remedy}"
    )


def flags_of(sampling: Iterable[SamplingParams]) -> WarpFlags:
    """Return the warp flags to compile for: those of greedy decoding, or those of any sampling.

    More specific flags would need more programs.
    """
    return GREEDY if all(params.temperature <= 0 for params in sampling) else WarpFlags()


def _capacity(longest: int, most: int) -> int:
    """Return the cache capacity for rows of `longest` tokens; no row has more than `most`.

    It is one of a few sizes, so that programs are shared. A larger cache is not slower, since
    attention reads committed tokens only.
    """
    size = CACHE_BLOCK
    while size < longest:
        size *= 2
    return min(size, round_up(most, CACHE_BLOCK))


def _chunks(platform: str, capacity: int, together: int) -> tuple[int, ...]:
    """Return the sizes of prefill chunks (descending) for a cache of `capacity` tokens.

    They are those that a prompt can fill, and the smallest. If `together` prompts are read at once,
    there is only one size, so that the chunks of a prompt do not depend on the others.
    """
    *large, smallest = _PREFILL_CHUNKS.get(platform, _ACCELERATOR_CHUNKS)
    large = [size for size in large if size < capacity and together == 1]
    return (*large, min(smallest, capacity))


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is no smaller than `value`."""
    return -(-value // step) * step


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
