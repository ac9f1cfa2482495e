"""Jobs on many ranks: what they return, what surrounds them, and that none knows of the one before."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType

import attrs
import pytest
import torch
import torch.distributed as dist

from colossal_core.errors import UsageError
from colossal_testkit.ranks import RankFailedError, RankPool, run_ranks

from .rank_functions import who_am_i


@attrs.frozen
class Point:
    """A value of a class that only this file defines."""

    x: int
    y: torch.Tensor


def sum_over_ranks(scale: float) -> float:
    """Return a sum to which every rank contributes."""
    value = torch.full((3,), scale * (dist.get_rank() + 1))
    dist.all_reduce(value)
    return float(value.sum())


def echo(value: object) -> object:
    """Return what came in."""
    return value


def double(point: Point) -> Point:
    """Return a point of twice the size."""
    return Point(2 * point.x, 2 * point.y)


def disturb() -> None:
    """Change everything that a job could change for the next one."""
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(5)
    random.seed(5)
    os.environ["COLOSSAL_LEFT_OVER"] = "1"
    sys.path.append("/left/over")
    os.chdir("/")
    dist.new_group([0])
    dist.distributed_c10d._get_default_store().set("left", "over")


def look_around() -> dict[str, object]:
    """Return everything that `disturb` changes."""
    return {
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": (random.getrandbits(32), torch.rand(()).item()),
        "variable": os.environ.get("COLOSSAL_LEFT_OVER"),
        "path": "/left/over" in sys.path,
        "directory": str(Path.cwd()),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "key": dist.distributed_c10d._get_default_store().check(["left"]),
    }


def start_group_from_environment() -> tuple[bool, int, float]:
    """Start the default group as under torchrun."""
    was_there = dist.is_initialized()
    dist.init_process_group("gloo")
    value = torch.ones(())
    dist.all_reduce(value)
    return was_there, int(os.environ["LOCAL_RANK"]), value.item()


def read_surroundings() -> tuple[str | None, str]:
    """Return a variable and the working directory."""
    return os.environ.get("COLOSSAL_ASKED"), str(Path.cwd())


def warn() -> None:
    """Warn."""
    warnings.warn("something is odd", UserWarning, stacklevel=1)


def talk() -> None:
    """Print on both streams."""
    sys.stdout.write(f"out {dist.get_rank()}\n")
    sys.stderr.write(f"err {dist.get_rank()}\n")


def pass_along() -> float:
    """Send more often on some ranks than on others, which is no disagreement."""
    value = torch.full((), float(dist.get_rank()))
    if dist.get_rank() > 0:
        dist.recv(value, dist.get_rank() - 1)
    if dist.get_rank() < dist.get_world_size() - 1:
        dist.send(value, dist.get_rank() + 1)
    return value.item()


def split_and_sum() -> tuple[float, float]:
    """Use groups of some ranks only, which come and go with the job."""
    even = dist.new_group([0, 2])
    odd = dist.new_group([1])
    value = torch.ones(())
    dist.all_reduce(value, group=even if dist.get_rank() % 2 == 0 else odd)
    total = value.clone()
    dist.all_reduce(total)
    return value.item(), total.item()


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_a_job_has_a_group_of_exactly_its_ranks(ranks: RankPool, nproc: int) -> None:
    """World sizes may change from job to job, and values come back in rank order."""
    results = ranks(who_am_i, nproc)

    assert results == [(rank, nproc) for rank in range(nproc)]


def test_collectives_reach_every_rank() -> None:
    """The default group works, on the processes of the session."""
    assert run_ranks(sum_over_ranks, 3, 2.0) == [36.0, 36.0, 36.0]


def test_groups_of_some_ranks_come_and_go_with_the_job() -> None:
    """Two jobs that make the same groups do not meet."""
    results = [run_ranks(split_and_sum, 3) for _ in range(2)]

    assert results == [[(2.0, 5.0), (1.0, 5.0), (2.0, 5.0)]] * 2


def test_ranks_may_send_unequally_often() -> None:
    """Point-to-point calls differ between the ends of a pipeline; only collectives are compared."""
    assert run_ranks(pass_along, 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).view(3, 4)[:, 1:3].T,
        torch.tensor(3, dtype=torch.int64),
        torch.zeros(0, 5, dtype=torch.bfloat16),
        torch.tensor([1.5 + 2j]).conj(),
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(2).to_sparse(),
    ],
    ids=["view", "scalar", "empty", "conjugate", "parameter", "sparse"],
)
def test_tensors_travel_by_value(value: torch.Tensor) -> None:
    """What arrives is equal, detached, and shares nothing with what was sent."""
    (back,) = run_ranks(echo, 1, value)

    assert isinstance(back, torch.Tensor)
    assert back.dtype == value.dtype
    assert torch.equal(back.to_dense(), value.detach().to_dense())
    assert not back.requires_grad


def test_a_view_does_not_carry_the_storage_behind_it() -> None:
    """A small view of a large buffer arrives with its own bytes only."""
    (back,) = run_ranks(echo, 1, torch.zeros(1 << 20)[:4])

    assert isinstance(back, torch.Tensor)
    assert back.untyped_storage().nbytes() == 16


def test_classes_of_the_test_file_travel() -> None:
    """A worker loads the file before it unpickles arguments."""
    results = run_ranks(double, 2, Point(3, torch.ones(2)))

    assert [(point.x, point.y.tolist()) for point in results] == [(6, [2.0, 2.0])] * 2


def test_a_job_knows_nothing_of_the_one_before() -> None:
    """Modes, seeds, environment, import path, directory, groups and keys of the store start anew."""
    before = run_ranks(look_around, 2)
    run_ranks(disturb, 2)

    after = run_ranks(look_around, 2)

    assert after == before
    assert after[0] == after[1]
    assert after[0]["key"] is False
    assert after[0]["groups"] == 1


def test_a_function_may_start_the_group_itself() -> None:
    """Without a group, ranks find the environment of torchrun; each job meets only its own ranks."""
    results = [run_ranks(start_group_from_environment, 2, process_group=False) for _ in range(2)]

    assert results == [[(False, 0, 2.0), (False, 1, 2.0)]] * 2


def test_ranks_see_environment_and_directory_of_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a test sets with monkeypatch holds on its ranks too."""
    monkeypatch.setenv("COLOSSAL_ASKED", "yes")
    monkeypatch.chdir(tmp_path)

    assert run_ranks(read_surroundings, 2) == [("yes", str(tmp_path))] * 2


