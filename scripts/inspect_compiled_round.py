"""Compile one round for an absent GPU or TPU, and list its copies and collectives.

    python scripts/inspect_compiled_round.py --platform=cuda --layers=4 --batch=8
    python scripts/inspect_compiled_round.py --platform=tpu --topology=v5e:2x4 --data=2 --model=4
    python scripts/inspect_compiled_round.py --drafter=early_exit --tree=dynamic --nodes=32
    python scripts/inspect_compiled_round.py --program=prefill --batch=1 --capacity=32768
    python scripts/inspect_compiled_round.py --recurrent=delta --num_speculative_tokens=4

Needs the platform's compiler (`pip install -e '.[cuda13]'` or `.[tpu]`), not the device: XLA
compiles for a description of it. The target is Llama-8B-shaped with `--layers` layers, in bfloat16,
after an n-gram drafter, an EAGLE-3 head, or its own first layer; the last two draft chains or
trees. `--program=prefill` compiles the reading of a prompt into a slot instead. Printed are the
memory that the program needs, the collectives, and every instruction outside of a matrix product
that only moves data and makes at least `--megabytes`: a copy of a weight or of the cache shows up
here. Exit code 1 if there is one in the loop, or before it, which is at every call.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from absl import app, flags

_PLATFORM = flags.DEFINE_enum("platform", "cuda", ["cuda", "tpu"], "What to compile for.")
_TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x4", "The TPU slice; a GPU is always one H100.")
_LAYERS = flags.DEFINE_integer("layers", 4, "Layers of the target.")
_PROGRAM = flags.DEFINE_enum("program", "round", ["round", "prefill"], "What to compile.")
_EXPERTS = flags.DEFINE_integer("experts", 0, "Experts of each layer, of which a token has two.")
_RECURRENT = flags.DEFINE_enum(
    "recurrent", "none", ["none", "delta", "mamba2"], "What three of four layers are instead."
)
_BATCH = flags.DEFINE_integer("batch", 8, "Rows.")
_CAPACITY = flags.DEFINE_integer("capacity", 2048, "Tokens that the cache can hold.")
_TOKENS = flags.DEFINE_integer("num_speculative_tokens", 7, "Longest draft.")
_DRAFTER = flags.DEFINE_enum("drafter", "ngram", ["ngram", "early_exit", "eagle3"], "What drafts.")
_LENGTHS = flags.DEFINE_enum("lengths", "fixed", ["fixed", "varying"], "Draft lengths.")
_TREE = flags.DEFINE_enum("tree", "chain", ["chain", "static", "dynamic"], "What it drafts.")
_NODES = flags.DEFINE_integer("nodes", 32, "Nodes of a tree.")
_DATA = flags.DEFINE_integer("data", 1, "Devices along `data`.")
_MODEL = flags.DEFINE_integer("model", 1, "Devices along `model`.")
_MEGABYTES = flags.DEFINE_float("megabytes", 4.0, "The smallest result worth listing.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Above 0, rows are sampled.")

_FILTERS = flags.DEFINE_bool("filters", False, "Sampled rows use top-k, top-p and min-p.")

# NVIDIA's data sheet of the H100 SXM, in the words of XLA's GpuTargetConfigProto.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84978434048
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_MOVES = ("copy", "transpose", "concatenate", "pad", "dynamic-slice", "slice", "bitcast")
_WRITERS = (
    *("copy", "copy-start", "transpose", "concatenate"),
    *("slice", "slice-start", "dynamic-slice", "dynamic-slice-start", "async-start"),
)
_NOT_KERNELS = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "call", "after-all"),
    *("opt-barrier", "partition-id", "replica-id", "add-dependency", "domain"),
)
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def main(argv: list[str]) -> int:
    """Compile a round and report its copies; return the exit code."""
    del argv
    program = compile_program(_describe())
    memory = program.memory_analysis()
    print(
        f"arguments {memory.argument_size_in_bytes / 1e9:.2f} GB, "
        f"updated in place {memory.alias_size_in_bytes / 1e9:.3f} GB, "
        f"temporaries {memory.temp_size_in_bytes / 1e9:.3f} GB, a device"
    )
    text = program.as_text()
    sent = collections.Counter(
        (match[2], shape)
        for match in re.finditer(rf" = (.*?) ({'|'.join(_COLLECTIVES)})(?:-start)?\(", text)
        for shape in re.findall(r"\w+\[[\d,]*\]", match[1])
    )
    for (kind, shape), count in sorted(sent.items()):
        print(f"sent:   {count} x {kind} {shape}")
    moved = collections.Counter(big_moves(text, _MEGABYTES.value * 1e6))
    for (where, kind, shape), count in sorted(moved.items()):
        print(f"copied: {count} x {kind} {shape}, {where}")
    count = launches(text)
    print(
        f"{count['kernel']} kernels in the loop, of all widths and branches; "
        f"{count['conditional']} conditionals, {count['while']} loops"
    )
    inside = sum(number for (where, _, _), number in moved.items() if where == "in the loop")
    print(f"{inside} large copies in the loop, {sum(moved.values()) - inside} before it")
    return 1 if moved else 0


def _describe() -> list[Any]:
    """Return the topology's devices, described for the compiler."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # The compiler alone is wanted: no cuDNN, no worker of a slice.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from jax.experimental import topologies

    if _PLATFORM.value == "tpu":
        return topologies.get_topology_desc(_TOPOLOGY.value, "tpu").devices
    count = _DATA.value * _MODEL.value
    return topologies.get_topology_desc(
        platform="cuda", target_config=_H100, topology=f"1x1x{count}"
    ).devices


