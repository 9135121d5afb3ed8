"""Fixtures of a strict session: warnings are errors, ranks never broadcast, shapes are checked."""

import contextlib
import dataclasses
import gc
import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import jaxlib.version

# Imports and collecting leave nothing to collect.
gc.disable()

# A suite that a script runs in the background, or under nohup, ignores signals, and so would the
# processes that it starts.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

# Before JAX is imported: a few devices, so that nothing relies on there being one. Programs compile
# in a third of the time; those of large models would run slowly.
XLA = {
    "xla_force_host_platform_device_count": 8,
    "xla_backend_optimization_level": 0,
    "xla_disable_hlo_passes": ",".join(
        # Constants of many rows are folded one number at a time.
        ["while-loop-invariant-code-motion", "simplify-while-loops", "constant_folding"]
    ),
}
SHIPPED = {"xla_disable_hlo_passes": ""}
FAST = {"xla_backend_optimization_level": 1}
if jaxlib.version.__version_info__ < (0, 11):
    # Later ones have no other emitters, and an unknown flag ends the process.
    XLA["xla_cpu_use_fusion_emitters"] = "false"
    SHIPPED["xla_cpu_use_fusion_emitters"] = True
    # A worker has one core, and no use for code in many parts.
    XLA["xla_cpu_parallel_codegen_split_count"] = 1
    XLA["xla_llvm_disable_expensive_passes"] = "true"
    FAST["xla_llvm_disable_expensive_passes"] = False


def xla_flags(devices=8):
    """Return `XLA_FLAGS` for a process with the given number of fake devices."""
    options = {**XLA, "xla_force_host_platform_device_count": devices}
    return " ".join(f"--{name}={value}" for name, value in options.items())


if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags()}"
    # What a process that a test starts has compiled is there for the next one.
    PROGRAMS = tempfile.TemporaryDirectory(prefix="programs-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = PROGRAMS.name
    # Kernels in C++ that an earlier run has built, for the sources as they are, need no compiler.
    BUILT = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "specjax/kernels").expanduser()
    KERNELS = Path(PROGRAMS.name, "specjax/kernels")
    if BUILT.is_dir():
        shutil.copytree(BUILT, KERNELS)
    os.environ["XDG_CACHE_HOME"] = PROGRAMS.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import program_counts
import shape_checks

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
# Tests seldom compile what another one has: to write all of it took more time. Processes that they
# start find each other's programs.
jax.config.update("jax_enable_compilation_cache", False)
# Where in the source an instruction came from is looked up for each, and read by no test.
jax.config.update("jax_traceback_in_locations_limit", 0)

