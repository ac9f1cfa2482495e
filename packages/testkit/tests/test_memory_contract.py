"""The contract of memory managers passes what is sound and finds each fault of what is broken."""

from __future__ import annotations

import pytest

from colossal_core.pieces import Replicated
from colossal_testkit.contracts import MemoryManagerContract
from colossal_testkit.parity import ParityError
from colossal_testkit.traffic import all_reduce_words

from .broken_managers import Broken, make_registry


class TestReplicated(MemoryManagerContract):
    """Core's own manager passes, and costs what DDP costs."""

    def make_piece(self) -> object:
        """Everything on every rank."""
        return Replicated()

    def words_per_step(self, num_elements: int, num_ranks: int) -> float:
        """One all-reduce of the gradients."""
        return all_reduce_words(num_elements, num_ranks)

    def live_bytes(self, num_elements: int, num_ranks: int) -> float:
        """Values, gradients and two moments of four bytes each."""
        return 16 * num_elements


class _Faulty(TestReplicated):
    """The same declarations about a manager with one fault; not collected by its name."""

    registry = staticmethod(make_registry)
    fault = ""

    def make_piece(self) -> object:
        """The manager with the fault."""
        return Broken(fault=self.fault)


def _contract_of(fault: str) -> _Faulty:
    """Return the contract of a manager with a fault."""
    contract = _Faulty()
    contract.fault = fault
    return contract


def test_the_same_manager_without_a_fault_passes() -> None:
    """What the other tests see is due to the faults."""
    contract = _contract_of("")

    contract.test_plain_loop_equals_one_process("mlp", 2)
    contract.test_traffic_equals_the_formula(2)
    contract.test_places_cover_every_element(2)


def test_a_wrong_update_is_found() -> None:
    """A millionth in the update shows in the weights, unless the optimizer is blind to scale as Adam is."""
    with pytest.raises(ParityError, match=r"weight 'tokens\.weight'"):
        _contract_of("scale").test_norm_is_exact_without_clipping(2)
    with pytest.raises(ParityError, match=r"weight 'head\.weight'"):
        _contract_of("scale").test_clipping_by_hand_is_exact(2)


def test_a_wrong_norm_is_found() -> None:
    """A billionth in the norm shows, before it shows anywhere else."""
    with pytest.raises(ParityError, match="gradient norm of step 0"):
        _contract_of("norm").test_norm_is_exact_without_clipping(2)


def test_bits_that_differ_are_found() -> None:
    """Two ranks allow no rounding."""
    with pytest.raises(AssertionError):
        _contract_of("scale").test_two_ranks_equal_replicated_bit_for_bit("float64")


def test_memory_that_nobody_declared_is_found() -> None:
    """A buffer of a quarter of a megabyte is more than a hundredth."""
    contract = _contract_of("heavy")

    with pytest.raises(AssertionError):
        contract.test_live_bytes_equal_the_formula(1)
    with pytest.raises(AssertionError):
        contract.test_the_estimate_is_what_is_held(1)


def test_a_message_past_the_ledger_is_found() -> None:
    """Torch's own record is longer than the ledger."""
    with pytest.raises(AssertionError):
        _contract_of("chatty").test_everything_communicated_is_in_the_ledger()


def test_a_non_finite_gradient_that_passes_is_found() -> None:
    """No error, or weights that are no numbers, fail the contract."""
    with pytest.raises(AssertionError):
        _contract_of("silent").test_a_non_finite_gradient_raises_on_every_rank(2)


def test_places_that_are_missing_are_found() -> None:
    """Norm, checkpoint and report read the places; a gap is named."""
    with pytest.raises(AssertionError, match="gradient of"):
        _contract_of("places").test_places_cover_every_element(2)


def test_an_update_without_a_gradient_is_found() -> None:
    """Weight decay on an unused parameter is not what torch does."""
    with pytest.raises(AssertionError, match="unused"):
        _contract_of("decay").test_frozen_and_unused_parameters_keep_every_bit(2)