def compile_program(devices: list[Any]) -> Any:
    """Return the compiled loop over rounds, or prefill, for arguments given as shapes only."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from accelerator.sizes import SIZES
    from specjax import sampling
    from specjax.core import loop
    from specjax.core.drafter import Sampling
    from specjax.core.plan import LoopPlan
    from specjax.core.state import RowProperties
    from specjax.distributed import sharding
    from specjax.drafters import TreeOptions, Turns
    from specjax.engine import programs
    from specjax.engine.plan import widths
    from specjax.loading.formats import build_parameters, parameter_names
    from specjax.methods.eagle.drafter import EagleDrafter
    from specjax.methods.eagle.head import Eagle
    from specjax.methods.early_exit import EarlyExit
    from specjax.methods.heads import shared_parameters
    from specjax.methods.ngram import Ngram
    from specjax.models.config import Experts, Recurrence
    from specjax.models.decoder import Decoder
    from specjax.models.form import Form

    data, model, batch = _DATA.value, _MODEL.value, _BATCH.value
    mesh = sharding.make_mesh(data, model, devices[: data * model])
    config = dataclasses.replace(SIZES["8b"].model, num_layers=_LAYERS.value)
    if _EXPERTS.value:
        experts = Experts(_EXPERTS.value, 2, config.intermediate_size // 4)
        config = dataclasses.replace(config, experts=experts, family="mixtral")
    if _RECURRENT.value != "none":
        states = Recurrence(_RECURRENT.value, 4, 16, 32, key_width=128, value_width=128)
        mixers = (*["recurrent"] * 3, "attention")
        family = "qwen3_5_text" if states.kind == "delta" else "bamba"
        config = dataclasses.replace(config, recurrence=states, mixers=mixers, family=family)
    build_parameters.check_shards(config, model)
    form = Form.of(_PLATFORM.value, config, data * model)
    params = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding),
        parameter_names.param_shapes(config, form.stacked),
        build_parameters.parameter_shardings(config, mesh, model, form.stacked),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    sampled = _TEMPERATURE.value > 0
    nodes = None if _TREE.value == "chain" else _NODES.value
    tree = TreeOptions(kind=_TREE.value, num_nodes=nodes)
    options = {"num_speculative_tokens": _TOKENS.value, "tree": tree}
    drafter, draft_params = Ngram(num_speculative_tokens=_TOKENS.value), ()
    if _DRAFTER.value == "early_exit":
        drafter = EarlyExit(config.num_layers, exit_layer=1, **options)
    elif _DRAFTER.value == "eagle3":
        head = _eagle3(config)
        drafter = EagleDrafter(Eagle(head, jnp.dtype(jnp.bfloat16), form=form), **options)
        draft_params = _replicated(head.parameter_table(), mesh) | {
            "shared": shared_parameters.share(params, None, head=False)
        }
    elif _TREE.value != "chain":
        raise app.UsageError("--tree needs --drafter=early_exit or eagle3")
    full = _LENGTHS.value == "fixed"
    loop_plan = LoopPlan(
        target=Decoder(config, jnp.dtype(jnp.bfloat16), model, form),
        drafter=Turns((drafter,)),
        rule=sampling.Rejection(),
        widths=(1 + drafter.num_nodes,) if full else widths(drafter.num_nodes, _PLATFORM.value),
        full_drafts=full,
        flags=sampling.WarpFlags(not sampled, sampled, *[_FILTERS.value] * 3),
        capacity=_CAPACITY.value,
        chunks=(1024, 256),
    )

    def array(batch: int, dtype: Any, *rest: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec("data", *[None] * len(rest)))
        return jax.ShapeDtypeStruct((batch, *rest), dtype, sharding=sharding)

    def row_arguments(batch: int) -> tuple[Any, ...]:
        real, whole = (functools.partial(array, batch, kind) for kind in (np.float32, np.int32))
        described = RowProperties(
            index=whole(),
            prompt_length=whole(),
            key=array(batch, jax.eval_shape(lambda: jax.random.key(0)).dtype),
            sampling=Sampling(real(), whole(), real(), real()),
            max_length=whole(),
            stop_ids=whole(1),
        )
        return whole(_CAPACITY.value), described, whole(), whole()

    params = params, (draft_params,)
    number = jax.ShapeDtypeStruct((), np.int32)
    with sharding.use(mesh):
        made = programs.make_empty().lower(loop_plan, params, *row_arguments(batch))
        _, state, placed = programs.compile_placed(made, mesh)
        if _PROGRAM.value == "prefill":
            slots = array(data, np.int32)
            new = jax.jit(
                programs.new_rows,
                static_argnums=(0, 1),
                donate_argnums=3,
                out_shardings=(placed, None),
            )
            made = new.lower(
                loop_plan, data == 1, params, state, slots, slots, *row_arguments(data)
            )
            _, (_, rows), placed = programs.compile_placed(made, mesh)
            program = jax.jit(
                programs.read_rows,
                static_argnums=0,
                donate_argnums=(2, 3),
                out_shardings=(*placed, None),
            )
            return program.lower(
                loop_plan, params, state, rows, slots, None, number, number
            ).compile()
        run = jax.jit(
            loop.run, static_argnums=0, donate_argnums=2, out_shardings=(placed, None, None)
        )
        return run.lower(loop_plan, params, state, number).compile()


def _eagle3(config: Any) -> Any:
    """The config of a head for a target: one of its layers, and its whole vocabulary."""
    from specjax.methods.eagle.head import EagleConfig, default_taps

    return EagleConfig(
        decoder=dataclasses.replace(config, num_layers=1),
        version=3,
        target_hidden_size=config.hidden_size,
        draft_vocab_size=config.vocab_size,
        taps=default_taps(config.num_layers),
    )


def _replicated(table: Any, mesh: Any) -> Any:
    """Shapes of a table's parameters in bfloat16, whole on each device."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from specjax.models.parameters import Parameter

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda entry: jax.ShapeDtypeStruct(entry.shape, jnp.bfloat16, sharding=whole),
        table,
        is_leaf=lambda node: isinstance(node, Parameter),
    )


