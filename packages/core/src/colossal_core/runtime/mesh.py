"""Process groups for the groups of a layout: made collectively, cached, and never ad hoc.

The one idea: a :class:`~colossal_core.mesh.GroupSpec` says which ranks belong together in words that are
equal on all ranks, so creation can run over all groups of the spec in one agreed order. A *channel* gives a
spec a second communicator of its own: gradients travel while the user's code runs, so they must not share a
queue with anything that the user's code may issue at another moment on another rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import frozen

from colossal_core.mesh import GroupSpec, MeshLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["CONTROL", "GRADIENTS", "PARAMETERS", "Group", "Mesh"]

CONTROL = "control"
"""Channel of everything that is issued at the same place of the program on all ranks."""

GRADIENTS = "gradients"
"""Channel of reductions that leave while backward runs."""

PARAMETERS = "parameters"
"""Channel of gathers that the modules of a model ask for: they must not be paired with anything else where a
rank runs other modules than the rest."""

_THREADS = Path("/proc/self/task")
"""Where Linux lists the threads of a process."""


@frozen(eq=False)
class Group:
    """The ranks that this rank communicates with for one purpose.

    Attributes:
        name: Readable name for the ledger, e.g. ``"data"`` or ``"data/gradients"``.
        ranks: Global ranks of the members, ascending; this rank is one of them.
        index: Position of this rank among ``ranks``.
        handle: torch's process group, or None for a group of one.
        backend: ``"gloo"``, ``"nccl"``, …, or ``"none"`` for a group of one.
        device: Where this rank's tensors are.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    backend: str
    device: torch.device

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


class Mesh:
    """The ranks of this run, and the groups among them.

    Owns the process groups that it creates for as long as the process group of the run lives.
    """

    def __init__(
        self, layout: MeshLayout, rank: int, device: torch.device, *, timeout_seconds: float = 600.0
    ) -> None:
        """Remember the layout; nothing is communicated until the first group is asked for.

        Args:
            layout: Axes and degrees; its world size is that of the default process group.
            rank: Global rank of this process.
            device: Device of this rank.
            timeout_seconds: How long a collective of a new group may wait.
        """
        self.layout = layout
        self.rank = rank
        self.device = device
        self._timeout = timedelta(seconds=timeout_seconds)
        self._groups: dict[tuple[GroupSpec, str], Group] = {}
        self._device_mesh: DeviceMesh | None = None

    def group(self, spec: GroupSpec, channel: str = CONTROL) -> Group:
        """Return the group of this rank, creating the groups of all ranks on first use.

        Collective on first use of a (spec, channel): every rank of the world calls it, in the same order.
        """
        key = (spec, channel)
        if key not in self._groups:
            normal = self.layout.normalise(spec)
            if (normal, channel) not in self._groups:
                self._groups[normal, channel] = self._create(normal, channel)
            self._groups[key] = self._groups[normal, channel]
        return self._groups[key]

    def everyone(self, channel: str = CONTROL) -> Group:
        """Return the group of all ranks."""
        return self.group(self.layout.everyone(), channel)

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's DeviceMesh over the axes of a degree above 1; built on first use (collective)."""
        if self._device_mesh is None:
            from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

            axes = [axis for axis in self.layout.axes if axis.degree > 1]
            handles = [self.group(GroupSpec((axis.name,))).handle for axis in axes]
            ranks = torch.arange(self.layout.world_size).reshape([axis.degree for axis in axes] or [1])
            names = tuple(axis.name for axis in axes) or ("data",)
            if axes:
                self._device_mesh = DeviceMesh.from_group(
                    [handle for handle in handles if handle is not None],
                    self.device.type,
                    mesh=ranks,
                    mesh_dim_names=names,
                )
            else:
                self._device_mesh = init_device_mesh(self.device.type, (1,), mesh_dim_names=names)
        return self._device_mesh

    def _create(self, spec: GroupSpec, channel: str) -> Group:
        """Create the process groups of all ranks in one agreed order and return this rank's.

        Args:
            spec: In normal form.
            channel: What the groups are for.
        """
        name = "+".join(spec.axes) or "self"
        if spec.blocks is not None:
            name += "(blocks)"
        if channel != CONTROL:
            name += f"/{channel}"
        mine: tuple[int, ...] = (self.rank,)
        handle: dist.ProcessGroup | None = None
        for ranks in self.layout.enumerate(spec):
            if len(ranks) == 1:
                continue
            if len(ranks) == self.layout.world_size and channel == CONTROL:
                created = dist.group.WORLD
            else:
                known = _list_threads()
                created = dist.new_group(list(ranks), timeout=self._timeout)
                if channel != CONTROL:
                    _let_computing_go_first(_list_threads() - known)
            if self.rank in ranks:
                mine, handle = ranks, created
        backend = "none" if handle is None else dist.get_backend(handle)
        return Group(name, mine, mine.index(self.rank), handle, backend, self.device)


def _list_threads() -> set[str]:
    """Return the numbers of this process's threads, where the system tells them."""
    return {entry.name for entry in _THREADS.iterdir()} if _THREADS.is_dir() else set()


def _let_computing_go_first(threads: Iterable[str]) -> None:
    """Let threads that move gloo's messages wait for a core, instead of taking it from who computes.

    A message wakes them. When that interrupts the very thread which is sending on the same connection, they
    ask again and again for its lock, until the system gives the core back. A step of ``zero3`` took 250 ms
    instead of 263 on two ranks of two cores, 517 instead of 558 on four (virtual machine, December 2026).
    """
    for thread in threads:
        with suppress(OSError):  # it has ended, or the system does not allow it
            if (_THREADS / thread / "comm").read_text(encoding="utf-8").startswith("gloo_tcp_loop"):
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))
