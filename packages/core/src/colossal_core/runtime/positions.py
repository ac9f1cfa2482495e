"""Where a loader stands, as a value that a checkpoint can store as JSON.

# Note [The end of an epoch]
With its last batch an epoch is not over: after it a loop validates, steps a schedule, counts. A run that is
saved in the body of the last batch therefore resumes with what is left of that epoch, which is no batch, and
goes through the end of the epoch as the interrupted run would have. The next epoch comes when the loop has
ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, final, get_args

import attrs
from attrs import frozen

from colossal_core.errors import UsageError
from colossal_core.runtime.shares import Share

__all__ = ["OrderKind", "Position", "Progress"]

OrderKind = Literal["samples", "lists", "batches", "stream", "stream of batches"]
"""What an epoch consists of: indices of samples, lists of indices from a batch sampler, indices of whole
batches, samples of an IterableDataset, or whole batches of one."""


@frozen(kw_only=True)
class Position:
    """How much of which epoch was given.

    Attributes:
        order: What the epoch consists of.
        epoch: Epoch that is given, or comes next, from 0.
        samples: Samples of all ranks given in this epoch.
        batches: Elements given in this epoch where these are batches: of all ranks, when each brings its own.
        seed: Seed of the loader.
        length: Elements of the epoch; None when that is not known beforehand.
        head: Number of elements at the beginning of the epoch, and their digest, where only that tells
            whether the order is still the same.
        workers: For a stream that the dataset divides among workers: how many; else 0.
        batch_rows: Samples in a global batch; 0 when batches are made elsewhere.
        is_over: Whether all of the epoch was given; see Note [The end of an epoch].
    """

    order: OrderKind
    epoch: int = 0
    samples: int = 0
    batches: int = 0
    seed: int = 0
    length: int | None = None
    head: tuple[int, str] | None = None
    workers: int = 0
    batch_rows: int = 0
    is_over: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return it as numbers, texts, lists and None, by field."""
        found = attrs.asdict(self)
        return {**found, "head": None if self.head is None else list(self.head)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Position:
        """Read what :meth:`to_dict` returned.

        Raises:
            UsageError: Fields are missing, unknown or of a wrong kind.
        """
        known = attrs.fields_dict(cls)
        values = {"is_over": False, **values}  # earlier versions did not write it
        wrong = sorted(known.keys() ^ values.keys())
        counts = ("epoch", "samples", "batches", "seed", "workers", "batch_rows")
        wrong += [name for name in counts if name in values and not _is_count(values[name])]
        if "length" in values and not (values["length"] is None or _is_count(values["length"])):
            wrong.append("length")
        if "order" in values and values["order"] not in get_args(OrderKind):
            wrong.append("order")
        if not isinstance(values["is_over"], bool):
            wrong.append("is_over")
        head = values.get("head")
        if head is not None and not (
            isinstance(head, list | tuple) and len(head) == 2 and _is_count(head[0])
        ):
            wrong.append("head")
        if wrong:
            raise UsageError(
                f"no position of a loader: {', '.join(map(repr, wrong))} is missing, unknown or wrong",
                hint="pass what loader.position() returned",
            )
        return cls(**{**values, "head": None if head is None else (head[0], str(head[1]))})


@final
class Progress:
    """Which position a loader is at, and what the next iteration begins with.

    Attributes:
        at: Behind the batch that was given last.
    """

    def __init__(self, order: OrderKind, seed: int) -> None:
        """Start at the first epoch."""
        self.at = Position(order=order, seed=seed)
        self._is_begun = False

    def start(self) -> Position:
        """Return where an iteration that begins now starts: in the next epoch, when this one was begun."""
        return self._following() if self._is_begun else self.at

    def begin(self, start: Position) -> None:
        """Note that an iteration has begun."""
        self.at, self._is_begun = start, True

    def count(self, share: Share, units: int) -> None:
        """Move behind a batch.

        Args:
            share: What was given of it.
            units: Elements of the order that it used up.
        """
        at = self.at
        # Only where elements are batches do these have a count of their own; a stream may need both.
        units = {"samples": 0, "stream": 1}.get(at.order, units)
        self.at = attrs.evolve(
            at,
            samples=at.samples + share.global_rows,
            batches=at.batches + units,
            is_over=share.is_last_of_epoch,
        )

    def end(self, epoch: int) -> None:
        """Note that the loop over an epoch has ended, also when it had no batch."""
        if self._is_begun and self.at.epoch == epoch:
            self.at, self._is_begun = self._following(), False

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch; keeps a position in it that comes next anyway.

        Raises:
            UsageError: It is negative.
        """
        if epoch < 0:
            raise UsageError(f"epoch is {epoch}", hint="epochs count from 0")
        if self._is_begun or epoch != self.at.epoch:
            self.seek(Position(order=self.at.order, seed=self.at.seed, epoch=epoch))

    def seek(self, position: Position) -> None:
        """Let the next iteration start there."""
        self.at, self._is_begun = position, False

    def _following(self) -> Position:
        """Return the start of the epoch after this one."""
        return Position(order=self.at.order, seed=self.at.seed, epoch=self.at.epoch + 1)


def _is_count(value: object) -> bool:
    """Whether it is an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
