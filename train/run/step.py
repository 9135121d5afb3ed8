"""A training step as a compiled program, and the state that it updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from specjax.distributed.device_memory import MemoryPlan, bytes_per_device, temporary_bytes
from specjax.distributed.sharding import use
from specjax.models.decoder import Decoder
from train.data.batches import Batch
from train.experts.balance import balanced
from train.methods.method import Measures, Method
from train.methods.packed_rows import fill_features
from train.run.optimizer import Optimization, learning_rate, make_optimizer
from train.run.sharding import copied, split_over_data

_LATE = np.int32(2**30)
"""A step number that is late in any run."""


@struct.dataclass
class TrainState:
    """The arrays that a step updates, and `key`, the data of the run's constant random key.

    `average` is the average of the parameters over steps, if one is kept.
    """

    params: Any
    optimizer: Any
    step: Int[Array, ""]
    key: UInt32[Array, "words"]
    average: Any = None

    @property
    def result(self) -> Any:
        """The parameters that are evaluated and exported: the average, if one is kept."""
        return self.params if self.average is None else self.average


@struct.dataclass
class Report:
    """The results of a step: sums over its labels, and the number of tokens without padding.

    `schedules` are the learning rate and the method's own schedules at this step, by name.
    """

    loss: Float[Array, ""]
    measures: Measures
    tokens: Int[Array, ""]
    grad_norm: Float[Array, ""]
    schedules: dict[str, Float[Array, ""]]


class Program(NamedTuple):
    """The compiled functions of a run; `state` holds its initial arrays.

    `step(state, target_params, batches)` donates the state's buffers; `evaluate(params,
    target_params, batches)` returns the summed loss and measures. `batches` have a leading axis of
    micro-batches.
    """

    state: TrainState
    step: Callable[[TrainState, Any, Batch], tuple[TrainState, Report]]
    evaluate: Callable[[Any, Any, Batch], tuple[Float[Array, ""], Measures]]
    mesh: Mesh | None

    def compile(
        self,
        target_params: Any,
        batches: Batch,
        remedy: str = "lower row_tokens, or raise accumulate",
    ) -> Callable:
        """Return the function `step`, compiled for batches of this shape.

        Raises InputError, which says the `remedy`, if it does not fit into memory.
        """
        with use(self.mesh):
            compiled = self.step.lower(self.state, target_params, batches).compile()
        weights = bytes_per_device((self.state, target_params))
        memory = MemoryPlan(weights, {}, temporary_bytes([compiled], self.mesh))
        memory.log_if_large()
        memory.check(remedy)
        return compiled


def make_program(
    method: Method,
    decoder: Decoder,
    optimization: Optimization,
    mesh: Mesh | None,
    *,
    seed: int,
    remat: bool = False,
    fsdp: bool = False,
) -> Program:
    """Return the program of a method, whose random numbers derive from `seed`.

    `remat` is that of `loss_function`; with `fsdp` the parameters are sharded over the mesh's
    `data` axis, as the optimizer's state always is. Raises InputError for optimization options that
    do not fit the method's parameters.
    """
    run_key = jax.random.key(seed)
    init_key, key = jax.random.split(run_key)
    loss = loss_function(method, decoder, remat)
    params = copied(method.init(init_key), mesh, fsdp)
    optimizer = make_optimizer(optimization, params, method.layers)
    rate = learning_rate(optimization)
    shapes = jax.eval_shape(optimizer.init, params)
    moments = None if mesh is None else split_over_data(shapes, mesh, split=True)
    state = TrainState(
        params=params,
        optimizer=jax.jit(optimizer.init, out_shardings=moments)(params),
        step=copied(np.int32(0), mesh),
        key=copied(np.asarray(jax.random.key_data(key)), mesh),
        average=jax.tree.map(jnp.copy, params) if optimization.average else None,
    )

    def step(state: TrainState, target_params: Any, batches: Batch) -> tuple[TrainState, Report]:
        def one(params: Any, batch: Batch, key: Any) -> tuple[Any, Any]:
            return loss(params, target_params, batch, key, state.step)

        at = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        keys = jax.random.split(at, batches.tokens.shape[0])
        grads, value, measures = summed_gradients(one, state.params, batches, keys)
        # A batch may, rarely, have no label at all; its gradient is zero, not undefined.
        share = 1 / jnp.maximum(measures.weight, 1)
        grads = jax.tree.map(lambda leaf: leaf * share, grads)
        updates, moments = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        params = balanced(params, measures.loads, optimization.balance_rate)
        average = state.average
        if average is not None:
            # Early steps count for little: the first ones would otherwise stay in the average.
            decay = jnp.minimum(optimization.average, (1 + state.step) / (10 + state.step))
            average = optax.incremental_update(params, average, 1 - decay)
        schedules = {"learning_rate": rate, **method.schedules}
        after = state.replace(
            params=params, optimizer=moments, step=state.step + 1, average=average
        )
        return after, Report(
            loss=value,
            measures=measures,
            tokens=(batches.segments > 0).sum(dtype=jnp.int32),
            grad_norm=optax.tree.norm(grads),
            schedules={name: schedule(state.step) for name, schedule in schedules.items()},
        )

    def evaluate(params: Any, target_params: Any, batches: Batch) -> tuple[Any, Measures]:
        def one(batch: Batch) -> tuple[Any, Measures]:
            return loss(params, target_params, batch, None)

        sums = jax.lax.map(one, batches)
        return jax.tree.map(lambda leaf: leaf.sum(axis=0), sums)

    shardings = None if mesh is None else jax.tree.map(lambda leaf: leaf.sharding, state)
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    both = None if mesh is None else (shardings, replicated)
    return Program(
        state=state,
        step=jax.jit(step, donate_argnums=0, out_shardings=both),
        evaluate=jax.jit(evaluate, out_shardings=replicated),
        mesh=mesh,
    )


def loss_function(method: Method, decoder: Decoder, remat: bool) -> Callable:
    """Return the method's loss as a function of (params, target_params, batch, key, step).

    `decoder` is the frozen target, which computes features that the batch lacks. The step may be
    omitted; it then is one late in the run. With `remat` only products of activations and weights
    are kept for the backward pass.
    """

    def loss(
        params: Any, target_params: Any, batch: Batch, key: Any, step: Any = _LATE
    ) -> tuple[Any, Measures]:
        # They are stored and transferred as float16.
        stored = {name: value.astype(jnp.float32) for name, value in batch.features.items()}
        batch = batch.replace(features=stored)
        batch = fill_features(decoder, target_params, batch, method.features)
        more = (jnp.asarray(step),) if method.takes_step else ()
        return method.loss(params, target_params, batch, key, *more)

    if not remat:
        return loss
    kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(loss, policy=kept)


Loss = Callable[..., tuple[Float[Array, ""], Any]]


def summed_gradients(loss: Loss, params: Any, batches: Any, keys: Any) -> tuple[Any, Any, Any]:
    """Return gradients, loss and measures, each summed over micro-batches.

    `batches` and `keys` have micro-batches as their leading axis. `loss(params, batch, key)` must
    return a sum over labels, and measures that are sums. Divided by the summed weight, the results
    equal those of one large batch.
    """
    gradient = jax.value_and_grad(loss, has_aux=True)

    def one(batch: Any, key: Any) -> tuple[Any, Any, Any]:
        (value, measures), grads = gradient(params, batch, key)
        return grads, value, measures

    count = jax.tree.leaves(batches)[0].shape[0]
    at = lambda index: jax.tree.map(lambda leaf: leaf[index], batches)  # noqa: E731
    if count == 1:
        return one(at(0), keys[0])

    def step(total: Any, item: tuple[Any, Any]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(*item)), None

    shapes = jax.eval_shape(one, at(0), keys[0])
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(step, zeros, (batches, keys))[0]
