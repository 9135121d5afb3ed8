"""Plant faults in a copy of specjax, one at a time, and see which tests of the default suite fail.

    python scripts/plant_faults.py [--only=NAME,NAME] [--workers=1]

Each fault replaces one text of one module. The tests named beside it run first, until one fails;
only if none does, the other tests of rules, drafts and the loop run, too. A line for each fault
says which test found it; docs/proofs.md lists them. Exit codes: 0 if all were found; 1 if not; 2
for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from specjax.apps.command_line.flags import Listed, run_flags
from specjax.errors import InputError
from specjax.fields import Choice, Whole

ROOT = Path(__file__).parents[1]
OTHERS = (
    *("chain_enumeration", "tree_rules", "verify_chain", "verify_tree", "keys", "warp"),
    *("tree_merge", "loop_cache", "loop_distribution", "tree_distribution"),
    *("conformance/chains", "conformance/trees", "conformance/slots_and_pages"),
    *("conformance/pairs", "step_limits", "pages", "paged_engine", "engine"),
)
"""Tests of rules, drafts and the loop, the quicker ones first: `a/b` is tests/a/test_b.py."""


class Fault(NamedTuple):
    """A mistake: the module and the text that it replaces there, and the tests that look at it."""

    name: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]


_CHAIN, _TREE = "sampling/chain_verification.py", "sampling/tree_verification.py"
_KEYS, _ROUND, _VERIFY = "sampling/keys.py", "core/round.py", "core/verify.py"
FAULTS = (
    Fault(
        "accept_zero",
        _CHAIN,
        "        step &= jnp.isfinite(odds)\n        return slots",
        "        return slots",
        ("chain_enumeration", "verify_chain"),
    ),
    Fault(
        "residual_is_p",
        _CHAIN,
        "residual(logp, draft(accepted))",
        "logp",
        ("chain_enumeration",),
    ),
    Fault(
        "block_beyond_the_draft",
        _CHAIN,
        "        accept &= slots <= num_valid\n",
        "",
        ("chain_enumeration", "verify_chain"),
    ),
    Fault(
        "siblings_stay_in_q",
        _TREE,
        "removed_tokens = jnp.where(earlier_siblings, drafted.tokens, vocab)",
        "removed_tokens = jnp.full_like(drafted.tokens, vocab)",
        ("tree_rules",),
    ),
    Fault(
        "q_not_renormalized",
        _TREE,
        "    remaining -= jnp.where(log_mass > -jnp.inf, log_mass, 0)\n",
        "",
        ("tree_rules",),
    ),
    Fault(
        "invalid_node_accepted",
        _TREE,
        "children & (drafted.tokens == choice[:, None])",
        "(drafted.parent_slots == slots[:, None]) & (drafted.tokens == choice[:, None])",
        ("verify_tree", "tree_rules"),
    ),
    Fault(
        "siblings_share_noise",
        _KEYS,
        "derive(key, Domain.PARENT, slot)",
        "derive(key, Domain.PARENT, 0 * slot)",
        ("tree_distribution",),
    ),
    Fault(
        "accept_key_is_draft_key",
        _KEYS,
        "(Domain.DRAFT, Domain.ACCEPT, Domain.FINAL)",
        "(Domain.DRAFT, Domain.DRAFT, Domain.DRAFT)",
        ("keys", "loop_distribution"),
    ),
    Fault(
        "rounds_share_noise",
        _ROUND,
        "keys = sampling.fold_round(state.rows.key, state.round)",
        "keys = sampling.fold_round(state.rows.key, 0 * state.round)",
        ("loop_distribution",),
    ),
    Fault(
        "prompts_share_noise",
        _KEYS,
        "derive(jax.random.key(seed), domain, number)",
        "derive(jax.random.key(seed), domain, 0 * number)",
        ("keys",),
    ),
    Fault(
        "position_off_by_one",
        _VERIFY,
        "(state.length - 1)[:, None] + topology.row_depths",
        "state.length[:, None] + topology.row_depths",
        ("conformance/chains",),
    ),
    Fault(
        "siblings_see_each_other",
        _VERIFY,
        "jnp.asarray(topology.row_ancestors)",
        "jnp.ones_like(jnp.asarray(topology.row_ancestors))",
        ("tree_rounds", "tree_distribution"),
    ),
    Fault(
        "stale_cache_slot",
        _ROUND,
        "jnp.maximum(verified.verification.path_slots, 0), ((0, 0), (1, 0))",
        "jnp.maximum(verified.verification.path_slots, 0), ((0, 0), (0, 1))",
        ("conformance/chains", "loop_cache"),
    ),
    Fault(
        "q_of_another_row",
        _TREE,
        "logq = pick(drafted.logq, jnp.maximum(row, 0))",
        "logq = pick(drafted.logq, 0 * row)",
        ("tree_rules",),
    ),
    Fault(
        "continues_after_the_end",
        _ROUND,
        "    count = jnp.where(stops.any(axis=1), jnp.argmax(stops, axis=1) + 1, count)\n",
        "",
        ("conformance/chains",),
    ),
    Fault(
        "features_of_another_slot",
        _VERIFY,
        "jnp.take_along_axis(result.features[name], slots[:, :, None], axis=1)",
        "result.features[name][:, : slots.shape[1]]",
        ("own_cache", "loop_cache", "conformance/pairs"),
    ),
    Fault(
        "sampled_duplicate_dropped",
        "trees/merge.py",
        "replaceable = (depths == depth) & valid & ~drawn",
        "replaceable = (depths == depth) & valid",
        ("tree_merge",),
    ),
    Fault(
        "wrong_page",
        "core/cache.py",
        "pages = jnp.take_along_axis(pages, target // size, axis=1",
        "pages = jnp.take_along_axis(pages, (target + 1) // size, axis=1",
        ("pages", "paged_engine"),
    ),
    Fault(
        "greedy_rows_are_drawn",
        "sampling/warp.py",
        "    return jnp.where(temperature_column > 0, logp, _greedy(logits, largest))",
        "    return logp",
        ("warp",),
    ),
    Fault(
        "min_p_drops_ties",
        "sampling/warp.py",
        'kept &= weights >= column("min_p", min_p, logits.dtype)',
        'kept &= weights > column("min_p", min_p, logits.dtype)',
        ("warp",),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of this script."""

    only: Annotated[
        tuple[str, ...] | str, Listed(Choice(tuple(fault.name for fault in FAULTS)), empty=True)
    ] = ""
    """Names of faults, with commas; by default all."""
    workers: Annotated[int, Whole(1, 64)] = 1
    """The number of faults that are tried at once."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run_flags(
        run, Flags, argv, program="python scripts/plant_faults.py", documentation=__doc__
    )


def run(flags: Flags) -> int:
    """Try each fault, print which test found it, and return the exit code. Raises InputError."""
    chosen = [fault for fault in FAULTS if not flags.only or fault.name in flags.only]
    for fault in chosen:
        _planted(fault)
    missed = 0
    with ThreadPoolExecutor(flags.workers) as pool:
        for fault, (found, seconds) in zip(chosen, pool.map(_try, chosen), strict=True):
            missed += found is None
            print(f"{fault.name}: {found or 'NOT FOUND'} ({seconds:.0f} s)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults found")
    return 1 if missed else 0


def _planted(fault: Fault) -> str:
    """Return a module's source with the fault. Raises InputError if its text is not there once."""
    source = (ROOT / "specjax" / fault.module).read_text(encoding="utf-8")
    if source.count(fault.old) != 1:
        raise InputError(
            f"only={fault.name}: specjax/{fault.module} has {source.count(fault.old)} times what "
            "the fault replaces; adapt FAULTS to the code"
        )
    return source.replace(fault.old, fault.new)


def _try(fault: Fault) -> tuple[str | None, float]:
    """Return the first test that fails in a copy with the fault, or None, and the seconds."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Path(folder)
        for name in ("specjax", "train", "tests", "scripts", "configs", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / "specjax" / fault.module).write_text(_planted(fault), encoding="utf-8")
        others = [name for name in OTHERS if name not in fault.tests]
        found = next(filter(None, (_failing(copy, names) for names in (fault.tests, others))), None)
    return found, time.monotonic() - begin


def _failing(copy: Path, names: Sequence[str]) -> str | None:
    """Return the first test of some files that fails in a copy, or None."""
    files = ["tests/" + re.sub(r"(\w+)$", r"test_\1.py", name) for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *files],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"pytest ended with {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
