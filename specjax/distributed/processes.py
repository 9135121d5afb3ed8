"""Runs with several processes: connecting them, exchanging values, comparing their configs.

Every process runs the same command, and JAX's distributed service connects them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from specjax import signals
from specjax.errors import InputError

Result = TypeVar("Result")


def join(
    *,
    cluster: bool = False,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_s: float = 300,
) -> None:
    """Connect this process to the others of its run; call it before JAX uses a device.

    With `cluster` the address and the numbers come from the scheduler (Slurm, Kubernetes, TPU pods,
    MPI), as `jax.distributed.initialize` finds them. Without it, and without the other arguments,
    the call does nothing. If a process does not join within `timeout_s` seconds, JAX ends the
    others with its own message. Raises InputError for missing or inconsistent arguments.
    """
    arguments = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    if timeout_s <= 0:
        raise InputError(f"distributed.timeout_s={timeout_s}: use seconds above 0")
    set_names = [name for name, value in arguments.items() if value is not None]
    if cluster:
        if set_names:
            raise InputError(
                f"distributed.{set_names[0]}={arguments[set_names[0]]!r}: the cluster says this "
                "itself; leave it out, or set distributed.cluster=false"
            )
        _initialize({}, timeout_s)
        return
    if not set_names:
        return
    missing_names = [name for name, value in arguments.items() if value is None]
    if missing_names:
        raise InputError(
            f"distributed.{missing_names[0]} is missing: give coordinator_address=HOST:PORT, "
            "num_processes and process_id, or distributed.cluster=true under a scheduler"
        )
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise InputError(
            f"distributed.process_id={process_id}: must be from 0 to num_processes - 1, "
            f"with num_processes={num_processes}"
        )
    host, _, port = coordinator_address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(
            f"distributed.coordinator_address={coordinator_address!r}: use HOST:PORT, "
            "the same for every process, with a port that is free on process 0"
        )
    if process_id == 0:
        _check_port(coordinator_address, int(port))
    _initialize(arguments, timeout_s)


def _initialize(arguments: Mapping[str, Any], timeout_s: float) -> None:
    try:
        jax.distributed.initialize(**arguments, initialization_timeout=max(1, round(timeout_s)))
        # JAX installs a handler of its own for SIGTERM, as the notice of a preemption.
        signals.installed_again()
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"distributed: the processes cannot be joined ({str(error).splitlines()[0]}); check "
            "that a scheduler started this one, or give coordinator_address, num_processes and "
            "process_id"
        ) from None


def _check_port(address: str, port: int) -> None:
    """Raise InputError if process 0 cannot use the port, where JAX's service would crash."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise InputError(
            f"distributed.coordinator_address={address!r}: port {port} cannot be used on "
            f"process 0 ({error.strerror}); choose a free one"
        ) from None


def count() -> int:
    """Return the number of processes of this run."""
    return jax.process_count()


def number() -> int:
    """Return the index of this process, from 0."""
    return jax.process_index()


def is_first() -> bool:
    """Return whether this is process 0, which prints and writes reports."""
    return number() == 0


def together(work: Callable[[], Result], values: Mapping[str, Any] | None = None) -> Result:
    """Return the result of `work`, which every process calls.

    `values` must be equal on all processes. Raises InputError on all of them if `values` differ, or
    if `work` raises it on any.
    """
    result, error = None, None
    try:
        result = work()
    except _Agreed:
        raise
    except InputError as raised:
        error = str(raised)
    agree(values or {}, error)
    return result


class _Agreed(InputError):
    """An InputError that every process has raised already, which `together` does not exchange."""


def agree(values: Mapping[str, Any], error: str | None = None) -> None:
    """Raise InputError on every process if the values of two processes differ.

    `values` are JSON values by name. A process that has failed passes its `error`, which is then
    raised on all processes.
    """
    if count() == 1:
        if error is not None:
            raise InputError(error)
        return
    everyone = _exchange({"values": dict(values), "error": error})
    first_values = everyone[0]["values"]
    for process, report in enumerate(everyone):
        for name in first_values.keys() & report["values"].keys():
            value, other_value = first_values[name], report["values"][name]
            if value != other_value:
                raise _Agreed(
                    f"{name}={value!r} on process 0, {other_value!r} on process {process}: "
                    "start all processes with the same command and files"
                )
    for process, report in enumerate(everyone):
        if report["error"] is not None:
            prefix = "" if report["error"] == error else f"process {process}: "
            raise _Agreed(prefix + report["error"])


def from_first(value: Any) -> Any:
    """Return on every process the JSON value that process 0 passes, such as a measured time."""
    return value if count() == 1 else _exchange(value)[0]


def _exchange(value: Any) -> list[Any]:
    """Return the JSON values of all processes, ordered by process, on every process."""
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([text.size], np.int32), tiled=False)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded, tiled=False)
    return [
        json.loads(bytes(row[: int(size)])) for row, size in zip(rows, np.ravel(sizes), strict=True)
    ]
