"""The compiled programs of an engine, and the arrays of requests from which they make rows."""

from __future__ import annotations

import functools
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool, Int

from specjax.controllers import StepRecord
from specjax.core import initial_state, loop
from specjax.core.cache import KVCache
from specjax.core.drafter import Sampling
from specjax.core.drafter_errors import errors_of
from specjax.core.plan import LoopPlan
from specjax.core.processor import Processor, states_of
from specjax.core.state import (
    RUNNING,
    STOPPED,
    RowProperties,
    State,
    admit,
    cached_states,
    caches_of,
    clear_caches,
    copy_caches,
    give_back,
    lend,
    release,
    take,
    with_cached_lengths,
    with_pages,
    with_pools,
    without_entries,
)
from specjax.distributed import device_memory
from specjax.distributed.device_memory import MemoryPlan
from specjax.distributed.sharding import (
    DATA,
    axis_size,
    constrain_rows,
    place_keys,
    place_rows,
    use,
)
from specjax.engine.grammars import table_of
from specjax.engine.plan import MOST_STATES_OF_PROMPT, DecodePlan
from specjax.engine.processing import carried_over, requested_arrays
from specjax.engine.requests import Request, SamplingParams
from specjax.files import program_cache
from specjax.files.log import LOGGER
from specjax.methods.registry import all_registered

start = jax.jit(initial_state.start, static_argnums=0)
"""`initial_state.start`, compiled for callers that run rounds without an engine."""
run = jax.jit(loop.run, static_argnums=0, donate_argnums=2)
"""`loop.run`, compiled."""
put_rows = jax.jit(admit, donate_argnums=0)
"""`state.admit`, compiled."""
_made: set[int] = set()
"""The hashes of the arguments with which `_compile` was called."""
_plans: dict[str, LoopPlan] = {}
"""The latest plan with each description that was logged."""


RowArguments = tuple[
    *tuple[Int[Array, "B S"], RowProperties, Int[Array, "B"], Int[Array, "B"], Int[Array, "B"]],
    tuple[Any, ...],
]
"""The arrays of `initial_state.start`: tokens, fixed properties, lengths, status, rounds, and those
that processors read.
"""
_FINISHED = Request(0, (0,), SamplingParams())


def row_arguments(
    plan: DecodePlan, requests: Sequence[Request | None], num_rows: int | None = None
) -> RowArguments:
    """Return the arrays of `num_rows` rows, by default those of the plan.

    The first rows are those of `requests`; the others, and None, have finished already.
    """
    batch = plan.num_rows if num_rows is None else num_rows
    given = [*requests, *[None] * (batch - len(requests))]
    rows = [_FINISHED if request is None else request for request in given]
    sampling = [row.sampling for row in rows]
    tokens = np.zeros((batch, plan.loop.capacity), np.int32)
    stop_ids = np.full((batch, plan.num_stop_ids), -1, np.int32)
    for at, row in enumerate(rows):
        tokens[at, : len(row.tokens)] = row.tokens
        stops = plan.stop_ids(row.sampling)[: plan.num_stop_ids]
        stop_ids[at, : len(stops)] = stops
    prompt_lengths = np.array([len(row.prompt) for row in rows], np.int32)
    room = np.array([params.max_new_tokens for params in sampling], np.int64)
    max_length = np.minimum(prompt_lengths + room, plan.options.max_length)
    seed = plan.options.seed
    unused = jax.random.key(seed)
    keys = [unused if request is None else request.key(seed) for request in given]
    where = plan.placement

    def placed(values: Any, dtype: Any = np.int32) -> Array:
        return place_rows(np.asarray(values, dtype), where=where)

    fixed = RowProperties(
        index=placed([row.number for row in rows]),
        prompt_length=placed(prompt_lengths),
        key=place_keys(keys, where),
        sampling=Sampling(
            temperature=placed([params.temperature for params in sampling], np.float32),
            top_k=placed([params.top_k for params in sampling]),
            top_p=placed([params.top_p for params in sampling], np.float32),
            min_p=placed([params.min_p for params in sampling], np.float32),
        ),
        max_length=placed(max_length),
        stop_ids=placed(stop_ids),
    )
    length = placed([len(row.tokens) for row in rows])
    status = placed([STOPPED if request is None else RUNNING for request in given])
    rounds = placed([row.rounds for row in rows])
    requested = _requested(plan, sampling, stop_ids, max_length - prompt_lengths)
    return placed(tokens), fixed, length, status, rounds, requested


