"""The contract of memory managers: exact, complete, as cheap as it says, and never silently wrong.

Every test runs real ranks. Parity is against torch alone in one process; bits are compared where two ranks
make them comparable; traffic and memory are held against the formulas that the subclass declares.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import pytest

from colossal_core.pieces import Replicated
from colossal_core.plugins import Registry
from colossal_testkit.contracts import memory_checks as checks
from colossal_testkit.contracts.protection import Contract
from colossal_testkit.models import MODELS, build_workload
from colossal_testkit.parity import FP64, Recipe, check_parity, compare_traces, reference_trace, train_boosted
from colossal_testkit.plays import LOOPS, UNEVEN
from colossal_testkit.ranks import collect_ranks, run_ranks
from colossal_testkit.stories import assert_same_story, expect
from colossal_testkit.traces import compare_tensors, distance_of
from colossal_testkit.traffic import check_words

__all__ = ["MemoryManagerContract"]

# Each model on two and on three ranks, and one of them on one and on four; `--slow` runs the whole product.
QUICK = {(name, nproc) for name in MODELS for nproc in (2, 3)} | {("gpt-tied", 1), ("gpt-tied", 4)}
WORKLOADS = [
    pytest.param(name, nproc, marks=[] if (name, nproc) in QUICK else [pytest.mark.slow])
    for name in sorted(MODELS)
    for nproc in (1, 2, 3, 4)
]


class MemoryManagerContract(Contract, is_contract=True):
    """What every memory manager promises. A subclass fills in the open names.

    Attributes:
        registry: Module-level function that returns the registry that knows the piece, as a ``staticmethod``;
            None when the piece is installed.
        settings: Further keywords of the Booster that the piece needs.
        gathers_in_forward: Whether forward communicates, so that all ranks have to run models equally often.
    """

    open_names: ClassVar[frozenset[str]] = frozenset(
        {
            "make_piece",
            "words_per_step",
            "live_bytes",
            "registry",
            "settings",
            "gathers_in_forward",
            "waivers",
        }
    )
    gathers_in_forward: ClassVar[bool] = False
    registry: ClassVar[Callable[[], Registry] | None] = None
    settings: ClassVar[Mapping[str, object]] = {}

    @abstractmethod
    def make_piece(self) -> object:
        """Return the options object of the manager."""

    @abstractmethod
    def words_per_step(self, num_elements: int, num_ranks: int) -> float:
        """Return the words that one rank receives per step, without those for norm and loss.

        Args:
            num_elements: Trainable elements of the model.
            num_ranks: Data ranks.
        """

    @abstractmethod
    def live_bytes(self, num_elements: int, num_ranks: int) -> float:
        """Return the bytes that one rank holds after a step, before gradients are cleared: fp32, AdamW.

        Args:
            num_elements: Trainable elements of the model.
            num_ranks: Data ranks.
        """

    # --- exactness
    # -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("name", "nproc"), WORKLOADS)
    def test_plain_loop_equals_one_process(self, name: str, nproc: int) -> None:
        """The user's own backward and the manager's step give one process's losses, norms and weights."""
        self._check(Recipe(builder=build_workload, arguments={"name": name}, max_grad_norm=0.5), nproc)

    @pytest.mark.parametrize(("name", "nproc"), WORKLOADS)
    def test_forward_backward_equals_one_process(self, name: str, nproc: int) -> None:
        """Shares of different sizes, and different numbers of tokens that count, weigh as in one batch."""
        arguments = {"name": name, "num_samples": 13, "ignores_some": True}
        recipe = Recipe(
            builder=build_workload, arguments=arguments, loop="forward_backward", max_grad_norm=0.5
        )
        self._check(recipe, nproc)

    @pytest.mark.parametrize("nproc", [1, 3])
    @pytest.mark.parametrize("name", ["branches", "gpt-tied"])
    def test_repeated_backward_adds(self, name: str, nproc: int) -> None:
        """Two backward passes before a step add up, also where a branch is in one of them only."""
        arguments = {"name": name, "num_samples": 24}
        self._check(
            Recipe(builder=build_workload, arguments=arguments, loop="twice", max_grad_norm=0.5), nproc
        )

    @pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
    @pytest.mark.parametrize("loop", sorted(LOOPS))
    def test_surprising_loops_do_what_torch_does(self, loop: str) -> None:
        """Branches, accumulation, clearing, assigning, hooks, errors, recomputation: on two ranks in fp64."""
        story = attrs.evolve(
            LOOPS[loop], pieces=(self.make_piece(),), registry=type(self).registry, shows_gradients=False
        )
        if self.gathers_in_forward and loop in UNEVEN:
            pytest.skip("ranks run models a different number of times, and forward communicates")

        traces = run_ranks(checks.tell_twice, 2, story)

        wanted = expect(story, 2)
        for played in zip(*traces, strict=True):
            assert_same_story(played, wanted)

    def test_ranks_that_run_models_unequally_often_do_not_hang(self) -> None:
        """Where forward communicates that is an error on every rank; elsewhere it is exact."""
        story = attrs.evolve(
            LOOPS["accumulate_by_rank"],
            pieces=(self.make_piece(),),
            registry=type(self).registry,
            shows_gradients=False,
        )

        outcomes = collect_ranks(checks.tell_impatiently, 2, story)

        if self.gathers_in_forward:
            assert all("ranks wait for each other" in str(outcome.error) for outcome in outcomes)
        else:
            assert_same_story([outcome.value for outcome in outcomes], expect(story, 2))

    @pytest.mark.parametrize("nproc", [2, 3])
    def test_holding_reductions_back_changes_nothing(self, nproc: int) -> None:
        """The first of two backward passes inside ``no_sync``."""
        arguments = {"name": "gpt", "num_samples": 24}
        self._check(
            Recipe(builder=build_workload, arguments=arguments, loop="held", max_grad_norm=0.5), nproc
        )

    @pytest.mark.parametrize("nproc", [1, 2])
    def test_gradients_may_be_cleared_to_zeros(self, nproc: int) -> None:
        """``zero_grad(set_to_none=False)`` clears as well; what never had a gradient still is not updated."""
        self._check(Recipe(builder=build_workload, arguments={"name": "mlp"}, sets_to_none=False), nproc)

    @pytest.mark.parametrize("nproc", [1, 2])
    def test_gradients_that_are_not_cleared_keep_adding(self, nproc: int) -> None:
        """Without ``zero_grad`` a step adds to the clipped gradients of the one before, as in torch."""
        arguments = {"name": "branches", "optimizer": "sgd"}
        recipe = Recipe(builder=build_workload, arguments=arguments, clears=False, max_grad_norm=0.5)
        self._check(recipe, nproc)

    @pytest.mark.parametrize("nproc", [1, 2, 3])
    def test_norm_is_exact_without_clipping(self, nproc: int) -> None:
        """The norm is there without a bound, and counts a tied weight once; SGD sees every wrong scale."""
        arguments = {"name": "gpt-tied", "optimizer": "sgd"}
        self._check(Recipe(builder=build_workload, arguments=arguments), nproc)

    @pytest.mark.parametrize("nproc", [1, 2, 3])
    def test_whole_shaped_optimizers_see_whole_parameters(self, nproc: int) -> None:
        """Adafactor's factored moments need rows and columns, however the elements are held.

        Not a GPT: Adafactor divides by the size of gradients, and those of key biases are rounding alone.
        """
        arguments = {"name": "convnet", "optimizer": "adafactor"}
        self._check(Recipe(builder=build_workload, arguments=arguments), nproc)

    @pytest.mark.parametrize("nproc", [1, 2, 3])
    def test_clipping_by_hand_is_exact(self, nproc: int) -> None:
        """``optimizer.clip_grad_norm_`` before the step, in the largest-element norm, under SGD."""
        recipe = Recipe(
            builder=build_workload,
            arguments={"name": "mlp", "optimizer": "sgd"},
            max_grad_norm=0.05,
            clips_by_hand=True,
        )
        self._check(recipe, nproc)

    @pytest.mark.parametrize("nproc", [2, 3])
    def test_an_existing_optimizer_state_is_kept(self, nproc: int) -> None:
        """Moments and step counters of a run that began without a Booster continue."""
        self._check(Recipe(builder=checks.build_warm, arguments={"name": "gpt"}, max_grad_norm=0.5), nproc)

    @pytest.mark.parametrize("nproc", [1, 3])
    def test_the_optimizer_state_is_that_of_one_process(self, nproc: int) -> None:
        """``state_dict`` shows whole states on every rank, and loading it again changes nothing."""
        recipe = Recipe(builder=build_workload, arguments={"name": "mlp"})
        (reference,) = run_ranks(checks.train_serial_state, 1, recipe, process_group=False)

        found = self._run(checks.exchange_state, nproc, recipe)

        compare_traces([trace for trace, _ in found], reference_trace(recipe), FP64)
        for _, state in found:
            compare_tensors(state, reference, FP64)

    @pytest.mark.parametrize("nproc", [1, 2])
    def test_bf16_is_no_worse_than_replicated(self, nproc: int) -> None:
        """Against fp64, weights are at most twice as far off as those of one replicated bf16 rank."""
        recipe = Recipe(
            builder=build_workload,
            arguments={"name": "gpt", "dtype": "float32"},
            loop="forward_backward",
            max_grad_norm=0.5,
        )
        exact = reference_trace(attrs.evolve(recipe, arguments={"name": "gpt", "dtype": "float64"}))
        usual = run_ranks(train_boosted, 1, recipe, [Replicated()], {"precision": "bf16"})

        found = self._run(train_boosted, nproc, recipe, precision="bf16")

        assert distance_of(found, exact) <= 2 * distance_of(usual, exact)

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_two_ranks_equal_replicated_bit_for_bit(self, dtype: str) -> None:
        """The sum of two numbers has one order, so no manager has an excuse; fp64 without clipping."""
        bound = 0.5 if dtype == "float32" else None
        arguments = {"name": "gpt", "dtype": dtype}
        recipe = Recipe(
            builder=build_workload, arguments=arguments, loop="forward_backward", max_grad_norm=bound
        )

        mine = self._run(train_boosted, 2, recipe)
        replicated = run_ranks(train_boosted, 2, recipe, [Replicated()])

        assert [trace.digest for trace in mine] == [trace.digest for trace in replicated]

    @pytest.mark.parametrize("nproc", [1, 2, 3])
    def test_frozen_and_unused_parameters_keep_every_bit(self, nproc: int) -> None:
        """Neither weight decay nor momentum touches what had no gradient on any rank."""
        recipe = Recipe(builder=build_workload, arguments={"name": "mlp"})

        untouched = self._run(checks.watch_untouched, nproc, recipe)

        assert untouched == [["frozen.bias", "frozen.weight", "unused.bias", "unused.weight"]] * nproc

    # --- cost
    # ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("nproc", [2, 3, 4])
    def test_traffic_equals_the_formula(self, nproc: int) -> None:
        """At most a thousandth more than declared, and one message of 16 bytes each for norm and loss."""
        recipe = Recipe(builder=checks.build_large, max_grad_norm=0.5)

        costs = self._run(checks.measure_step, nproc, recipe)

        for cost in costs:
            check_words(cost.traffic, self.words_per_step(cost.num_elements, nproc))
            assert cost.traffic.phase("norm").message_bytes <= 16
            assert cost.traffic.phase("loss").message_bytes <= 16

    def test_everything_communicated_is_in_the_ledger(self) -> None:
        """Torch's own record of collectives is as long as the ledger's."""
        (cost, _) = self._run(
            checks.measure_step, 2, Recipe(builder=build_workload, arguments={"name": "mlp"})
        )

        assert cost.num_issued in (None, cost.num_booked)

    @pytest.mark.parametrize("nproc", [1, 2, 3])
    def test_live_bytes_equal_the_formula(self, nproc: int) -> None:
        """Between two steps a rank holds what is declared, to a hundredth, and nothing left over."""
        held = self._run(checks.measure_live_bytes, nproc, Recipe(builder=checks.build_large))

        for rank in held:
            assert rank.held_bytes == pytest.approx(self.live_bytes(rank.num_elements, nproc), rel=0.01)

    @pytest.mark.parametrize("nproc", [1, 2, 3])
    def test_the_estimate_is_what_is_held(self, nproc: int) -> None:
        """``estimate``, which reads the table before anything is allocated, is right to a hundredth."""
        held = self._run(checks.measure_live_bytes, nproc, Recipe(builder=checks.build_large))

        for rank in held:
            assert rank.held_bytes == pytest.approx(rank.estimated_bytes, rel=0.01)

    # --- books
    # -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("nproc", [1, 2, 3])
    def test_places_cover_every_element(self, nproc: int) -> None:
        """Over all ranks, each element that is trained has a value, a gradient and both moments."""
        found = self._run(
            checks.measure_coverage, nproc, Recipe(builder=build_workload, arguments={"name": "gpt"})
        )

        for name, num_elements in found[0].num_elements.items():
            for state in ("value", "gradient", "exp_avg", "exp_avg_sq"):
                ranges = [held for rank in found for held in rank.ranges.get((name, state), ())]
                assert _covered(ranges) == [(0, num_elements)], f"{state} of {name}"

    @pytest.mark.parametrize("nproc", [1, 2])
    def test_objects_keep_their_identity(self, nproc: int) -> None:
        """The model, its Parameter objects and the parameter groups are the user's own, before and after."""
        recipe = Recipe(builder=build_workload, arguments={"name": "gpt-tied"})

        assert self._run(checks.watch_identities, nproc, recipe) == [[]] * nproc

    @pytest.mark.parametrize("nproc", [1, 2])
    def test_a_released_model_is_a_plain_one(self, nproc: int) -> None:
        """``release`` gives back whole values, in a model that trains without us."""
        recipe = Recipe(builder=build_workload, arguments={"name": "gpt"})

        assert self._run(checks.keep_training_after_release, nproc, recipe) == [(True, True)] * nproc

    # --- faults
    # ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("nproc", [1, 2, 3])
    def test_a_non_finite_gradient_raises_on_every_rank(self, nproc: int) -> None:
        """One rank's NaN is named everywhere, nothing was updated, and training can go on."""
        recipe = Recipe(builder=build_workload, arguments={"name": "mlp"})

        found = self._run(checks.meet_non_finite, nproc, recipe, guilty=nproc - 1)

        for rank in found:
            assert "is not finite" in rank["raised"]
            assert "head.weight" in rank["raised"] or "hidden.weight" in rank["raised"]
            assert (rank["kept"], rank["finite"]) == (True, True)

    @pytest.mark.parametrize("nproc", [1, 2, 3])
    def test_a_non_finite_gradient_can_be_skipped(self, nproc: int) -> None:
        """With ``nonfinite="skip"`` the step changes nothing, is counted, and the next one is taken."""
        recipe = Recipe(builder=build_workload, arguments={"name": "mlp"})

        found = self._run(checks.meet_non_finite, nproc, recipe, guilty=nproc - 1, nonfinite="skip")

        assert found == [{"raised": "", "kept": True, "skipped": 1, "finite": True}] * nproc

    # --- internals
    # -------------------------------------------------------------------------------------------

    def _under_test(self) -> dict[str, Any]:
        """Return what makes a Booster with the piece, as keywords of `check_parity`."""
        return {
            "pieces": [self.make_piece()],
            "settings": dict(self.settings),
            "registry": type(self).registry,
        }

    def _check(self, recipe: Recipe, nproc: int) -> None:
        """Compare a run with one process."""
        check_parity(recipe, nproc=nproc, **self._under_test(), tolerance=FP64)

    def _run(
        self,
        check: Callable[..., Any],
        nproc: int,
        recipe: Recipe,
        *,
        guilty: int | None = None,
        **settings: object,
    ) -> list[Any]:
        """Run a check on ranks with the piece."""
        arguments = [recipe, [self.make_piece()], {**self.settings, **settings}, type(self).registry]
        return run_ranks(check, nproc, *arguments, *([] if guilty is None else [guilty]))


def _covered(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of half-open ranges, as disjoint ranges in order."""
    union: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], stop))
        else:
            union.append((start, stop))
    return union
