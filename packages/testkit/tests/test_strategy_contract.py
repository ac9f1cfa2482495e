"""The contract of strategies passes a sound strategy and finds each fault of a broken one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from colossal_testkit.contracts import StrategyContract
from colossal_testkit.parity import ParityError

from .columns import Columns, make_registry


class TestColumns(StrategyContract):
    """A strategy with padding, groups and collectives of its own passes."""

    registry = staticmethod(make_registry)
    refusals: ClassVar[Mapping[str, str]] = {"lstm": "columns cannot cut recurrent layers"}

    def make_piece(self) -> object:
        """Divide layers between two ranks."""
        return Columns(degree=2)


def _contract_of(fault: str) -> TestColumns:
    """Return the contract of the strategy with a fault."""
    contract = TestColumns()
    vars(contract)["make_piece"] = lambda: Columns(degree=2, fault=fault)
    return contract


def test_a_proposal_that_touches_the_model_is_found() -> None:
    """One bit is enough."""
    with pytest.raises(AssertionError, match="changed tensor"):
        _contract_of("impure").test_proposing_is_pure("mlp", 2)


def test_modules_of_another_class_are_found() -> None:
    """Code that asks for ``isinstance(layer, nn.Linear)`` must go on working."""
    with pytest.raises(AssertionError, match="class of module head"):
        _contract_of("foreign").test_objects_keep_their_identity("mlp", 2)


def test_a_gap_in_the_table_is_found() -> None:
    """A parameter that is in no part would be in no norm and in no checkpoint."""
    with pytest.raises(AssertionError, match=r"elements of frozen\.weight"):
        _contract_of("gap").test_the_table_covers_every_element_once("mlp", 2)


def test_a_cut_that_is_not_written_down_is_found() -> None:
    """The table says whole, the tensor is not."""
    with pytest.raises(AssertionError):
        _contract_of("silent").test_local_tensors_hold_what_the_table_says("mlp", 2)


def test_a_lost_gradient_is_found() -> None:
    """What the other ranks' features ask of the input is part of the gradient; copies drift apart."""
    with pytest.raises(ParityError, match=r"rank 1 holds other bits of 'norm\.weight'"):
        _contract_of("no sum").test_plain_loop_equals_one_process("mlp", 2)


def test_a_refusal_that_does_not_come_is_found() -> None:
    """A model that is said to be refused must be."""
    contract = TestColumns()
    vars(contract)["refusals"] = {"mlp": "columns cannot cut perceptrons"}

    with pytest.raises(AssertionError):
        contract.test_refused_models_are_refused_on_every_rank()