def big_moves(text: str, smallest: float) -> Iterator[tuple[str, str, str]]:
    """Yield the instructions of a program that only move at least `smallest` bytes.

    Each is given as its computation, its name and its shape. A fusion counts if it only moves data;
    one that feeds a matrix product is not written to memory.
    """
    computations, entry = _computations(text)
    called = _fused(text)
    for name, lines in computations.items():
        if name in called:
            continue
        for line in lines:
            # A result may be a tuple of arrays: of several copies, or of an asynchronous one.
            match = re.search(r" = (\(.*?\)|\S+) ([\w\-]+)\(", line)
            if match is None:
                continue
            opcode = match[2]
            fused = re.search(r"calls=%?([\w.\-]+)", line)
            if opcode == "fusion" and fused and _only_moves(computations[fused[1]]):
                opcode = "moving fusion"
            elif opcode not in _WRITERS:
                continue
            where = "before the loop" if name == entry else "in the loop"
            arrays = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            # The first of an asynchronous copy is its result, the next one its source.
            for kind, shape in arrays[:1] if opcode.endswith("-start") else arrays:
                if math.prod(int(n) for n in shape.split(",") if n) * _width(kind) >= smallest:
                    yield where, opcode, f"{kind}[{shape}]"


def launches(text: str) -> collections.Counter[str]:
    """Return the number of kernels, conditionals and loops of a program outside of its entry.

    Each is counted once, however often it runs; a conditional or a loop waits for its condition.
    """
    computations, entry = _computations(text)
    inner = _fused(text) | set(re.findall(r"to_apply=%?([\w.\-]+)", text))
    found: collections.Counter[str] = collections.Counter()
    for name, lines in computations.items():
        for line in lines if name not in inner | {entry} else ():
            match = re.search(r" = (?:\(.*?\)|\S+) ([\w\-]+)\(", line)
            if match and match[1] in ("conditional", "while"):
                found[match[1]] += 1
            elif match and match[1] not in _NOT_KERNELS and not match[1].endswith("-done"):
                found["kernel"] += 1
    return found


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Return the instructions of each computation of a program, and the name of its entry."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if line and not line.startswith((" ", "}")) and line.rstrip().endswith("{"):
            name = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
            entry = name if line.startswith("ENTRY") else entry
            computations[name] = []
        elif name and " = " in line:
            computations[name].append(line)
    return computations, entry


def _fused(text: str) -> set[str]:
    """Return the names of the computations inside fusions."""
    return set(re.findall(r"kind=k\w+, calls=%?([\w.\-]+)", text))


def _only_moves(lines: list[str]) -> bool:
    opcodes = {match[1] for line in lines if (match := re.search(r" = \S+ ([\w\-]+)\(", line))}
    return bool(opcodes & set(_MOVES) - {"bitcast"}) and opcodes <= {
        *_MOVES,
        *("parameter", "constant", "compare", "select", "add", "convert", "broadcast", "clamp"),
    }


def _width(kind: str) -> int:
    bits = re.search(r"\d+", kind)
    return max(1, int(bits[0]) // 8) if bits else 1


if __name__ == "__main__":
    app.run(lambda argv: sys.exit(main(argv)))
