"""Process groups of a mesh: created collectively, once, in an order that all ranks share."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from colossal_core.mesh import Axis, GroupSpec, MeshLayout
from colossal_core.runtime.collectives import Collectives
from colossal_core.runtime.mesh import CONTROL, GRADIENTS, Group, Mesh
from colossal_testkit.ranks import run_ranks

CPU = torch.device("cpu")
WORLD = MeshLayout(
    (
        Axis(name="expert_data", degree=2, part_of="data"),
        Axis(name="expert", degree=1, part_of="data"),
        Axis(name="tensor", degree=3),
    )
)
"""Six ranks, the data axis split into one part that matters and one that does not."""

SHARED = GroupSpec(("tensor",), (((0,), (2,)),))
"""Two of three tensor ranks; the one between them is alone."""

SPECS = (
    GroupSpec(("tensor",)),
    GroupSpec(("data",)),
    GroupSpec(("tensor", "data")),
    GroupSpec(),
    GroupSpec(("expert",)),
    SHARED,
)


def make_mesh(layout: MeshLayout = WORLD) -> Mesh:
    """Return the mesh of this rank."""
    return Mesh(layout, dist.get_rank(), CPU)


def sum_of_ranks(group: Group) -> int:
    """Return the sum of the members' ranks, communicated."""
    value = torch.tensor(dist.get_rank())
    Collectives().all_reduce(value, group, phase="test").wait()
    return int(value)


def describe_groups() -> list[tuple[str, tuple[int, ...], int, str, int]]:
    """Return what this rank sees of each group, and what reaches it there."""
    mesh = make_mesh()
    groups = [mesh.group(spec) for spec in SPECS]
    return [
        (group.name, group.ranks, group.index, group.backend, sum_of_ranks(group) if group.size > 1 else -1)
        for group in groups
    ]


def test_groups_connect_their_members_and_nobody_else() -> None:
    """On each rank a group has the members that the layout says, in which a sum counts each once."""
    for rank, found in enumerate(run_ranks(describe_groups, 6)):
        for spec, (name, ranks, index, backend, total) in zip(SPECS, found, strict=True):
            assert ranks == WORLD.members(spec, rank)
            assert ranks[index] == rank
            assert backend == ("gloo" if len(ranks) > 1 else "none")
            assert total == (sum(ranks) if len(ranks) > 1 else -1)
            assert ("blocks" in name) == (spec is SHARED)


def test_names_of_groups_say_along_which_axes_they_lie() -> None:
    """The ledger and reports show the axes that matter, parts in place of the axis that they split."""
    names = [name for name, *_ in run_ranks(describe_groups, 6)[1]]

    assert names == ["tensor", "expert_data", "expert_data+tensor", "self", "self", "tensor(blocks)"]


def count_creations() -> list[int]:
    """Return how many process groups this process knows after each request."""
    mesh, counts = make_mesh(), []
    requests = [
        (GroupSpec(("tensor",)), CONTROL),
        (GroupSpec(("tensor",)), CONTROL),
        (GroupSpec(("expert", "tensor")), CONTROL),
        (GroupSpec(("tensor",), (((2,), (0,), (1,)),)), CONTROL),
        (mesh.layout.everyone(), CONTROL),
        (GroupSpec(("tensor", "data")), CONTROL),
        (GroupSpec(), GRADIENTS),
        (GroupSpec(("tensor",)), GRADIENTS),
        (mesh.layout.everyone(), GRADIENTS),
    ]
    for spec, channel in requests:
        mesh.group(spec, channel)
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_a_group_is_created_once_however_it_is_written() -> None:
    """What means the same ranks is one communicator; the world's own serves all; a rank alone needs none.

    Each rank creates those that it is in: one of two groups along ``tensor``.
    """
    for counts in run_ranks(count_creations, 6):
        assert counts == [2, 2, 2, 2, 2, 2, 2, 3, 4]


def use_channels() -> tuple[bool, bool, list[int]]:
    """Issue sums on two channels of one group in an order that differs between ranks."""
    mesh = make_mesh(MeshLayout((Axis(name="data", degree=2),)))
    control, gradients = mesh.everyone(), mesh.everyone(GRADIENTS)
    values = {control: torch.tensor(1 + mesh.rank), gradients: torch.tensor(10 + mesh.rank)}
    order = [control, gradients] if mesh.rank == 0 else [gradients, control]
    pending = [Collectives().all_reduce(values[group], group, phase="test") for group in order]
    for work in pending:
        work.wait()
    same_ranks = control.ranks == gradients.ranks
    return (
        control.handle is gradients.handle,
        same_ranks,
        [int(values[group]) for group in (control, gradients)],
    )


def test_channels_of_a_group_do_not_wait_for_each_other() -> None:
    """What leaves during backward cannot meet what user code issues at another moment on another rank."""
    assert run_ranks(use_channels, 2) == [(False, True, [3, 21])] * 2


def create_in_random_order(seed: int) -> list[tuple[int, ...]]:
    """Ask for groups in an order that all ranks share, some of which do not concern a rank."""
    mesh = make_mesh()
    order = torch.randperm(len(SPECS), generator=torch.Generator().manual_seed(seed)).tolist()
    groups = {spec: mesh.group(spec) for spec in (SPECS[index] for index in order)}
    return [groups[spec].ranks for spec in SPECS]


@pytest.mark.parametrize("seed", range(3))
def test_any_order_works_that_all_ranks_share(seed: int) -> None:
    """Ranks that are alone in a group take part in creating those of the others."""
    for rank, found in enumerate(run_ranks(create_in_random_order, 6, seed)):
        assert found == [WORLD.members(spec, rank) for spec in SPECS]


def describe_device_mesh(degrees: dict[str, int]) -> tuple[tuple[str, ...], list[int], list[int], bool]:
    """Return names, shape and members of torch's mesh, and whether it uses this mesh's communicators."""
    mesh = make_mesh(MeshLayout(tuple(Axis(name=name, degree=degree) for name, degree in degrees.items())))
    device_mesh = mesh.device_mesh
    names = device_mesh.mesh_dim_names or ()
    handles = [device_mesh.get_group(name) for name in names]
    own = [mesh.group(GroupSpec((name,))).handle for name in names if mesh.layout.world_size > 1]
    coordinate = list(device_mesh.get_coordinate() or ())
    shares = all(theirs is mine for theirs, mine in zip(handles, own, strict=False))
    return (
        tuple(names),
        list(device_mesh.mesh.shape),
        coordinate,
        shares and mesh.device_mesh is device_mesh,
    )


@pytest.mark.parametrize(
    "degrees",
    [{"pipeline": 2, "data": 1, "tensor": 3}, {"data": 4}, {"data": 1, "tensor": 2}, {"data": 1}],
    ids=lambda degrees: "x".join(map(str, degrees.values())),
)
def test_device_mesh_of_torch_has_the_same_axes_and_communicators(degrees: dict[str, int]) -> None:
    """What stands on torch's DeviceMesh sees the axes with several ranks, and no second set of groups."""
    kept = {name: degree for name, degree in degrees.items() if degree > 1} or {"data": 1}
    places = list(itertools.product(*(range(degree) for degree in kept.values())))

    found = run_ranks(describe_device_mesh, len(places), degrees)

    assert found == [(tuple(kept), list(kept.values()), list(place), True) for place in places]
