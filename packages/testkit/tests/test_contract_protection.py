"""A contract class cannot be weakened quietly, and a broken piece fails its tests when pytest runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from colossal_testkit.contracts.protection import Contract, find_weakenings

HERE = Path(__file__).parent


class Promise(Contract, is_contract=True):
    """A small contract."""

    open_names: ClassVar[frozenset[str]] = frozenset({"make_piece", "waivers"})
    tolerance = 1e-10

    def make_piece(self) -> object:
        """Return the piece."""
        return None

    def test_it_holds(self) -> None:
        """It holds."""

    def measure(self) -> None:
        """Measure for the test."""


class Kept(Promise):
    """Fills in what is open, and adds a test of its own."""

    def make_piece(self) -> object:
        """Return another piece."""
        return 1

    def test_more(self) -> None:
        """More than was asked for."""


class Dropped(Promise):
    """Drops a test."""

    test_it_holds = None  # type: ignore[assignment]


class Overridden(Promise):
    """Replaces a test by nothing."""

    def test_it_holds(self) -> None:
        """Hold trivially."""


class Expected(Promise):
    """Admits a failure with its reason."""

    @pytest.mark.xfail(reason="known: the piece lacks this")
    def test_it_holds(self) -> None:
        """Does not hold yet."""
        raise AssertionError


class Unexplained(Promise):
    """Admits a failure without a reason."""

    @pytest.mark.xfail
    def test_it_holds(self) -> None:
        """Does not hold."""
        raise AssertionError


class Looser(Promise):
    """Widens what is compared, and how it is measured."""

    tolerance = 1.0

    def measure(self) -> None:
        """Measure nothing."""


class Waived(Promise):
    """Waives a test with a reason."""

    waivers: ClassVar[dict[str, str]] = {"test_it_holds": "this piece has no such state"}


class WaivedWrongly(Promise):
    """Waives without a reason, what does not exist, and the guard."""

    waivers: ClassVar[dict[str, str]] = {
        "test_it_holds": " ",
        "test_nothing": "x",
        "test_contract_is_whole": "x",
    }


class Unguarded(Promise):
    """Drops the guard itself."""

    test_contract_is_whole = None  # type: ignore[assignment]

    def test_it_holds(self) -> None:
        """Hold trivially."""


class Mixed(Overridden, Kept):
    """Inherits a weakening."""


@pytest.mark.parametrize("subclass", [Kept, Expected, Waived])
def test_what_is_open_or_admitted_passes(subclass: type[Contract]) -> None:
    """Open names, own tests, expected failures with a reason and explained waivers are fine."""
    assert find_weakenings(subclass) == []


@pytest.mark.parametrize(
    ("subclass", "names"),
    [
        (Dropped, ["test_it_holds"]),
        (Overridden, ["test_it_holds"]),
        (Unexplained, ["test_it_holds"]),
        (Looser, ["tolerance", "measure"]),
        (WaivedWrongly, ["test_it_holds", "test_nothing", "test_contract_is_whole"]),
        (Mixed, ["test_it_holds"]),
        (Unguarded, ["test_it_holds"]),
    ],
)
def test_a_weakening_fails_the_guard(subclass: type[Promise], names: list[str]) -> None:
    """Whatever is dropped, replaced, widened or waived without a word is named by the test in the class."""
    with pytest.raises(pytest.fail.Exception) as caught:
        subclass().test_contract_is_whole()

    problems = str(caught.value).splitlines()[1:]
    assert len(problems) == len(names)
    assert all(name in problem for name, problem in zip(names, problems, strict=True))


CHOSEN = [
    "test_broken.py::TestDropping::test_contract_is_whole",
    "test_broken.py::TestScale::test_contract_is_whole",
    "test_broken.py::TestScale::test_norm_is_exact_without_clipping[2]",
    "test_broken.py::TestScale::test_traffic_equals_the_formula[2]",
    "test_broken.py::TestWaiving::test_everything_communicated_is_in_the_ledger",
]

RUN = """
from broken_managers import Broken, make_registry
from colossal_testkit.contracts import MemoryManagerContract


class Declared(MemoryManagerContract):
    registry = staticmethod(make_registry)

    def make_piece(self):
        return Broken(fault="scale")

    def words_per_step(self, num_elements, num_ranks):
        return 2 * (num_ranks - 1) / num_ranks * num_elements

    def live_bytes(self, num_elements, num_ranks):
        return 16 * num_elements


class TestScale(Declared):
    pass


class TestDropping(Declared):
    test_contract_is_whole = None
    test_norm_is_exact_without_clipping = None


class TestWaiving(Declared):
    waivers = {"test_everything_communicated_is_in_the_ledger": "sums in another order"}
"""


@pytest.mark.timeout(90)
def test_a_broken_manager_fails_when_pytest_runs_its_contract(tmp_path: Path) -> None:
    """In a run of its own: broken parts fail, a dropped test fails the guard, a waiver shows as a skip."""
    (tmp_path / "test_broken.py").write_text(RUN)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-rA",
        "-c",
        os.devnull,
    ]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}

    run = subprocess.run(
        [*command, f"--rootdir={tmp_path}", *CHOSEN],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )

    lines = [line for line in run.stdout.splitlines() if line.startswith(("PASSED", "FAILED", "SKIPPED"))]
    assert run.returncode == 1
    assert sorted(line.partition(" - ")[0].replace("test_broken.py::", "") for line in lines)[:-1] == [
        "FAILED TestDropping::test_contract_is_whole",
        "FAILED TestScale::test_norm_is_exact_without_clipping[2]",
        "PASSED TestScale::test_contract_is_whole",
        "PASSED TestScale::test_traffic_equals_the_formula[2]",
    ]
    assert "waived: sums in another order" in max(lines)