def test_warnings_mean_on_ranks_what_they_mean_in_the_test() -> None:
    """An error where the test makes them errors, and silence where the test ignores them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(warn, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RankFailedError, match="raised UserWarning") as caught:
            run_ranks(warn, 1)

    assert isinstance(caught.value.error, UserWarning)


def test_output_of_ranks_belongs_to_the_test(capsys: pytest.CaptureFixture[str]) -> None:
    """What a rank prints is printed by the test, with the number of the rank."""
    run_ranks(talk, 2)

    lines = capsys.readouterr().out.splitlines()
    assert lines == ["[rank 0] out 0", "[rank 0] err 0", "[rank 1] out 1", "[rank 1] err 1"]


def test_jobs_leave_no_open_files_behind() -> None:
    """Results with tensors cost no descriptors, on neither side; old groups go soon after their jobs."""
    run_ranks(count_open_files, 2)
    before = (count_open_files(), max(run_ranks(count_open_files, 2)))

    for _ in range(10):
        run_ranks(echo, 2, torch.ones(100))

    deadline = time.monotonic() + 10
    while max(run_ranks(count_open_files, 2)) > before[1] + 20 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert count_open_files() == before[0]
    assert max(run_ranks(count_open_files, 2)) <= before[1] + 20


def count_open_files() -> int:
    """Return the number of open descriptors of this process."""
    return len(list(Path("/dev/fd").iterdir()))


def _load(path: Path, name: str) -> ModuleType:
    """Import a file under a name, as pytest's importlib mode does."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_a_changed_file_is_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers outlive edits of a test, and of the files beside it that it imports."""
    monkeypatch.syspath_prepend(str(tmp_path))
    neighbour, file = tmp_path / "neighbour_of_edited.py", tmp_path / "edited.py"
    neighbour.write_text("NUMBER = 1\n")
    file.write_text("from neighbour_of_edited import NUMBER\ndef number() -> int:\n    return NUMBER\n")
    first = run_ranks(_load(file, "somewhere.edited").number, 1)

    neighbour.write_text("NUMBER = 20\n")
    second = run_ranks(sys.modules["somewhere.edited"].number, 1)

    assert (first, second) == ([1], [20])
    del sys.modules["somewhere.edited"]


def test_a_relative_import_resolves_without_any_package_file(tmp_path: Path) -> None:
    """Workers make the packages above a test file, as pytest does."""
    folder = tmp_path / "deep" / "tests"
    folder.mkdir(parents=True)
    (folder / "sibling.py").write_text("NUMBER = 7\n")
    file = folder / "relative.py"
    file.write_text("def number() -> int:\n    from .sibling import NUMBER\n    return NUMBER\n")

    assert run_ranks(_load(file, "deep.tests.relative").number, 1) == [7]
    del sys.modules["deep.tests.relative"]


def test_functions_that_no_worker_finds_are_refused() -> None:
    """Nested functions, lambdas, bound methods and instances are named, with what to do instead."""

    def nested() -> None:
        """Do nothing."""

    for function in (nested, lambda: None, Point(1, torch.ones(1)).__eq__, print):
        with pytest.raises(UsageError, match="Define it at the top of the test file"):
            run_ranks(function, 1)


def test_arguments_that_cannot_travel_are_refused() -> None:
    """A lambda as an argument is an error in the test, before any rank starts."""
    with pytest.raises(UsageError, match="cannot travel to the ranks"):
        run_ranks(echo, 1, lambda: None)


def test_the_number_of_ranks_is_checked() -> None:
    """Zero ranks are refused with the number."""
    with pytest.raises(UsageError, match="nproc is 0"):
        run_ranks(who_am_i, 0)
