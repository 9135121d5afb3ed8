"""The rows of an engine on the devices: those that decode, and new ones to be admitted."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from specjax import controllers
from specjax.controllers import StepRecord
from specjax.core.cache import KVCache
from specjax.core.drafter import StepLimits
from specjax.core.plan import Recording
from specjax.core.state import (
    Packed,
    State,
    with_cached_states,
    with_entries,
    without_entries,
)
from specjax.distributed import device_memory
from specjax.distributed.sharding import first_device, use
from specjax.engine.grammars import table_of
from specjax.engine.length_control import time_steps
from specjax.engine.plan import DecodePlan, flags_of
from specjax.engine.processing import processors_of, union
from specjax.engine.programs import (
    Programs,
    carried_states,
    compile_plan,
    copied_states,
    is_compiled,
    processor_states,
    put_rows,
    row_arguments,
    take_rows,
)
from specjax.engine.recording import RecordedRows, with_row
from specjax.engine.requests import Request, SamplingParams
from specjax.errors import InputError
from specjax.files.log import LOGGER, duration

T = TypeVar("T")
_SAVED = 0.25
"""The share of the decoding time that halving the rows is assumed to save."""


class DeviceRows:
    """A plan, its compiled programs, and the arrays that they work on.

    The engine decides what runs; this class only runs it. The rows of all slots are in one state,
    or the rows of a few slots in a smaller one (`narrow`).
    """

    def __init__(self, plan: DecodePlan) -> None:
        self.plan = plan
        self._few: DecodePlan | None = None
        """The plan of fewer rows, while only some slots decode (`narrow`)."""
        self._few_programs: Programs | None = None
        self._slots: tuple[int, ...] = ()
        """The slots of the fewer rows, in their order."""
        self._programs: Programs | None = None
        self._state: State | None = None
        self._new: State | None = None
        self._prompts: list[tuple[int, ...]] = []
        """The prompts of the new rows."""
        self._read_slots = np.zeros(0, np.int32)
        """The slots into whose caches they were read."""
        self._all_read = False
        self.recorded: RecordedRows | None = None
        """The rows recorded since `record`, if it was called."""
        self.num_recorded = 0
        """The number of rows recorded so far, of which `recorded` has the latest."""
        self.compile_s = 0.0
        """Seconds spent making programs; near zero if they had been compiled before."""
        on_cpu = first_device(plan.placement).platform == "cpu"
        self._narrows = plan.mesh is None and on_cpu
        """Whether a smaller program may decode fewer rows, which is so on a single CPU device."""

    def compile(self) -> Programs:
        """Return the programs for all rows, which are compiled if necessary. Raises InputError."""
        if self._programs is None:
            self._programs = self._compiled(self.plan)
        return self._programs

    def timed_steps(self) -> Sequence[StepRecord]:
        """Return records of steps that were timed once when the programs had been compiled.

        There are none if the programs were replaced while rows decode, whose caches fill the
        memory.
        """
        programs = self.compile()
        if not programs.timed and self._state is None:
            begin = time.perf_counter()
            programs.timed.extend(time_steps(self.plan, programs))
            self.compile_s += time.perf_counter() - begin
        return programs.timed

    def compile_fewer(self) -> None:
        """Compile the programs for all rows, and for fewer ones that `narrow` may choose.

        Logs how many are compiled. Raises InputError.
        """
        plans = [self.plan]
        rows = self.plan.num_rows // 2 if self._narrows else 0
        while rows:
            plans.append(self.plan.with_options(batch_size=rows))
            rows //= 2
        begin = time.perf_counter()
        for number, plan in enumerate(plans):
            if number:
                self._compiled(plan)
            else:
                self.compile()
            spent, count = time.perf_counter() - begin, number + 1
            if spent > 1 and count < len(plans):
                left = duration(spent * (len(plans) - count) / count)
                LOGGER.info(
                    "compiled for %d of %d numbers of rows, about %s left",
                    *(count, len(plans), left),
                )

    def serve(self, sampling: SamplingParams) -> None:
        """Ensure that the programs support the sampling parameters of a request.

        Recompiles them if necessary. Raises InputError without changing anything.
        """
        loop = self.plan.loop
        flags = loop.flags.union(flags_of([sampling]))
        able = replace(
            loop,
            flags=flags,
            processors=union(
                loop.processors, processors_of([sampling], [table_of(self.plan.model, sampling)])
            ),
            logprobs=loop.logprobs or sampling.logprobs,
        )
        if able != loop:
            self.replace_plan(replace(self.plan, loop=able))

    def replace_plan(self, plan: DecodePlan) -> None:
        """Continue with another plan of the same rows; compile if it has another loop.

        Raises InputError without changing anything.
        """
        if plan.loop != self.plan.loop:
            programs = None if self._programs is None else self._compiled(plan)
            # By the present programs, which the state of all rows is for.
            self._widen()
            self._programs = programs
            self._process(plan)
        self.plan = plan

    def _process(self, plan: DecodePlan) -> None:
        """Let the rows have states of the processors of another plan, which change none of them."""
        if plan.loop.processors == self.plan.loop.processors:
            return

        def with_states(state: State | None) -> State | None:
            if state is None:
                return None
            *_, requested = row_arguments(plan, [], len(state.length))
            states = processor_states(plan, state, requested)
            before = self.plan.loop.processors
            return state.replace(processors=carried_states(plan, before, state.processors, states))

        self._state, self._new = with_states(self._state), with_states(self._new)

    def begin(self) -> None:
        """Allocate the state of all rows, unless it exists already."""
        if self._state is None:
            self._state = self._empty()

    def _empty(self) -> State:
        return self.compile().empty(self.plan.params, *row_arguments(self.plan, []))

    def reuse_rows(self, requests: Sequence[Request]) -> bool:
        """Start new rows with what was read for the previous ones; return False if that cannot be.

        It can if the previous new rows had the same prompts, and caches have no pages.
        """
        prompts = [request.prompt for request in requests]
        pooled = self.plan.loop.page_size is not None
        if pooled or not self._all_read or prompts != self._prompts[: len(prompts)]:
            return False
        # What was read depends on the prompt alone, not on a request's key, limits or sampling.
        _, fixed, *_, requested = row_arguments(self.plan, requests, self.plan.prefill_rows)
        states = processor_states(self.plan, self._new, requested)
        self._new = self._new.replace(rows=fixed, processors=states)
        return True

    def new_rows(
        self,
        requests: Sequence[Request],
        slots: Sequence[int],
        cached: int = 0,
        states: Sequence[KVCache] = (),
    ) -> None:
        """Start new rows, whose prompts will be read, for free `slots`.

        In a pool, the rows' pages hold their first `cached` tokens; `states` are the
        `cached_states` after them if there are recurrent layers.
        """
        self._widen()
        plan, programs = self.plan, self.compile()
        placed: list[Request | None] = [None] * plan.prefill_rows
        for index, request in zip(self._new_places(slots), requests, strict=True):
            placed[index] = request
        arguments = row_arguments(plan, placed, plan.prefill_rows)
        self._prompts, self._all_read = [request.prompt for request in requests], False
        self._new, self._read_slots = None, self._padded(slots, slots[0])
        self._state, self._new = programs.new(
            plan.params,
            self._state,
            self._read_slots,
            np.array([0 if request is None else cached for request in placed], np.int32),
            *arguments,
        )
        if states:
            # Later rows use them again, and these are donated.
            self._new = with_cached_states(self._new, jax.tree.map(jnp.copy, states))

    def cached_states(self) -> Sequence[KVCache]:
        """Return copies of lengths and recurrent states after what the new rows have read."""
        return copied_states(self._new)

    def _new_places(self, slots: Sequence[int]) -> Sequence[int]:
        """Return which of the new rows are those for `slots`.

        In a pool each is on the device of its slot, which has its pages; else they are the first.
        """
        if self.plan.loop.page_size is None:
            return range(len(slots))
        return [slot * self.plan.prefill_rows // self.plan.num_rows for slot in slots]

    def _padded(self, slots: Sequence[int], spare: int) -> Int[np.ndarray, "A"]:
        """Return the slots of all new rows; those that are not used have the slot `spare`."""
        where = np.full(self.plan.prefill_rows, spare, np.int32)
        where[[*self._new_places(slots)]] = slots
        return where

    def read(self, begin: int, end: int, pages: Int[np.ndarray, "B N"] | None = None) -> jax.Array:
        """Read the new rows' prompts from position `begin` to `end`, exclusive.

        In a pool, `pages` are those of all slots. Returns an array that becomes ready when they
        have been read.
        """
        self._state, self._new, ready = self.compile().read(
            self.plan.params,
            self._state,
            self._new,
            self._read_slots,
            pages,
            np.int32(begin),
            np.int32(end),
        )
        return ready

    def admit(self, slots: Sequence[int], *, all_read: bool) -> jax.Array:
        """Move the new rows into `slots`.

        Returns an array that becomes ready when they have been moved. With `all_read`, which says
        that all prompts were read, including those of aborted requests, later rows with the same
        prompts need not read them.
        """
        self._all_read = all_read
        where = self._padded(slots, self.plan.num_rows)
        sources = np.where(where < self.plan.num_rows, self._read_slots, where)
        self._state, ready = self.compile().admit(self._state, where, sources, self._new)
        return ready

    def step(
        self,
        limits: controllers.Limits,
        ended_slots: Collection[int],
        max_rounds: int,
        stop_after_finished: int,
        pages: Int[np.ndarray, "B N"] | None = None,
    ) -> Packed:
        """Run a few rounds, as `loop.step` does, and start copying the results to the host.

        Rows in `ended_slots` are released first. In a pool, `pages` are those of all slots. The
        results are in the order of `by_row`.
        """
        plan = self._few or self.plan
        programs = self.compile() if self._few is None else self._few_programs
        ended = np.zeros(plan.num_rows, bool)
        if pages is not None:
            order = [*self._row_slots]
            of_slots, pages = pages, np.full_like(pages[: plan.num_rows], plan.loop.num_pages)
            pages[: len(order)] = of_slots[order]
        ended[[row for row, slot in enumerate(self._row_slots) if slot in ended_slots]] = True
        device_limits = StepLimits(
            np.array(limits.longest, np.int32), np.array(limits.confidence, np.float32)
        )
        self._state, seen = programs.step(
            plan.params,
            self._state,
            device_limits,
            ended,
            np.int32(max_rounds),
            np.int32(stop_after_finished),
            pages,
        )
        seen.numbers.copy_to_host_async()
        return seen

    @property
    def _row_slots(self) -> Sequence[int]:
        """The slot of each row on the devices."""
        return range(self.plan.num_rows) if self._few is None else self._slots

    def by_row(self, slots: Mapping[int, T]) -> tuple[T | None, ...]:
        """Return what some slots have in the order of rows; None for all others."""
        return tuple(slots.get(slot) for slot in self._row_slots)

    def narrow(self, slots: Sequence[int], seconds_left: float) -> None:
        """Decode only the rows in `slots`, in programs for at most half the rows, if that pays off.

        The rows of all other slots must have ended. On a CPU, where fewer rows make a pass faster,
        it pays off if the time saved out of `seconds_left` exceeds the time to compile. Elsewhere
        nothing is done: on accelerators a pass takes as long as reading the weights, and on a mesh
        rows belong to devices.
        """
        now = self._few or self.plan
        # This is asked before every step, so a plan is made only for fewer rows.
        if not self._narrows or 2 * now.rows_for(len(slots)) > now.num_rows:
            return
        few = self.plan.with_options(batch_size=len(slots))
        compile_s = 0.0 if is_compiled(few) else self.compile().seconds
        if not _SAVED * seconds_left > compile_s:  # also if `seconds_left` is NaN
            return
        self._few_programs = self._compiled(few)
        rows = [self._row_slots.index(slot) for slot in slots]
        # The rows that pad to a compiled size are copies of the first, and are released at once.
        rows += [rows[0]] * (few.num_rows - len(rows))
        self._take_rows(rows, range(len(slots)))
        self._few, self._slots = few, tuple(slots)
        # The caches into which prompts were read are gone with the other rows.
        self._prompts = []

    def _widen(self) -> None:
        """Return to a single state with the rows of all slots."""
        if self._few is None:
            return
        plan, few = self.plan, self._state
        if plan.loop.page_size is not None:
            of_slot = {slot: row for row, slot in enumerate(self._slots)}
            rows = [of_slot.get(slot, 0) for slot in range(plan.num_rows)]
            self._take_rows(rows, self._slots)
            self._few, self._slots = None, ()
            return
        where = np.full(len(few.length), plan.num_rows, np.int32)
        where[: len(self._slots)] = self._slots
        self._state = put_rows(self._empty(), where, few)
        self._few, self._slots = None, ()

    def _take_rows(self, rows: Sequence[int], kept: Collection[int]) -> None:
        """Let the state have copies of `rows`, of which those at the indices `kept` decode.

        A pool stays as it is.
        """
        state = self._state
        pooled = self.plan.loop.page_size is not None
        spare = np.array([index not in kept for index in range(len(rows))])
        whole = without_entries(state) if pooled else state
        taken = take_rows(whole, np.array(rows, np.int32), spare)
        self._state = with_entries(taken, state) if pooled else taken

    def update_params(self, params: Any = None, drafter_params: Any = None) -> None:
        """Decode with new parameters; prompts read with the old ones are not reused for later rows.

        The arrays are placed like the old ones. Without `params` the target keeps its own, and
        without `drafter_params` the drafter, but a trained head takes the parameters that it shares
        with the target from the new target. Raises InputError unless trees, shapes and dtypes are
        unchanged.
        """
        plan, drafter = self.plan, self.plan.drafter
        old = plan.model.params
        params = old if params is None else _in_place_of("params", old, params)
        parts = list(zip(drafter.drafter.parts, drafter.params, strict=True))
        if drafter_params is None:
            new = tuple(part.for_target(each, params) for part, each in parts)
        elif len(drafter.params) == 1 and _form((drafter_params,)) == _form(drafter.params):
            new = (drafter_params,)
        else:
            new = drafter_params
        new = _in_place_of("drafter_params", drafter.params, new)
        if drafter_params is not None:
            pairs = zip(parts, new, strict=True)
            new = tuple(part.with_new_digests(each, before) for (part, before), each in pairs)
            new = _in_place_of("drafter_params", drafter.params, new)
        drafter = drafter._replace(params=new)
        self._widen()
        # Later rows with a prompt read by the old parameters must read it again.
        self._prompts = []
        self.plan = replace(plan, model=replace(plan.model, params=params), drafter=drafter)

    def record(self, recording: Recording, rows: int) -> None:
        """Keep the features of `recording` from now on, and `record_row` up to `rows` rows.

        Nothing may decode. What was recorded before is discarded. Raises InputError if the programs
        that were compiled already, compiled anew, do not fit into memory.
        """
        self.free()
        self.replace_plan(replace(self.plan, loop=replace(self.plan.loop, recording=recording)))
        self.recorded, self.num_recorded = None, 0
        if recording.features:
            # All of these features have the width of hidden states.
            model, names = self.plan.model, recording.features
            width = model.config.hidden_size, model.activation_dtype
            size = rows, recording.tokens, self.plan.placement
            needed = rows * recording.tokens * width[0] * width[1].itemsize * len(names)
            if (free := device_memory.free_bytes()) is not None and needed > free:
                raise InputError(
                    f"rows={rows}, tokens={recording.tokens}: {needed / 2**30:.1f} GiB are needed "
                    f"to record {len(names)} features, and {free / 2**30:.1f} GiB are free; lower "
                    "rows or tokens"
                )
            self.recorded = RecordedRows.empty(names, *width, *size)

    def record_row(self, slot: int, begin: int, output: int, end: int) -> None:
        """Record the row of a slot, which has finished, in place of the oldest recorded one.

        Its text has `end` tokens, of which those from `output` on are output. The features at those
        before `begin` are unknown.
        """
        kept = {name: self._state.features[name] for name in self.recorded.features}
        row = self._row_slots.index(slot)
        numbers = self.num_recorded % len(self.recorded.length), row, begin, output, end
        at, *numbers = map(np.int32, numbers)
        with use(self.plan.mesh):
            self.recorded = with_row(self.recorded, at, self._state.tokens, kept, *numbers)
        self.num_recorded += 1

    def cache_outputs(self, outputs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Let drafters copy from the prompts and outputs of finished requests, the latest one last.

        `outputs` are pairs of token lists, which replace earlier ones in the drafters' parameters.
        The state of the rows is unchanged.
        """
        drafter, texts = self.plan.drafter, list(outputs)
        pairs = zip(drafter.drafter.parts, drafter.params, strict=True)
        params = tuple(part.with_outputs(part_params, texts) for part, part_params in pairs)
        params = _in_place_of("drafter_params", drafter.params, params)
        drafter = drafter._replace(params=params)
        self.plan = replace(self.plan, drafter=drafter)
        if self._few is not None:
            self._few = replace(self._few, drafter=drafter)

    def free(self) -> None:
        """Free the memory on the devices of rows that decode."""
        self._state = self._new = self._few = None
        self._prompts = []

    def _compiled(self, plan: DecodePlan) -> Programs:
        begin = time.perf_counter()
        programs = compile_plan(plan, begun=self._state is not None)
        self.compile_s += time.perf_counter() - begin
        return programs


def _in_place_of(name: str, old: Any, new: Any) -> Any:
    """Return the arrays of `new`, placed on devices like those of `old`.

    Raises InputError, which calls the tree `name`, unless their trees, shapes and dtypes are equal.
    """
    if _form(old) != _form(new):
        raise InputError(
            f"{name}: its tree, shapes or dtypes are not those of the parameters it replaces; give "
            "the same model's, loaded with the same form and weights"
        )
    return jax.tree.map(lambda array, replaced: jax.device_put(array, replaced.sharding), new, old)


def _form(tree: Any) -> Any:
    """Return a tree with the shape and dtype in place of each array; other leaves are unchanged."""

    def of(leaf: Any) -> Any:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        return leaf.shape, np.dtype(leaf.dtype).name

    return jax.tree.map(of, tree)
