"""The compiled programs of an engine: prompts read into new rows, rows admitted, rounds."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from specjax.decoding import loop
from specjax.decoding.plan import Setup
from specjax.decoding.rows import row_arguments
from specjax.decoding.state import Plan, admit
from specjax.distributed import device_memory
from specjax.distributed.sharding import use
from specjax.drafters.registry import all_registered
from specjax.errors import InputError, one_line
from specjax.files import compiled_programs

start = jax.jit(loop.start, static_argnums=0)
"""`loop.start`, compiled: for what follows the state of a batch itself."""
run = jax.jit(loop.run, static_argnums=0, donate_argnums=2)
"""`loop.run`, compiled."""


class Programs(NamedTuple):
    """The compiled functions of a plan, and what compiling them took.

    `empty(params, *arguments)` and `new(params, *arguments)` make the state of all slots, and of
    rows that are to be admitted, from `loop.start`'s arrays; nothing is read yet. `read(params,
    state, begin, end)` reads new rows' prompts, `admit(state, slots, new)` puts them in, and
    `step(params, state, ended, max_rounds, enough)` is `loop.step`. The state that is changed is
    donated.
    """

    empty: Any
    new: Any
    read: Any
    admit: Any
    step: Any
    seconds: float


def compile_setup(setup: Setup, replayed_rounds: int = 0) -> Programs:
    """The setup's programs, compiled now or earlier in this process."""
    shapes = [
        row_arguments(setup, [], rows, replayed_rounds)
        for rows in (setup.num_rows, setup.prefill_rows)
    ]
    leaves, tree = jax.tree.flatten((setup.params, *shapes))
    return _compile(setup.plan, setup.mesh, tree, tuple(map(_Leaf.of, leaves)))


class _Leaf(NamedTuple):
    """What a program has to know of an argument's array: hashable, as a cache's key must be."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding | None

    @classmethod
    def of(cls, leaf: Any) -> _Leaf:
        return cls(leaf.shape, leaf.dtype, getattr(leaf, "sharding", None))


@functools.lru_cache(maxsize=64)
def _compile(plan: Plan, mesh: Mesh | None, tree: Any, leaves: tuple[_Leaf, ...]) -> Programs:
    compiled_programs.keep_in_library()
    begin = time.perf_counter()
    shapes = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in leaves
    ]
    params, every, few = jax.tree.unflatten(tree, shapes)
    _check_drafters(plan, params, every)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    ended = jax.ShapeDtypeStruct(every[2].shape, bool)
    slots = jax.ShapeDtypeStruct(few[2].shape, jnp.int32)
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    with use(mesh):
        # A state goes round: what was chosen for it at first holds for every later step.
        empty, state, placed = _first(plan, params, every, mesh)
        new, rows, rows_placed = _first(plan, params, few, mesh)
        read = jax.jit(
            loop.read_prompts, static_argnums=0, donate_argnums=2, out_shardings=rows_placed
        )
        read = read.lower(plan, params, rows, number, number).compile()
        put = jax.jit(admit, donate_argnums=0, out_shardings=placed)
        put = put.lower(state, slots, rows).compile()
        step = jax.jit(
            loop.step,
            static_argnums=0,
            donate_argnums=2,
            out_shardings=None if mesh is None else (placed, whole),
        )
        step = step.lower(plan, params, state, ended, number, number).compile()
    device_memory.check_fits(
        (empty, read, step),
        "lower batch_size, max_length, max_new_tokens or num_speculative_tokens",
        mesh,
    )
    return Programs(empty, new, read, put, step, time.perf_counter() - begin)


def _first(plan: Plan, params: Any, arguments: Any, mesh: Mesh | None) -> tuple[Any, Any, Any]:
    """The program that makes a state, the state's shapes, and where it is placed on a mesh."""
    make = jax.jit(loop.empty_state, static_argnums=0).lower(plan, params, *arguments)
    state, make = make.out_info, make.compile()
    if mesh is None:
        return make, state, None
    placed = make.output_shardings
    state = jax.tree.map(
        lambda leaf, there: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there),
        state,
        placed,
    )
    return make, state, placed


def _check_drafters(plan: Plan, params: Any, arguments: Sequence[Any]) -> None:
    """Raise InputError, its cause with it, where a drafter of a user's own cannot be traced."""
    if all_registered(plan.drafter.parts):
        return

    try:
        started = jax.eval_shape(functools.partial(loop.start, plan), params, *arguments)
        after, _ = jax.eval_shape(functools.partial(loop.one_round, plan), params, started)
    except Exception as error:  # a drafter is the user's own code and may raise anything
        raise InputError(
            f"drafter {plan.drafter.name!r}: fails in a round ({type(error).__name__}: "
            f"{one_line(error):.200}); propose returns (Draft, state) with "
            "num_speculative_tokens nodes of whole numbers, and the state keeps its shapes"
        ) from error
    before, now = (
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state.drafter)
        for state in (started, after)
    )
    if before != now:
        raise InputError(
            f"drafter {plan.drafter.name!r}: its state changes shape or dtype in a round; "
            "propose and observe return a state like that of init"
        )
