"""The cells of the matrix: a method, a topology and a rule, with the rows that its checks decode.

Rows differ in all that a program takes as an operand: prompts, temperatures, limits, ends, seeds.
So a cell is one compiled program, whatever is checked.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from conformance.methods import (
    LENGTH,
    METHODS,
    VARIANTS,
    VOCAB,
    constraint,
    drafter,
    per_target,
    takes,
    target,
)
from conftest import slow

from specjax.core.drafter import Sampling
from specjax.core.none import NoDrafter
from specjax.core.plan import LoopPlan
from specjax.core.state import RUNNING, STOPPED, RowProperties
from specjax.drafters import take_turns
from specjax.engine.programs import run, start
from specjax.engine.requests import SamplingParams
from specjax.methods.self_drafter import SelfDrafter
from specjax.sampling import RULES, WarpFlags, row_key
from specjax.testing.drafter_check import chi_square, output_distribution

ROWS, CAPACITY = 256, 24
WARPS = (
    # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (0.8, 0, 1.0, 0.0),
    (0.8, 3, 1.0, 0.0),
    (1.2, 0, 0.8, 0.0),
    (0.8, 0, 1.0, 0.1),
    (0.0, 0, 1.0, 0.0),
    (1.0, 4, 0.9, 0.0),
)
"""Greedy rows beside sampled ones."""
PROMPT = (1, 2, 0, 1, 2)
"""The prompt of all rows whose outputs are counted."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A method, a topology and a rule, on a target with some kind of layers."""

    method: str
    topology: str
    rule: str
    layers: str = "attention"

    def __str__(self):
        others = "" if self.layers == "attention" else f"-{self.layers}"
        return f"{self.method}-{self.topology}-{self.rule}{others}"

    @property
    def drafter(self):
        return drafter(self.method, self.topology)

    @property
    def program(self):
        return program(self)


USUAL = {"chain": "block", "static": "block", "dynamic": "coupled"}
"""The rule of each topology in the default suite; `--slow` has all cells."""
USUAL_TREES = {
    "static": {
        *("draft_model", "early_exit", "sparse_kv", "medusa"),
        *("eagle", "mtp", "dspark", "token_recycling"),
    },
    "dynamic": {
        *("suffix", "corpus", "draft_model", "layer_skip"),
        *("quantized", "eagle3", "peagle", "dflash"),
    },
}
"""The methods whose trees it has: each one's of at least one kind."""
OTHERS = (
    Cell("suffix", "dynamic", "block"),
    Cell("eagle3", "dynamic", "rejection"),
    Cell("draft_model", "static", "block", "delta"),
    Cell("eagle3", "dynamic", "coupled", "delta"),
    Cell("medusa", "merged", "rejection", "mamba2"),
    Cell("early_exit", "static", "coupled", "mamba2"),
    Cell("forced", "chain", "block", "grammar"),
    Cell("draft_model", "chain", "rejection", "grammar"),
    Cell("medusa", "static", "block", "grammar"),
    Cell("eagle3", "dynamic", "coupled", "grammar"),
    Cell("forced", "merged", "rejection", "grammar"),
)
"""Cells that it has, too; chains under `coupled` are in test_slots_and_pages."""
USUAL_PAIRS = {
    "merged": ("suffix", "eagle3", "lookahead"),
    "turns": ("medusa", "mtp"),
}
"""The methods that the default suite has beside a lookup, under `rejection`."""

USUAL_VARIANTS = "itself", "random", "translated", "draft_model_few_keys", "eagle3_few_keys"


def is_usual(cell):
    """Return whether the default suite has a cell."""
    if cell in OTHERS or cell.layers != "attention":
        return cell in OTHERS
    if cell.method in VARIANTS:
        return cell.method in USUAL_VARIANTS and cell.rule == "block"
    if cell.topology in USUAL_PAIRS:
        return cell.rule == "rejection" and cell.method in USUAL_PAIRS[cell.topology]
    if cell.method not in USUAL_TREES.get(cell.topology, [cell.method]):
        return False
    return cell.rule == USUAL[cell.topology]


