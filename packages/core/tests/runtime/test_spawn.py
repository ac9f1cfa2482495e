"""``spawn``: functions of notebooks and modules, failures, and nobody left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster
from colossal_core.errors import UsageError
from colossal_core.runtime.launch import launch
from colossal_core.runtime.spawn import RankFailedError, spawn


def test_a_closure_runs_on_every_rank(tmp_path: Path) -> None:
    """It sees the variables around it, as a notebook cell does, and gets its arguments."""

    def rank(word: str) -> None:
        world = launch()
        (tmp_path / f"{word}-{world.rank}-of-{world.world_size}").touch()

    spawn(rank, 3, "hello")

    assert sorted(path.name for path in tmp_path.iterdir()) == [f"hello-{r}-of-3" for r in range(3)]


def test_a_rank_can_train_after_its_parent_has(tmp_path: Path) -> None:
    """A notebook that has computed, also backwards and on all cores, can still fork."""
    weight = torch.randn(600, 600, requires_grad=True)
    (weight @ weight).sum().backward()

    def rank() -> None:
        launch()
        copy = torch.randn(600, 600, requires_grad=True)
        (copy @ copy).sum().backward()
        dist.all_reduce(copy.grad)
        (tmp_path / str(dist.get_rank())).touch()

    spawn(rank, 2)

    assert len(list(tmp_path.iterdir())) == 2


def _fail_by_error() -> None:
    """Raise."""
    raise ValueError("boom")


def _fail_by_exit() -> None:
    """Leave with a code."""
    sys.exit(3)


def _fail_by_crash() -> None:
    """Die of a signal."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("fail", "code", "words"),
    [
        (_fail_by_error, 1, "ValueError: boom"),
        (_fail_by_exit, 3, "exit code 3"),
        (_fail_by_crash, 137, "SIGKILL"),
    ],
)
def test_the_first_failure_is_raised_and_the_others_end(
    fail: Callable[[], None], code: int, words: str
) -> None:
    """Peers that wait in a collective fail too, but are not blamed."""

    def rank() -> None:
        launch()
        if dist.get_rank() == 1:
            fail()
        dist.all_reduce(torch.ones(1))
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(RankFailedError, match=words) as caught:
        spawn(rank, 3)

    assert (caught.value.rank, caught.value.rank_exit_code) == (1, code)
    assert "rank 1 of 3" in caught.value.message
    assert time.monotonic() - began < 10
    assert multiprocessing.active_children() == []


class _Picky(nn.Module):
    """Normalises over all ranks, and refuses what rank 1 brings."""

    def __init__(self) -> None:
        """Build it."""
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[n, 2]`` to ``[n, 2]``."""
        if dist.get_rank() == 1:
            raise ValueError("a bad row")
        outputs: torch.Tensor = self.norm(x)
        return outputs


@pytest.mark.parametrize("how", ["plain", "forward_backward"])
def test_a_rank_that_fails_inside_a_model_ends_those_that_wait_there(how: str) -> None:
    """The others are in a collective of the same forward; the traceback of the cause is what is told."""

    def rank() -> None:
        launch()
        net, booster, rows = _Picky(), Booster(), torch.ones(4, 2)
        model, _ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        if how == "plain":
            model(rows).sum().backward()
        else:
            booster.forward_backward(model, (rows, rows), nn.MSELoss())

    with pytest.raises(RankFailedError, match="ValueError: a bad row") as caught:
        spawn(rank, 2)

    assert caught.value.rank == 1


def test_ranks_that_do_not_listen_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what they have started."""
    monkeypatch.setattr("colossal_core.runtime.spawn._GRACE_SECONDS", 0.5)

    def rank() -> None:
        if os.environ["RANK"] == "0":
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.01)
            raise ValueError("boom")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (tmp_path / str(os.getpid())).touch()
        (tmp_path / str(child.pid)).touch()
        time.sleep(60)

    with pytest.raises(RankFailedError):
        spawn(rank, 2)

    assert [path.name for path in tmp_path.iterdir() if _is_running(int(path.name))] == []


def _is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie that waits for its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    return fields[0] != "Z"


@pytest.mark.parametrize("nproc", [0, -1, True, "2"])
def test_a_wrong_number_of_ranks_is_refused(nproc: int) -> None:
    """With the value."""
    with pytest.raises(UsageError, match="nproc"):
        spawn(print, nproc)


def test_a_member_of_a_process_group_cannot_start_ranks() -> None:
    """``launch`` in the notebook itself, outside the function, is the usual slip."""

    def rank() -> None:
        launch()
        with pytest.raises(UsageError, match="process group already"):
            spawn(print, 2)

    spawn(rank, 1)


def _run_script(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a script of its own."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text), encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=80, check=False
    )


@pytest.mark.timeout(90)  # imports torch in fresh interpreters
def test_a_function_of_a_module_is_imported_by_fresh_interpreters(tmp_path: Path) -> None:
    """Nothing of the parent's memory is there, and arguments travel."""
    (tmp_path / "jobs.py").write_text(
        "from colossal_core import launch\nstate = []\n"
        "def job(word): print(f'{word} {launch().rank} {state}\\n', end='', flush=True)\n",
        encoding="utf-8",
    )

    done = _run_script(
        tmp_path,
        """
        import jobs
        from colossal_core import spawn
        if __name__ == "__main__":
            jobs.state.append("parent")
            spawn(jobs.job, 2, "hi")
        """,
    )

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["hi 0 []", "hi 1 []"]


@pytest.mark.timeout(90)  # imports torch in fresh interpreters
def test_a_function_of_a_script_needs_no_guard(tmp_path: Path) -> None:
    """A function of ``__main__`` is forked, so nobody imports the script again."""
    done = _run_script(
        tmp_path,
        """
        from colossal_core import launch, spawn
        def job(): print(f"rank {launch().rank}\\n", end="", flush=True)
        print("once", flush=True)
        spawn(job, 2)
        """,
    )

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["once", "rank 0", "rank 1"]


@pytest.mark.timeout(90)  # imports torch in fresh interpreters
def test_an_unguarded_script_with_a_function_of_a_module_is_told_what_to_do(tmp_path: Path) -> None:
    """Fresh interpreters import the script again, and meet the call of ``spawn``."""
    (tmp_path / "jobs.py").write_text("def job(): pass\n", encoding="utf-8")

    done = _run_script(tmp_path, "import jobs\nfrom colossal_core import spawn\nspawn(jobs.job, 1)\n")

    assert done.returncode != 0
    assert 'if __name__ == "__main__":' in done.stderr