def _requested(
    plan: DecodePlan,
    sampling: Sequence[SamplingParams],
    stop_ids: Int[np.ndarray, "B stops"],
    room: Int[np.ndarray, "B"],
) -> tuple[Any, ...]:
    """Return the arrays that each processor of a plan reads of rows with these parameters.

    `room` is the most new tokens of each row.
    """
    arrays = requested_arrays(
        plan.loop.processors,
        sampling,
        stop_ids,
        plan.loop.capacity,
        plan.model.config.vocab_size,
        [table_of(plan.model, params) for params in sampling],
        room,
    )
    return jax.tree.map(lambda array: place_rows(array, where=plan.placement), arrays)


def processor_states(plan: DecodePlan, state: State, requested: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the states of a plan's processors after the tokens of the rows of `state`.

    `requested` are the arrays that the processors read of these rows, from `row_arguments`.
    """
    if not plan.loop.processors:
        return ()
    with use(plan.mesh):
        return _processor_states(
            plan.loop, requested, state.tokens, state.rows.prompt_length, state.length
        )


@functools.partial(jax.jit, static_argnums=0)
def _processor_states(
    loop_plan: LoopPlan,
    requested: tuple[Any, ...],
    tokens: Int[Array, "B S"],
    prompt_length: Int[Array, "B"],
    length: Int[Array, "B"],
) -> tuple[Any, ...]:
    rows = requested, tokens, prompt_length, length
    states = states_of(loop_plan.processors, *rows, loop_plan.target.vocab_size)
    # Copies, since the rows' own arrays are donated beside them.
    return constrain_rows(jax.tree.map(jnp.copy, states))


def carried_states(
    plan: DecodePlan,
    before: tuple[Processor, ...],
    states: tuple[Any, ...],
    fresh: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Return the states of a plan's processors in rows that had `states` of those `before`.

    The arguments are those of `carried_over`.
    """
    with use(plan.mesh):
        return _carried(before, states, plan.loop.processors, fresh)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _carried(
    before: tuple[Processor, ...],
    states: tuple[Any, ...],
    after: tuple[Processor, ...],
    fresh: tuple[Any, ...],
) -> tuple[Any, ...]:
    return constrain_rows(carried_over(before, states, after, fresh))


class Programs(NamedTuple):
    """The compiled functions of a plan, and the seconds spent compiling.

    - `empty(params, *arguments)` returns the state of all slots, from the arrays of
      `initial_state.start`; nothing is read yet.
    - `new(params, state, slots, cached, *arguments)` also returns the state of rows to be admitted
      to `slots`. Where `lends`, these have no caches of their own: their prompts are read into the
      caches of the slots, which `new` clears; in a pool the rows' pages hold `cached` tokens.
    - `read(params, state, new, slots, pages, begin, end)` reads the prompts of new rows.
    - `admit(state, slots, sources, new)` moves new rows, read into the slots `sources`, into slots.
    - `step(params, state, limits, host_ended, max_rounds, stop_after_finished, pages)` is
      `loop.step`.

    `read` and `admit` also return an array that becomes ready when they are done. A state that a
    function changes is donated. `memory` is the memory that they need, `state_bytes` that of the
    `cached_states` of rows that are read together, and `timed` are the records of steps that were
    timed once (`engine.timed_steps`), if any.
    """

    empty: Any
    new: Any
    read: Any
    admit: Any
    step: Any
    memory: MemoryPlan
    state_bytes: int
    seconds: float
    timed: list[StepRecord]


def compile_plan(plan: DecodePlan, *, begun: bool = False) -> Programs:
    """Return the plan's programs, compiled now or earlier in this process.

    Raises InputError if they do not fit into memory, or if a user-defined drafter cannot be traced.
    With `begun`, the state of all rows is already in memory.
    """
    key = _key(plan)
    programs = _compile(*key)
    memory = needed_memory(plan, programs)
    if hash(key) not in _made:
        memory.log_if_large()
    _made.add(hash(key))
    size = "batch_size, max_length, max_new_tokens"
    if plan.loop.num_pages:
        size = "num_kv_pages" + ", num_kept_states" * (plan.num_kept_states is not None)
    memory.check(
        f"lower {size} or num_speculative_tokens",
        plan.num_rows,
        plan.loop.capacity,
        num_pages=plan.loop.num_pages,
        begun=begun,
    )
    return programs


def needed_memory(plan: DecodePlan, programs: Programs) -> MemoryPlan:
    """Return the memory that a plan's programs and the states that its engine keeps need."""
    memory = programs.memory
    if (kept := plan.num_kept_states) is None:
        return memory
    # Those of the prompt that is read wait until its pages can be shared.
    states = {f"{kept} kept states": (kept + MOST_STATES_OF_PROMPT) * programs.state_bytes}
    return replace(memory, arrays=memory.arrays | states)


def is_compiled(plan: DecodePlan) -> bool:
    """Return whether this process has compiled the plan's programs."""
    return hash(_key(plan)) in _made


def _key(plan: DecodePlan) -> tuple[LoopPlan, Mesh | None, Any, tuple[_Leaf, ...]]:
    """Return the arguments of `_compile`: everything that a plan's programs depend on."""
    shapes = [_row_forms(plan, rows) for rows in (plan.num_rows, plan.prefill_rows)]
    leaves, tree = jax.tree.flatten((plan.params, *shapes))
    return plan.loop, plan.mesh, tree, tuple(map(_Leaf.of, leaves))


_forms: dict[Hashable, Any] = {}


def _row_forms(plan: DecodePlan, rows: int) -> Any:
    """Return the shapes, dtypes and shardings of the arguments of so many rows.

    They are kept, since engines ask before each step, and tables of grammars are large.
    """
    key = plan.loop, rows, plan.num_stop_ids, plan.placement, plan.options.max_length
    if key not in _forms:
        _forms[key] = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            row_arguments(plan, [], rows),
        )
    return _forms[key]


