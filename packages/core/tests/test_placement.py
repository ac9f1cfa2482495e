"""Reading the place of a process from the variables of every launcher, and naming what is wrong with them."""

from __future__ import annotations

import pytest

from colossal_core.errors import UsageError
from colossal_core.placement import LOOPBACK, expand_host_list, read_placement

_TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "some-host",
    "MASTER_PORT": "29500",
}
_OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}
_SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


def test_without_variables_a_process_is_alone() -> None:
    """A plain ``python train.py`` is rank 0 of 1."""
    place = read_placement({"PATH": "/bin", "RANK": "", "MASTER_PORT": "29500"})

    assert (place.rank, place.world_size, place.local_rank, place.starter) == (0, 1, 0, "lone")


def test_the_convention_of_torchrun_is_read() -> None:
    """All ranks on one machine are reached over loopback, whatever the machine is called."""
    place = read_placement(_TORCHRUN)

    assert (place.rank, place.world_size, place.local_rank) == (1, 2, 1)
    assert (place.one_host, place.address, place.port) == (True, LOOPBACK, 29500)


def test_ranks_on_several_machines_keep_the_address() -> None:
    """Fewer local ranks than ranks means that loopback cannot do."""
    place = read_placement({**_TORCHRUN, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"})

    assert (place.one_host, place.address) == (False, "some-host")


def test_one_machine_may_play_many() -> None:
    """Two launchers with a loopback address are one machine, although each has one rank."""
    place = read_placement(
        {**_TORCHRUN, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    )

    assert (place.one_host, place.address) == (True, LOOPBACK)


def test_openmpi_is_read() -> None:
    """Across machines, MASTER_ADDR says where rank 0 is, since OpenMPI does not."""
    place = read_placement(_OPENMPI)

    assert (place.rank, place.world_size, place.local_rank, place.starter) == (3, 4, 1, "openmpi")
    assert (place.one_host, place.address, place.port) == (False, "node-a", 29500)


def test_openmpi_on_one_machine_needs_nothing_else() -> None:
    """All ranks derive one port from the name of the job."""
    job = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-host-1@1",
    }
    places = [
        read_placement({**job, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]

    assert places[0].address == LOOPBACK
    assert places[0].port == places[1].port
    assert 10_000 <= places[0].port < 30_000


def test_slurm_is_read() -> None:
    """Rank 0 is on the first host of the list, at a port that follows from the job."""
    place = read_placement(_SLURM)

    assert (place.rank, place.world_size, place.local_rank, place.starter) == (5, 8, 1, "slurm")
    assert (place.one_host, place.address, place.is_step) == (False, "gpu07", True)
    assert place.port == read_placement({**_SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).port


def test_slurm_on_one_machine_stays_on_loopback() -> None:
    """One node, whatever its name."""
    place = read_placement({**_SLURM, "SLURM_NNODES": "1", "SLURM_NODELIST": "gpu07"})

    assert (place.one_host, place.address) == (True, LOOPBACK)


def test_torchrun_inside_slurm_counts() -> None:
    """``srun torchrun`` sets both families, and the inner one is right."""
    place = read_placement({**_SLURM, **_TORCHRUN})

    assert (place.starter, place.world_size) == ("variables", 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": ""}, ["RANK is not set", "WORLD_SIZE='2'"]),
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE is not set", "RANK='1'"]),
        ({"LOCAL_RANK": ""}, ["LOCAL_RANK is not set"]),
        ({"MASTER_ADDR": ""}, ["MASTER_ADDR is not set", "WORLD_SIZE"]),
        ({"MASTER_PORT": ""}, ["MASTER_PORT is not set"]),
        ({"RANK": "2"}, ["RANK is '2'", "WORLD_SIZE is '2'"]),
        ({"RANK": "-1"}, ["RANK is '-1'"]),
        ({"RANK": "one"}, ["RANK is 'one'", "integer"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE is '0'"]),
        ({"LOCAL_RANK": "2"}, ["LOCAL_RANK is '2'", "LOCAL_WORLD_SIZE is '2'"]),
        ({"LOCAL_RANK": "0"}, ["RANK is '1'", "LOCAL_RANK is '0'"]),
        ({"LOCAL_WORLD_SIZE": "4"}, ["LOCAL_WORLD_SIZE is '4'", "WORLD_SIZE is '2'"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT is '70000'", "65535"]),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(changes: dict[str, str], words: list[str]) -> None:
    """Missing, unreadable, out of range, or against another one."""
    with pytest.raises(UsageError) as caught:
        read_placement({**_TORCHRUN, **changes})

    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**_OPENMPI, "WORLD_SIZE": "3"}, ["WORLD_SIZE is '3'", "OMPI_COMM_WORLD_SIZE is '4'"]),
        ({**_OPENMPI, "MASTER_ADDR": ""}, ["MASTER_ADDR is not set", "2 of 4 ranks"]),
        ({**_OPENMPI, "OMPI_COMM_WORLD_RANK": "4"}, ["OMPI_COMM_WORLD_RANK is '4'"]),
        ({**_OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": ""}, ["OMPI_COMM_WORLD_LOCAL_RANK is not set"]),
        ({**_SLURM, "WORLD_SIZE": "3"}, ["WORLD_SIZE is '3'", "SLURM_NTASKS is '8'"]),
        ({**_SLURM, "SLURM_LOCALID": ""}, ["SLURM_LOCALID is not set"]),
        ({**_SLURM, "SLURM_LOCALID": "6"}, ["SLURM_LOCALID is '6'", "SLURM_PROCID is '5'"]),
        ({**_SLURM, "SLURM_NTASKS": ""}, ["SLURM_NTASKS is not set"]),
        ({**_SLURM, "SLURM_NODELIST": "", "SLURM_NNODES": "2"}, ["SLURM_NODELIST is not set"]),
        ({**_SLURM, "SLURM_JOB_ID": ""}, ["MASTER_PORT is not set", "SLURM_JOB_ID"]),
    ],
)
def test_other_launchers_are_held_to_the_same(variables: dict[str, str], words: list[str]) -> None:
    """The error names the variables of the launcher that is there."""
    with pytest.raises(UsageError) as caught:
        read_placement(variables)

    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("a", ["a"]),
        ("a,b1", ["a", "b1"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("a[1,3-4]-ib,b", ["a1-ib", "a3-ib", "a4-ib", "b"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
    ],
)
def test_slurm_lists_of_hosts_are_expanded(text: str, hosts: list[str]) -> None:
    """In Slurm's order, with leading zeros."""
    assert expand_host_list(text) == hosts
