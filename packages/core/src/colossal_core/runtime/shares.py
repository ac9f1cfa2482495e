"""Which part of a global batch this rank was given last, and what its loss therefore weighs.

The one idea: in the plain loop nobody tells us what a backward pass belongs to, but the boosted loaders know
what they gave last. Each iteration over one keeps a record here for as long as its loop runs; the record that
gave last is the one that counts, so a loop over an evaluation set inside a training loop gives way to the
training batch again when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, final

from attrs import define, field, frozen

from colossal_core.errors import UsageError

if TYPE_CHECKING:
    from colossal_core.runtime.accumulation import LossWeights
    from colossal_core.runtime.arrivals import Arrivals
    from colossal_core.runtime.batchnorm import RowWeights

__all__ = ["Record", "Share", "ShareBook"]


@frozen(kw_only=True)
class Share:
    """What one rank holds of one global batch.

    Attributes:
        rows: Samples of this rank; 0 when it was given a stand-in sample that does not count.
        global_rows: Samples of all data ranks together.
        is_last_of_epoch: Whether no batch follows in this iteration over the loader.
    """

    rows: int
    global_rows: int
    is_last_of_epoch: bool

    @property
    def is_empty(self) -> bool:
        """Whether the rank only has a stand-in sample, of weight 0."""
        return self.rows == 0


@final
@define(eq=False)
class Record:
    """What one iteration over one boosted loader gave so far.

    Attributes:
        rows: This rank's rows in each batch, in order; 0 for a stand-in sample.
        share: The last share, or None before the first.
        loader: Number of the loader among those of the Booster.
        samples: Samples of all ranks given since the last step.
    """

    _book: ShareBook
    loader: int = 0
    rows: list[int] = field(factory=list)
    share: Share | None = None
    samples: int = 0

    def give(self, share: Share) -> None:
        """Note that a batch was handed to the user's loop."""
        self.rows.append(share.rows)
        self.share = share
        self.samples += share.global_rows
        self._book.move_to_end(self)

    def close(self) -> None:
        """Note that the loop has ended; harmless when repeated."""
        self._book.remove(self)

    @property
    def is_running(self) -> bool:
        """Whether the loop goes on."""
        return self._book.is_running(self)

    @property
    def held_rows(self) -> Sequence[int]:
        """Rows that the user's tensors have for each batch: a stand-in sample is one."""
        return [max(rows, 1) for rows in self.rows]


@final
class ShareBook:
    """What the boosted loaders of one Booster gave; shared by loaders, optimizers and ``gather``.

    Attributes:
        degree: Number of shares in a global batch.
        samples: Samples of all ranks that training has used up: those of batches that were given last when a
            step was taken, and of micro-batches before them. A loop over an evaluation set counts nothing.
        training: Number of the loader that gave them last.
    """

    def __init__(
        self, degree: int, *, arrivals: Arrivals, row_weights: RowWeights, loss_weights: LossWeights
    ) -> None:
        """Start with nothing given.

        Args:
            degree: Data ranks.
            arrivals: Where gradient windows read :attr:`weight`; kept up to date here.
            row_weights: Where batch statistics read whether rows count; kept up to date here.
            loss_weights: Where optimizers that accumulate read what the batch counts; kept up to date here.
        """
        self.degree = degree
        self._arrivals = arrivals
        self._row_weights = row_weights
        self._loss_weights = loss_weights
        self._reference_rows: int | None = None
        self._running: list[Record] = []
        self._stepped: set[int] = set()
        self._latest: Record | None = None
        self._on_next: Callable[[int], None] = lambda _: None
        self.samples = 0
        self.training = 0

    def watch(self, on_next: Callable[[int], None]) -> None:
        """Let someone know, by its number, that a loader is about to read a batch.

        Args:
            on_next: Called where an iteration begins, on every rank.
        """
        self._on_next = on_next

    def begin_batch(self, record: Record) -> None:
        """Note that a loader is asked for a batch, which the epoch still has."""
        if record.share is None or not record.share.is_last_of_epoch:
            self._on_next(record.loader)

    def note_step(self) -> None:
        """Count what was given for the step that is taken now, skipped steps included."""
        if self._latest is not None and self._latest.samples:
            self.samples += self._latest.samples
            self.training = self._latest.loader
        self._stepped.update(record.loader for record in self._running)
        for record in self.records:
            record.samples = 0

    def may_go_on(self, loader: int) -> bool:
        """Whether a loop over a loader runs, or is one that trains: a step was taken in it.

        Args:
            loader: Its number.
        """
        return loader in self._stepped or any(record.loader == loader for record in self._running)

    def state(self) -> dict[str, int | None]:
        """Return what a checkpoint keeps."""
        return {
            "samples": self.samples,
            "training": self.training,
            "reference_rows": self._reference_rows,
        }

    def load_state(self, state: Mapping[str, int | None]) -> None:
        """Continue from :meth:`state`."""
        self.samples, self.training = state["samples"] or 0, state["training"] or 0
        self._reference_rows = state["reference_rows"]

    @property
    def current(self) -> Share | None:
        """The share that was given last in a loop that still runs; None when there is none."""
        return self._running[-1].share if self._running else None

    def count_rows(self) -> int:
        """Return this rank's rows of the current share.

        Raises:
            UsageError: There is none.
        """
        share = self.current
        if share is None:
            raise UsageError(
                "rows are counted in a loop over a boosted loader, and none runs",
                hint="use it inside the loop, and pass the loader to booster.boost()",
            )
        return share.rows

    @property
    def closes_windows(self) -> bool:
        """Whether a step taken now is the last of its loop, so that accumulation cannot go on."""
        return self.current is not None and self.current.is_last_of_epoch

    @property
    def weight(self) -> float:
        """What a gradient of this rank's loss counts: ``rows * degree / global_rows``.

        The sum over ranks divided by ``degree`` is then the gradient of the mean over the global batch. 1.0,
        exactly, for equal shares and without a boosted loader. In a plan that accumulates, micro-batches
        count by their rows as well, and ``global_rows`` is that of the first batch ever given.
        """
        share = self.current
        if share is None:
            return 1.0
        base = self._reference_rows or share.global_rows
        return 1.0 if share.rows * self.degree == base else share.rows * self.degree / base

    @property
    def records(self) -> list[Record]:
        """Iterations that values may come from: the one that gave last, even when over, then running ones."""
        running = list(reversed(self._running))
        return running if self._latest is None or self._latest in running else [self._latest, *running]

    def is_running(self, record: Record) -> bool:
        """Whether the loop of a record goes on."""
        return any(record is other for other in self._running)

    def open(self, loader: int) -> Record:
        """Return the record of an iteration that begins; it counts from its first batch on.

        Args:
            loader: Number of the loader among those of the Booster.
        """
        return Record(self, loader)

    def move_to_end(self, record: Record) -> None:
        """Let a record be the one that gave last."""
        self._running = [*(other for other in self._running if other is not record), record]
        self._latest = record
        self._announce()

    def remove(self, record: Record) -> None:
        """Take out a record whose loop has ended; it is remembered until another one gives."""
        self._running = [other for other in self._running if other is not record]
        self._announce()

    def _announce(self) -> None:
        """Tell those who need to know what holds now."""
        share = self.current
        if share is not None and self._loss_weights.is_active:
            self._reference_rows = self._reference_rows or share.global_rows
        rows = self._reference_rows if share is None else share.global_rows
        self._loss_weights.rows_ratio = rows / self._reference_rows if rows and self._reference_rows else 1.0
        self._arrivals.weight = self.weight
        self._row_weights.value = 0.0 if share is not None and share.is_empty else None
