"""The config sections `mesh` and `distributed`: the devices and processes of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from jax.sharding import Mesh

from specjax.distributed import processes, sharding
from specjax.fields import Number, Text, Whole, dotted, optional

DEVICES = Whole(1, 1 << 20)
"""The allowed numbers of devices along a mesh axis."""


@dataclass(frozen=True)
class MeshConfig:
    """The numbers of devices over which rows (`data`) and weights (`model`) are sharded."""

    data: Annotated[int, DEVICES] = 1
    """Devices over which rows are sharded."""
    model: Annotated[int, DEVICES] = 1
    """Devices over which weights are sharded."""


@dataclass(frozen=True)
class DistributedConfig:
    """The processes of a run: the arguments of `processes.join`."""

    cluster: bool = False
    """Whether the cluster's scheduler knows which processes there are."""
    coordinator_address: Annotated[str | None, optional(Text())] = None
    """HOST:PORT of the first process."""
    num_processes: Annotated[int | None, optional(DEVICES)] = None
    """The total number of processes."""
    process_id: Annotated[int | None, optional(Whole())] = None
    """The number of this process, from 0."""
    timeout_s: Annotated[float, Number(0.0, 1e9, above=True, remedy="use seconds above 0")] = 300.0
    """Seconds to wait for the other processes."""


ONE_DEVICE, ONE_PROCESS = MeshConfig(), DistributedConfig()


@dataclass(frozen=True, kw_only=True)
class MeshFields:
    """The section of a config with the devices of a run."""

    mesh: MeshConfig = ONE_DEVICE
    """data x model devices: rows are sharded over data, weights and heads over model."""


@dataclass(frozen=True, kw_only=True)
class DeviceFields(MeshFields):
    """The sections of a config with the devices and processes of a run."""

    distributed: DistributedConfig = ONE_PROCESS
    """Several processes: coordinator_address, num_processes, process_id; or cluster=true, which
    asks the scheduler (Slurm, Kubernetes, TPU pods).
    """


def open_mesh(
    mesh: MeshConfig, distributed: DistributedConfig, config: Mapping[str, Any]
) -> Mesh | None:
    """Join the other processes of a run, if there are any, and return its mesh.

    `config` has all values of the config by section, which must be the same in all processes.
    Returns None, so that the first device is used, for a single process without a mesh. Raises
    InputError, in all processes if their configs differ.
    """
    processes.join(**asdict(distributed))
    if processes.count() == 1 and mesh == ONE_DEVICE:
        return None
    fields = {name: repr(value) for name, value in dotted(config).items()}
    fields.pop("distributed.process_id", None)  # differs between processes
    return processes.together(lambda: sharding.make_mesh(mesh.data, mesh.model), fields)