jaxtyping.jaxtyped = shape_checks.jaxtyped
# As everywhere in Python, an int will do where a float is declared.
jaxtyping.install_import_hook(
    ["specjax", "train"], "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)

_OURS = ("specjax", "train")
full = False
"""Whether the whole suite runs, `--slow`."""

register_dataclass = jax.tree_util.register_dataclass


def register_unchecked(nodetype, data_fields=None, meta_fields=None, **rest):
    """Register a dataclass so that JAX rebuilds it without __init__ and its checks.

    JAX puts shapes, booleans and placeholders where arrays are declared; only values that specjax
    itself builds are to be checked.
    """
    if data_fields is None or nodetype.__module__.split(".")[0] not in _OURS:
        return register_dataclass(nodetype, data_fields, meta_fields, **rest)

    def unflatten(meta, data):
        node = object.__new__(nodetype)
        for name, value in zip((*data_fields, *meta_fields), (*data, *meta), strict=True):
            object.__setattr__(node, name, value)
        return node

    def flatten(node):
        data = tuple((jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in data_fields)
        return data, tuple(getattr(node, name) for name in meta_fields)

    jax.tree_util.register_pytree_with_keys(nodetype, flatten, unflatten)
    return nodetype


jax.tree_util.register_dataclass = register_unchecked

import bad_input
import pytest
from bad_input import pytest_pyfunc_call, pytest_terminal_summary  # noqa: F401 - pytest's hooks

from specjax.engine import plan, programs
from specjax.loading.load import load_model, random_model
from specjax.loading.tokenizers.huggingface_tokenizer import read_tokenizer
from specjax.models.config import DecoderConfig
from specjax.models.cpu import library
from specjax.testing import drafter_check


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption(
        "--fuzz", type=float, metavar="MINUTES", help="run properties of untrusted input that long"
    )


def pytest_collection_finish(session):
    """Tracing makes many small objects, and few of them in cycles: a tenth of the time was spent
    on looking for these. What there is by now stays.
    """
    gc.set_threshold(50_000, 10, 10)
    gc.freeze()
    gc.enable()


def row_count(few):
    """Return the number of rows to sample: `few`, or 200,000 if the whole suite runs."""
    return 200_000 if full else few


def pytest_configure(config):
    global full
    full = config.getoption("--slow")
    config.addinivalue_line("markers", "slow: takes more than about 40 seconds; run with --slow")
    config.addinivalue_line("filterwarnings", "error")
    # A program that another worker is just writing is compiled once more.
    config.addinivalue_line(
        "filterwarnings", "ignore:Error reading persistent compilation cache entry:UserWarning"
    )
    bad_input.begin(config)
    config.pluginmanager.register(program_counts)
    if config.getoption("numprocesses", None):
        # While the workers collect tests: it takes ten seconds, and each would begin with it.
        threading.Thread(target=library.available).start()


def pytest_unconfigure(config):
    """Keep the kernels that were built for the next run."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        BUILT.mkdir(mode=0o700, parents=True, exist_ok=True)
        for library in KERNELS.glob("*.so"):
            if not (BUILT / library.name).exists():
                shutil.copy(library, BUILT)


def pytest_collection_modifyitems(config, items):
    bad_input.choose(config, items)
    if not config.getoption("--slow"):
        skip = pytest.mark.skip(reason="slow: run with --slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def few_programs():
    """Forget compiled programs before their memory maps reach the kernel's limit for a process.

    The limit is 65,530, at which XLA crashes; a large program has a few hundred. Since counting the
    maps takes time, it is done for every 50 programs.
    """
    yield
    if not program_counts.recently_compiled(50):
        return
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 50_000:
        jax.clear_caches()
        programs._compile.cache_clear()


@contextlib.contextmanager
def compiled_with(**options):
    """Compile with other options of XLA than the suite's inside this context."""
    programs._compile.cache_clear()
    plain = jax.jit

    def jit(*args, inline=False, **others):
        # A part of a program has no options of its own.
        part = inline or isinstance(jax.numpy.zeros(()), jax.core.Tracer)
        own = {} if part else {"compiler_options": options}
        return plain(*args, inline=inline, **own, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", jit)
        # These were made when their module was imported.
        for name in ("start", "run"):
            made = getattr(drafter_check, name)
            again = plain(made.__wrapped__, static_argnums=0, compiler_options=options)
            patch.setattr(drafter_check, name, again)
        yield
    programs._compile.cache_clear()


@pytest.fixture
def fast_programs():
    """Compile programs with optimizations, for tests of many rows.

    They take thrice as long to compile and a third of the time to run.
    """
    with compiled_with(**FAST):
        yield


@pytest.fixture
def one_width(monkeypatch):
    """Compile rounds of the largest width alone, unless the whole suite runs.

    Each other width is another copy of the target's pass and of the rule. For tests of what is
    around the loop; rounds of several widths are in those of the loop and of the engine.
    """
    if not full:
        for module in (plan, drafter_check):
            monkeypatch.setattr(module, "widths", lambda most, platform: (1 + most,))


@pytest.fixture
def every_pass():
    """Apply all of XLA's passes, as for users: for tests of what devices exchange."""
    with compiled_with(xla_disable_hlo_passes=""):
        yield


@pytest.fixture
def as_shipped():
    """Compile programs exactly as for users: for tests that read their instructions."""
    with compiled_with(**SHIPPED):
        yield


def pytest_generate_tests(metafunc):
    """Run the tests of a class with `cells` once for each, one cell after the other."""
    if "cell" in metafunc.fixturenames:
        rules = metafunc.cls.only.get(metafunc.function.__name__)
        cells = [one for one in metafunc.cls.cells if rules is None or rule_of(one) in rules]
        metafunc.parametrize("cell", cells, ids=str, scope="class")


def rule_of(cell):
    """Return the rule of a cell, which may be marked as slow."""
    return getattr(cell, "values", [cell])[0].rule


def slow(*cases):
    """Return cases of `parametrize` that repeat what others show; they run with --slow only."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def tiny_config(**changes):
    shape = dict(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        max_positions=600,
    )
    return DecoderConfig(**{**shape, **changes})


@pytest.fixture(scope="session")
def tiny():
    """Return a random target without a tokenizer, with 61 tokens and three layers."""
    return random_model(tiny_config(), 0, dtype="float32")


@pytest.fixture(scope="session")
def chatty():
    """Return a random target with a small tokenizer and a chat template."""
    tokenizer = read_tokenizer(Path(__file__).parent / "goldens" / "grouped_tied")
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    return random_model(config, 2, tokenizer, dtype="float32")


@pytest.fixture(scope="session")
def unrelated():
    """Return a random draft model of another shape, which seldom agrees with the target."""
    shape = tiny_config(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
    return random_model(shape, 1, dtype="float32")


@pytest.fixture(scope="session")
def similar(tiny):
    """Return the target with noise on its weights, as a draft model.

    It is right about half of the time.
    """
    leaves, tree = jax.tree.flatten(tiny.params)
    rng = np.random.default_rng(0)
    noisy = [
        jnp.asarray(leaf * (1 + 0.3 * rng.standard_normal(leaf.shape, np.float32)))
        for leaf in map(np.asarray, leaves)
    ]
    return dataclasses.replace(tiny, params=jax.tree.unflatten(tree, noisy))


@pytest.fixture(scope="session")
def smollm2():
    """Return the default model in float32."""
    return load_model("smollm2-135m-instruct", dtype="float32")