def cells(topology, layers=("attention",)):
    """Return the cells of a topology under each rule, as parameters of tests."""
    methods = [name for name in METHODS if name != "none" and takes(name, topology)]
    methods += [*VARIANTS] * (topology == "chain")
    every = [
        Cell(name, topology, rule, kind)
        for kind in layers
        for name in methods
        # Without a grammar nothing has to follow, and recorded texts follow none.
        if name != "forced" or kind == "grammar"
        if name in VARIANTS or not METHODS[name].replays or kind != "grammar"
        for rule in RULES
    ]
    usual = [cell for cell in every if is_usual(cell)]
    return [*usual, *slow(*(cell for cell in every if cell not in usual))]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled loop, and the parameters that it takes."""

    plan: LoopPlan
    params: tuple

    @classmethod
    def of(cls, loaded, rule):
        turns, params = loaded
        turns = turns.limited(LENGTH)
        # Rounds without a draft have a width of their own if verification resumes a partial pass.
        slept = isinstance(turns.parts[0], SelfDrafter)
        plan = LoopPlan(
            target=target().architecture,
            drafter=turns,
            rule=rule,
            widths=tuple(dict.fromkeys((*[1] * slept, 1 + turns.num_nodes))),
            flags=WarpFlags(),
            capacity=CAPACITY,
            chunks=(CAPACITY,),
            rounds_per_step=CAPACITY,
            processors=tuple(processor for processor, _ in constraint()),
        )
        return cls(plan, (target().params, params))

    def start(self, rows, rounds=None):
        every = [arrays for _, arrays in constraint()]
        requested = jax.tree.map(lambda array: jnp.repeat(jnp.asarray(array), ROWS, axis=0), every)
        return start(self.plan, self.params, *rows, rounds, tuple(requested))

    def run(self, state, rounds=CAPACITY):
        """Return the state after some rounds, and the counts; `state` is not used up."""
        state, counts, _ = run(self.plan, self.params, copied(state), jnp.int32(rounds))
        return state, jax.tree.map(np.asarray, counts)


@functools.lru_cache(maxsize=4)
def program(cell):
    return Program.of(cell.drafter, RULES[cell.rule])


@jax.jit
def copied(state):
    return jax.tree.map(jnp.copy, state)


@per_target
def plain():
    """Return plain decoding."""
    return Program.of(take_turns(NoDrafter()), RULES["coupled"])


def prompts():
    """Return a prompt of each row, ragged, every other one repeating itself."""
    rng = np.random.default_rng(0)
    found = []
    for row in range(ROWS):
        ids = rng.integers(VOCAB, size=1 + row % 11).tolist()
        found.append((ids[: 1 + row % 3] * 11)[: len(ids)] if row % 2 else ids)
    return found


def arguments(prompts, warps, max_length, stops, index):
    """Return the arguments of `start` for rows with these properties."""
    tokens = np.zeros((ROWS, CAPACITY), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    length = jnp.array([len(ids) for ids in prompts], jnp.int32)
    columns = list(zip(*warps, strict=True))
    rows = RowProperties(
        index=jnp.asarray(index, jnp.int32),
        prompt_length=length,
        key=jax.vmap(lambda number: row_key(0, number))(jnp.asarray(index, jnp.int32)),
        sampling=Sampling(
            temperature=jnp.array(columns[0], jnp.float32),
            top_k=jnp.array(columns[1], jnp.int32),
            top_p=jnp.array(columns[2], jnp.float32),
            min_p=jnp.array(columns[3], jnp.float32),
        ),
        max_length=jnp.asarray(max_length, jnp.int32),
        stop_ids=jnp.asarray(stops, jnp.int32)[:, None],
    )
    return jnp.asarray(tokens), rows, length, jnp.full(ROWS, RUNNING, jnp.int32)


@per_target
def expected():
    """Return arguments of rows of all kinds, and the output of each by plain decoding.

    Some end at the last position, some after a few tokens, some at a stop token at each offset.
    """
    ids = prompts()
    lengths = np.array([len(each) for each in ids])
    number = np.arange(ROWS)
    warps = [WARPS[row % len(WARPS)] for row in range(ROWS)]
    most = np.where(number % 4 == 0, CAPACITY, np.minimum(lengths + 1 + number % 17, CAPACITY))
    never = np.full(ROWS, -1)
    state, _ = plain().run(plain().start(arguments(ids, warps, [CAPACITY] * ROWS, never, number)))
    tokens, stops, outputs = np.asarray(state.tokens), never.copy(), []
    for row, begin in enumerate(lengths):
        output = tokens[row, begin : most[row]].tolist()
        if row % 3 == 0:
            stops[row] = output[(row // 3) % len(output)]
            output = output[: 1 + output.index(stops[row])]
        outputs.append(output)
    return arguments(ids, warps, most, stops, number), outputs


def remembers_drafts(loaded):
    """Return whether what a drafter keeps depends on drafts, also on those that were refused."""
    return bool(loaded.drafter.pass_features)


def is_greedy(row):
    return WARPS[row % len(WARPS)][0] == 0


def outputs_of(state, rows=range(ROWS)):
    """Return the tokens of each row after its prompt."""
    tokens, length = np.asarray(state.tokens), np.asarray(state.length)
    begin = np.asarray(state.rows.prompt_length)
    return {row: tokens[row, begin[row] : length[row]].tolist() for row in rows}


def restarted(program, state):
    """Return the state of rows that begin with what is committed, as those that are put back."""
    rows = state.tokens, state.rows, state.length, state.status
    return program.start(rows, state.round)


def taken(arguments, order, present):
    """Return the arguments with rows in another order, of which only some are `present`."""
    tokens, rows, length, status = jax.tree.map(lambda leaf: leaf[order], arguments)
    return tokens, rows, length, jnp.where(present, status, STOPPED)


@per_target
def distribution():
    """Return the probability of each three tokens, the K-th to the (K+2)-th after the prompt."""
    model, one = target(), SamplingParams(temperature=1.0)
    call = model.architecture, model.params, PROMPT, one, LENGTH + 2
    every = output_distribution(*call, processors=constraint())
    return every.reshape(-1, VOCAB**3).sum(axis=0)


@functools.cache
def of_one_prompt(first):
    """Return arguments of rows with the same prompt, the index of the first of which is `first`."""
    number, warps = np.arange(first, first + ROWS), [(1.0, 0, 1.0, 0.0)] * ROWS
    return arguments([PROMPT] * ROWS, warps, [CAPACITY] * ROWS, [-1] * ROWS, number)


def counted(program, rows):
    """Return the counts of each three tokens in about `rows` rows, and the mean accepted length."""
    end = len(PROMPT) + LENGTH + 2
    found, accepted = np.zeros(VOCAB**3, np.int64), []
    read = program.start(of_one_prompt(0))
    for first in range(0, rows, ROWS):
        # The prompt is the same, and what is drawn depends on a row's key and index alone.
        _, own, *_ = of_one_prompt(first)
        state, counts = program.run(read.replace(rows=own), LENGTH + 2)
        outputs = np.asarray(state.tokens)[:, end - 3 : end]
        code = np.ravel_multi_index(tuple(outputs.T), (VOCAB,) * 3)
        found += np.bincount(code, minlength=VOCAB**3)
        accepted.append(counts.accepted[counts.accepted >= 0])
    return found, 1 + np.concatenate(accepted).mean()


def joint_test(program, rows):
    """Return the chi-square of about `rows` rows, and the mean tokens per round."""
    found, length = counted(program, rows)
    return chi_square(found, distribution()), length
