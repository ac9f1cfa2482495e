"""The contract of strategies: pure in deciding, honest in the table, exact in training, refused where not.

A strategy serves some worlds and some models. The plan says which worlds; the subclass names the models that
it refuses. Where it is refused, it must be so on every rank, with nothing changed; everywhere else it must be
exact.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from colossal_core.boxes import Box
from colossal_core.building import build_plan
from colossal_core.errors import ColossalError
from colossal_core.plugins import Registry
from colossal_testkit.contracts import strategy_checks as checks
from colossal_testkit.contracts.protection import Contract
from colossal_testkit.models import MODELS, Workload, build_workload
from colossal_testkit.parity import FP64, Recipe, check_parity
from colossal_testkit.ranks import run_ranks

__all__ = ["StrategyContract"]

WORLDS = (1, 2, 3, 4)


class StrategyContract(Contract, is_contract=True):
    """What every strategy promises. A subclass fills in the open names.

    Attributes:
        registry: Module-level function that returns the registry that knows the piece, as a ``staticmethod``;
            None when the piece is installed.
        settings: Further keywords of the Booster that the piece needs.
        refusals: Name of a reference model that the strategy does not serve, to a part of its error's
            message.
        adapt: Module-level function, as a ``staticmethod``, that gives the reference run what the strategy
            adds to the mathematics of a model; None where it adds nothing.
    """

    open_names: ClassVar[frozenset[str]] = frozenset(
        {"make_piece", "registry", "settings", "refusals", "adapt", "waivers"}
    )
    registry: ClassVar[Callable[[], Registry] | None] = None
    settings: ClassVar[Mapping[str, object]] = {}
    refusals: ClassVar[Mapping[str, str]] = {}
    adapt: ClassVar[staticmethod[[Workload], Workload] | None] = None

    @abstractmethod
    def make_piece(self) -> object:
        """Return the options object of the strategy."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test on the models and the worlds that are served; pytest asks while it collects."""
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", self._served_models())
        if "nproc" in metafunc.fixturenames:
            metafunc.parametrize("nproc", self._served_worlds())

    # --- deciding ------------------------------------------------------------------------------------------

    def test_some_world_and_some_model_are_served(self) -> None:
        """Of worlds of 1 to 4 ranks and of the reference models, not all are refused."""
        assert self._served_worlds()
        assert self.refusals.keys() < MODELS.keys()

    def test_proposing_is_pure(self, name: str, nproc: int) -> None:
        """``propose`` changes no bit and no attribute of a model, issues no collective, repeats itself."""
        arguments = [self._recipe(name), self.make_piece(), dict(self.settings), type(self).registry]

        (problems,) = run_ranks(checks.propose_for_every_rank, 1, *arguments, nproc, process_group=False)

        assert problems == []

    def test_refused_models_are_refused_on_every_rank(self) -> None:
        """The error says what was announced, on all ranks, and the user's model is as it was."""
        nproc = self._served_worlds()[-1]
        for name, text in self.refusals.items():
            found = self._run(checks.refuse_to_boost, nproc, name)

            assert [changed for _, changed in found] == [[]] * nproc, name
            assert all(text in message for message, _ in found), name

    def test_refused_worlds_are_refused_on_every_rank(self) -> None:
        """A number of ranks that does not fit is an error everywhere, with the model unchanged."""
        for nproc in sorted(set(WORLDS) - set(self._served_worlds())):
            found = self._run(checks.refuse_to_boost, nproc, self._served_models()[0])

            assert [changed for _, changed in found] == [[]] * nproc
            assert all(message for message, _ in found)

    # --- cutting -------------------------------------------------------------------------------------------

    def test_objects_keep_their_identity(self, name: str, nproc: int) -> None:
        """Model and Parameter objects are the user's own; modules keep their class, or get a subclass."""
        assert self._run(checks.watch_identities, nproc, name) == [[]] * nproc

    def test_the_table_covers_every_element_once(self, name: str, nproc: int) -> None:
        """The boxes of each parameter tile it over the ranks, and exactly the holders of a box hold it."""
        found = self._run(checks.list_parts, nproc, name)

        shapes = found[0][0]
        boxes: dict[str, dict[Box, set[int]]] = {name: {} for name in shapes}
        for rank, (_, parts) in enumerate(found):
            for part in parts:
                boxes[part.name].setdefault(part.box, set()).add(rank)
        for part in itertools.chain.from_iterable(parts for _, parts in found):
            assert boxes[part.name][part.box] == set(part.holders), f"holders of {part.name} at {part.box}"
        for key, held in boxes.items():
            assert sum(box.volume for box in held) == math.prod(shapes[key]), f"elements of {key}"
            assert all(one.intersect(other) is None for one, other in itertools.combinations(held, 2)), key

    def test_local_tensors_hold_what_the_table_says(self, name: str, nproc: int) -> None:
        """Each part of a local tensor has the bits of its box in the serial model."""
        assert self._run(checks.compare_local_values, nproc, name) == [[]] * nproc

    # --- training ------------------------------------------------------------------------------------------

    def test_plain_loop_equals_one_process(self, name: str, nproc: int) -> None:
        """The user's own backward gives one process's losses, norms and weights; copies stay bit-equal."""
        if self._plan().layout(nproc).degree("pipeline") > 1:
            pytest.skip("a pipeline runs by forward_backward only")
        self._check(self._recipe(name), nproc)

    def test_forward_backward_equals_one_process(self, name: str, nproc: int) -> None:
        """Shares of different sizes and weights give the same as one batch."""
        self._check(self._recipe(name, loop="forward_backward", num_samples=13, ignores_some=True), nproc)

    # --- cost ----------------------------------------------------------------------------------------------

    def test_announced_volumes_are_moved(self, nproc: int) -> None:
        """What ``propose`` says of a phase is what a step moves; everything that moves is in the ledger."""
        for moved in self._run(checks.measure_moved, nproc, self._served_models()[0]):
            measured = {phase: moved.words.get(phase, 0.0) for phase in moved.volumes}
            assert measured == pytest.approx(dict(moved.volumes))
            assert moved.num_issued in (None, moved.num_booked)

    # --- internals -----------------------------------------------------------------------------------------

    def _plan(self) -> Any:
        """Return the plan with the piece."""
        make_registry = type(self).registry
        registry = Registry.discover() if make_registry is None else make_registry()
        settings: dict[str, Any] = {"precision": "fp64", **self.settings}
        return build_plan(registry, [self.make_piece()], **settings)

    def _served_worlds(self) -> list[int]:
        """Return the numbers of ranks that the plan fits, of 1 to 4."""
        plan, served = self._plan(), []
        for world_size in WORLDS:
            try:
                plan.layout(world_size)
            except ColossalError:
                continue
            served.append(world_size)
        return served

    def _served_models(self) -> list[str]:
        """Return the reference models that are not refused."""
        return [name for name in sorted(MODELS) if name not in self.refusals]

    def _recipe(self, name: str, *, loop: Any = "plain", **arguments: object) -> Recipe:
        """Return the run of a reference model."""
        return Recipe(
            builder=build_workload,
            arguments={"name": name, **arguments},
            loop=loop,
            max_grad_norm=0.5,
            adapt=type(self).adapt,
        )

    def _check(self, recipe: Recipe, nproc: int) -> None:
        """Compare a run with one process."""
        check_parity(
            recipe,
            nproc=nproc,
            pieces=[self.make_piece()],
            settings=self.settings,
            registry=type(self).registry,
            tolerance=FP64,
        )

    def _run(self, check: Callable[..., Any], nproc: int, name: str) -> list[Any]:
        """Run a check on ranks with the piece."""
        piece = self.make_piece()
        return run_ranks(check, nproc, self._recipe(name), piece, dict(self.settings), type(self).registry)