class _Leaf(NamedTuple):
    """The shape, dtype and sharding of an argument array, hashable for use in a cache key."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None

    @classmethod
    def of(cls, leaf: Any) -> _Leaf:
        return cls(leaf.shape, leaf.dtype, getattr(leaf, "sharding", None))


@functools.lru_cache(maxsize=64)
def _compile(
    loop_plan: LoopPlan, mesh: Mesh | None, tree: Any, leaves: tuple[_Leaf, ...]
) -> Programs:
    program_cache.keep_in_library()
    begin = time.perf_counter()
    shapes = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in leaves
    ]
    params, every, few = jax.tree.unflatten(tree, shapes)
    LOGGER.info("compiling %s; later calls reuse it", _described(loop_plan, every[2].shape[0]))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    ended = jax.ShapeDtypeStruct(every[2].shape, bool)
    slots = jax.ShapeDtypeStruct(few[2].shape, jnp.int32)
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    with use(mesh):
        # Each step returns the state to the next, so the first placement holds for all steps.
        empty = jax.jit(_slots, static_argnums=0)
        empty, state, placed = compile_placed(_lowered(empty, loop_plan, params, *every), mesh)
        out = None if mesh is None else (placed, None)
        new = jax.jit(new_rows, static_argnums=(0, 1), donate_argnums=3, out_shardings=out)
        lends = axis_size(mesh, DATA) == 1
        lowered = _lowered(new, loop_plan, lends, params, state, slots, slots, *few)
        new, (_, rows), out = compile_placed(lowered, mesh)
        out = None if mesh is None else (*out, whole)
        read = jax.jit(read_rows, static_argnums=0, donate_argnums=(2, 3), out_shardings=out)
        pages = None
        if loop_plan.page_size is not None:
            shape = (*every[2].shape, loop_plan.capacity // loop_plan.page_size)
            pages = jax.ShapeDtypeStruct(shape, jnp.int32)
        arguments = loop_plan, params, state, rows, slots, pages, number, number
        lowered = [_lowered(read, *arguments)]
        out = None if mesh is None else (placed, whole)
        put = jax.jit(_admit, static_argnums=0, donate_argnums=1, out_shardings=out)
        lowered.append(put.lower(loop_plan, state, slots, slots, rows))
        step = jax.jit(loop.step, static_argnums=0, donate_argnums=2, out_shardings=out)
        limits = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
            loop_plan.drafter.full_limits(),
        )
        arguments = loop_plan, params, state, limits, ended, number, number, pages
        lowered.append(_lowered(step, *arguments))
        # The compiler releases Python's lock, so that programs compile in parallel.
        with ThreadPoolExecutor() as threads:
            read, put, step = threads.map(lambda one: one.compile(), lowered)
    seconds = time.perf_counter() - begin
    temporaries = device_memory.temporary_bytes((read, step), mesh)
    memory = _memory(params, state, rows, temporaries)
    states = [(cache.length, cache.recurrent) for cache in caches_of(rows)]
    state_bytes = device_memory.bytes_per_device(states)
    return Programs(empty, new, read, put, step, memory, state_bytes, seconds, [])


def _described(loop_plan: LoopPlan, rows: int) -> str:
    """Return a description of a plan's programs for `rows` rows that no earlier plan has."""
    nodes, rule = loop_plan.drafter.num_nodes, loop_plan.rule.name
    drafting = f"{loop_plan.drafter.name} with drafts of {nodes} token{'s' * (nodes > 1)}"
    text = (
        f"{drafting if nodes else 'plain decoding'}, verify={rule}, "
        f"{'sampled' if loop_plan.flags.sampled else 'greedy'}"
        f"{' with log-probabilities' * loop_plan.logprobs}, for {rows} row{'s' * (rows > 1)} of "
        f"up to {loop_plan.capacity} tokens, prompt included"
    )
    before, _plans[text] = _plans.get(text), loop_plan
    if before is None:
        return text
    changed = [
        field.name
        for field in fields(LoopPlan)
        if getattr(loop_plan, field.name) != getattr(before, field.name)
    ]
    return f"{text}, with other {', '.join(changed) or 'arrays'} than before"


