"""Guesses about groups of layers, and what holds when one is right, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, final

from attrs import evolve, frozen

from colossal_tensor_parallel.spans import Split

__all__ = ["Attribute", "Candidate", "Proof", "UnitCut"]


@final
@frozen
class Attribute:
    """An integer that a module keeps, and what it is on each rank.

    Attributes:
        module: Name of the module in the model.
        name: Name of the attribute.
        values: One for each rank.
    """

    module: str
    name: str
    values: tuple[int, ...]


@final
@frozen(kw_only=True)
class Candidate:
    """A guess about a group.

    Attributes:
        columns: Split of the output features of each column layer, by name.
        row: Split of the input features of the row layer.
        attributes: Integers that change.
    """

    columns: Mapping[str, Split]
    row: Split
    attributes: tuple[Attribute, ...] = ()


@final
@frozen(kw_only=True)
class Proof:
    """What holds for a group.

    Attributes:
        candidate: The guess that was right.
        shared: Parameters whose gradients are shares on each rank, by name in the model.
        drops: Whether values between the layers are dropped in training, and all of them are cut.
    """

    candidate: Candidate
    shared: tuple[str, ...]
    drops: bool = False

    def renamed(self, rename: Callable[[str], str]) -> Proof:
        """Return the proof with other names of modules and parameters."""
        candidate = evolve(
            self.candidate,
            columns={rename(name): split for name, split in self.candidate.columns.items()},
            attributes=tuple(evolve(a, module=rename(a.module)) for a in self.candidate.attributes),
        )
        return Proof(candidate=candidate, shared=tuple(map(rename, self.shared)), drops=self.drops)


@final
@frozen(kw_only=True)
class UnitCut:
    """How a module that uses weights of its own, or of its children without calling them, is cut.

    Attributes:
        name: Of the module in the model.
        kind: What it is: stacked experts, or attention as torch has it.
        splits: For each of its parameters that is cut, the dim and what of it ranks have.
        attributes: Integers of the module that change.
        reason: Why, for people.
    """

    name: str
    kind: Literal["experts", "attention"]
    splits: Mapping[str, tuple[int, Split]]
    attributes: tuple[Attribute, ...] = ()
    reason: str