def _memory(params: Any, state: State, rows: State, temporaries: int) -> MemoryPlan:
    """Return the memory of the state of all slots, of new rows, and of temporary arrays."""
    parts = {
        device_memory.CACHES: state.cache,
        "drafters": (state.drafter, state.features),
        "prompts being read": rows,
        "tokens": (state.tokens, state.logprobs),
        "processors": state.processors,
    }
    arrays = {name: device_memory.bytes_per_device(part) for name, part in parts.items()}
    return MemoryPlan(device_memory.bytes_per_device(params), arrays, temporaries)


@jax.jit
def take_rows(state: State, rows: Int[Array, "A"], spare: Bool[Array, "A"]) -> State:
    """Return the state of `rows` alone, in that order; those marked `spare` are released."""
    return release(take(state, rows), spare)


@jax.jit
def copied_states(state: State) -> list[KVCache]:
    """Return copies of `cached_states`, which outlive a state that is donated."""
    return jax.tree.map(jnp.copy, cached_states(state))


def _slots(loop_plan: LoopPlan, params: Any, *arguments: Any) -> State:
    """Return `initial_state.empty_state` for all slots of an engine, whose caches may be pools."""
    state = make_empty()(loop_plan, params, *arguments)
    if loop_plan.page_size is None:
        return state
    # Each page is like a row of its own, and on a mesh is sharded like one. The host keeps the
    # rows' pages.
    size = loop_plan.num_pages, loop_plan.page_size
    pools = loop_plan.target.make_cache(*size), loop_plan.drafter.init(params[1], *size)
    return with_pools(state, pools)


def new_rows(
    loop_plan: LoopPlan,
    lends: bool,
    params: Any,
    state: State,
    slots: Int[Array, "A"],
    cached: Int[Array, "A"],
    *arguments: Any,
) -> tuple[State, State]:
    """Return a state, and `initial_state.empty_state` of rows to be admitted to its `slots`.

    If it `lends` its caches, these are cleared there, since masking does not hide keys that are not
    numbers, and the new rows have the lengths alone. In a pool, these are `cached`.
    """
    new = make_empty()(loop_plan, params, *arguments)
    if loop_plan.page_size is not None:
        return state, with_cached_lengths(without_entries(new), cached)
    return (clear_caches(state, slots), without_entries(new)) if lends else (state, new)


def make_empty() -> Any:
    """Return `initial_state.empty_state`, compiled with one trace for all equal programs."""
    return jax.jit(initial_state.empty_state, static_argnums=0, inline=True)


def read_rows(
    loop_plan: LoopPlan,
    params: Any,
    state: State,
    new: State,
    slots: Int[Array, "A"],
    pages: Int[Array, "B N"] | None,
    begin: Any,
    end: Any,
) -> tuple[State, State, Any]:
    """Return a state and new rows after `initial_state.read_prompts`, and a number.

    The number is ready when they are. If caches are pools, `pages` are those of the slots.
    """
    if pages is not None:
        state = with_pages(state, pages)
    lent = lend(state, new, slots)
    state, new = give_back(state, initial_state.read_prompts(loop_plan, params, lent, begin, end))
    return state if pages is None else with_pages(state, None), new, end + 0


def _admit(
    loop_plan: LoopPlan, state: State, slots: Int[Array, "A"], sources: Int[Array, "A"], new: State
) -> tuple[State, Int[Array, "A"]]:
    """Return the state of `state.admit`, and an array that is ready when it is."""
    if loop_plan.page_size is None:
        state = copy_caches(state, new, sources, slots)
    return admit(state, slots, new), slots + 0


def compile_placed(lowered: Any, mesh: Mesh | None) -> tuple[Any, Any, Any]:
    """Return a compiled program, the shapes of its results, and their placement on a mesh.

    The placement is None without a mesh.
    """
    state, make = lowered.out_info, lowered.compile()
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        make.output_shardings,
    )
    return make, state, None if mesh is None else make.output_shardings


def _lowered(program: Any, loop_plan: LoopPlan, *arguments: Any) -> Any:
    """Return a program of a plan, traced and lowered.

    Raises InputError, with its cause, if a user-defined drafter cannot be traced.
    """
    if all_registered(loop_plan.drafter.parts):
        return program.lower(loop_plan, *arguments)
    with errors_of(loop_plan.drafter.name):
        return program.lower(loop_plan, *arguments)
