"""The loader that ``boost`` returns: the user's loader, its global batches divided among the data ranks.

The one idea: the user's loader says which global batches an epoch has, in which order; that is the same on
all ranks and for any number of them. Underneath, a plain DataLoader with the user's options reads this rank's
share of each. A rank whose share is empty reads one sample that does not count, so all ranks take the same
number of steps.

What a batch looks like, including everything that dataset and collate function draw at random, depends on the
seed, the epoch, the place in the order and the data rank, and on nothing else. A position is therefore enough
to go on exactly, also on another number of ranks or workers; what workers have read ahead does not count.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, final, get_args

import torch
from attrs import evolve, frozen
from torch.utils.data import DataLoader, IterableDataset, Sampler

from colossal_core.errors import RankMismatchError, UsageError
from colossal_core.plugins.agreement import explain_disagreement
from colossal_core.runtime.agreement import Agreement
from colossal_core.runtime.draws import mix_seed
from colossal_core.runtime.positions import Position, Progress
from colossal_core.runtime.shares import Record, Share, ShareBook
from colossal_core.runtime.sources import AbstractSource, MapSource, Opening, Place, StreamSource
from colossal_core.runtime.trees import move_to
from colossal_core.runtime.workers import Answer

__all__ = ["BatchMeaning", "BoostedLoader", "Prepared", "check_loader", "prepare_loaders"]

BatchMeaning = Literal["global", "per-rank"]
"""Whether ``batch_size``, or a list of a batch sampler, is the global batch or one rank's part of it."""

CHECK_VARIABLE = "COLOSSAL_CHECK"
"""Set to 1, orders that could differ between ranks are compared in every epoch, not only in the first."""


def check_loader(loader: DataLoader[Any], batch: BatchMeaning) -> None:
    """Refuse what cannot be divided without changing its meaning.

    Raises:
        UsageError: As said, with the reason.
    """
    if isinstance(loader, BoostedLoader):
        raise UsageError(
            "this loader has been boosted already", hint="pass your own loader, to one boost call"
        )
    kind = type(loader)
    for method in ("__iter__", "__len__", "_get_iterator"):
        if getattr(kind, method) is not getattr(DataLoader, method):
            raise UsageError(
                f"{kind.__name__} overrides DataLoader.{method}, which a boosted loader would lose",
                hint="boost a plain DataLoader and wrap what boost returns, or take this rank's share "
                "yourself: booster.data_rank and booster.data_degree say which",
            )
    if loader.num_workers and not loader.in_order:
        raise UsageError(
            "the loader has in_order=False, so ranks would take batches in different orders",
            hint="leave in_order at True",
        )
    makes_own = loader.batch_size is None and loader.batch_sampler is None and not _draws_lists(loader)
    if makes_own and batch == "per-rank":
        raise UsageError(
            "batch='per-rank' with a loader that has batch_size=None: each item is a whole batch, "
            "and nobody knows the rows of those that other ranks read",
            hint="leave batch at 'global': the rows of each item are divided among the ranks",
        )


@frozen(kw_only=True)
class Prepared:
    """A loader that can be boosted.

    Attributes:
        user: The user's.
        source: What will read this rank's shares.
        seed: Of its orders, the same on all ranks.
    """

    user: DataLoader[Any]
    source: AbstractSource
    seed: int


def prepare_loaders(
    loaders: Sequence[DataLoader[Any]], *, batch: BatchMeaning, place: Place, agreement: Agreement
) -> list[Prepared]:
    """Check the user's loaders and agree about them; collective over all ranks, nothing is read.

    Comes before generators are seeded by rank: the seed of an order is that of the loader's ``generator``, or
    else the one that ``launch`` or ``torch.manual_seed`` set, on rank 0.

    Args:
        loaders: The user's.
        batch: What their batches are.
        place: This rank's share.
        agreement: How ranks compare.

    Raises:
        UsageError: A loader cannot be divided.
        RankMismatchError: Ranks brought different loaders.
    """

    def read() -> list[AbstractSource]:
        """Check, on this rank."""
        if batch not in get_args(BatchMeaning):
            raise UsageError(f"batch is {batch!r}", hint="pass batch='global' or batch='per-rank'")
        return [_source_of(loader, batch, place) for loader in loaders]

    sources = agreement.attempt("loaders", read)
    lines = [f"loader {number}: {source.settings}" for number, source in enumerate(sources)]
    agreement.compare("the data loaders", [f"{len(lines)} loaders", *lines], explain_disagreement)
    mine = [
        torch.initial_seed() if loader.generator is None else loader.generator.initial_seed()
        for loader in loaders
    ]
    seeds = json.loads(agreement.share("seeds of loaders", json.dumps(mine))[0]) if loaders else []
    return [
        Prepared(user=user, source=source, seed=mix_seed("loader", number, seed))
        for number, (user, source, seed) in enumerate(zip(loaders, sources, seeds, strict=True))
    ]


def _source_of(loader: DataLoader[Any], batch: BatchMeaning, place: Place) -> AbstractSource:
    """Return what reads this rank's shares of a loader.

    Raises:
        UsageError: It cannot be divided.
    """
    check_loader(loader, batch)
    kind = StreamSource if isinstance(loader.dataset, IterableDataset) else MapSource
    return kind(loader, place, is_per_rank=batch == "per-rank")


@final
class BoostedLoader(DataLoader[Any]):
    """Gives this rank's share of each global batch, on its device; made by ``Booster.boost``.

    Each iteration is the next epoch, in an order of its own when the loader shuffles: no ``set_epoch`` is
    needed. ``len`` is the number of global batches, the same on every rank. ``dataset``, ``batch_size``,
    ``collate_fn`` and other attributes are the user's; ``sampler``, and a custom ``batch_sampler``, yield the
    order of all ranks together.

    Iterating over an IterableDataset, or with a sampler of the user's own, is collective over all ranks in
    the first epoch, since the order is compared; otherwise nothing is communicated.

    Attributes:
        last_share: What this rank holds of the batch that was given last; None before the first.
        number: Position among the boosted loaders of the Booster.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        device: torch.device,
        book: ShareBook,
        agreement: Agreement,
        number: int = 0,
    ) -> None:
        """Take over the user's loader; nothing is read.

        Args:
            prepared: From :func:`prepare_loaders`.
            device: Where batches go.
            book: Where the loader says what it gave.
            agreement: How ranks compare orders; of this loader alone.
            number: Position among the boosted loaders of the Booster.
        """
        self.number = number
        user, self._source = prepared.user, prepared.source
        self._progress = Progress(self._source.order, prepared.seed)
        order = _Order(self._source, self._progress)
        is_custom = user.batch_size is None and user.batch_sampler is not None
        options: dict[str, Any] = {"batch_sampler": order} if is_custom else {"batch_size": user.batch_size}
        if not is_custom:
            options["drop_last"] = user.drop_last
        if not is_custom and isinstance(self._source, MapSource):
            options["sampler"] = order
        super().__init__(
            user.dataset,
            num_workers=user.num_workers,
            collate_fn=user.collate_fn,
            pin_memory=user.pin_memory,
            timeout=user.timeout,
            worker_init_fn=user.worker_init_fn,
            multiprocessing_context=user.multiprocessing_context,
            generator=user.generator,
            prefetch_factor=user.prefetch_factor,
            persistent_workers=user.persistent_workers,
            pin_memory_device=user.pin_memory_device,
            **options,
        )
        self.last_share: Share | None = None
        self._device = device
        self._book = book
        self._agreement = agreement
        self._is_compared = False

    # --- use ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of global batches in an epoch, which is the number of steps on every rank.

        Raises:
            TypeError: An IterableDataset or a sampler has no length, as in torch.
        """
        return self._source.num_batches()

    def __iter__(self) -> Any:
        """Begin the next epoch, or go on at the position that was set.

        Raises:
            UsageError: The order is not the one that the position was stored with.
            RankMismatchError: Ranks have different orders.
        """
        start = self._progress.start()
        if start.is_over:
            self._progress.begin(start)
            return self._give(Opening(answers=iter(())))
        opening = self._source.open(start)
        self._check_head(start, opening)
        self._progress.begin(evolve(start, head=opening.head, workers=opening.workers))
        return self._give(opening)

    @property
    def epoch(self) -> int:
        """Epoch that is being given, or that comes next between two epochs; from 0."""
        return self._progress.at.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its start; does nothing when it is the next one anyway.

        Args:
            epoch: From 0.

        Raises:
            UsageError: It is negative.
        """
        self._progress.set_epoch(epoch)

    def position(self) -> dict[str, Any]:
        """Return what has been given so far, for :meth:`seek`, as JSON can hold it.

        ``samples`` are those of all ranks that were given in ``epoch``. In the body of a loop, also that of
        its last batch, ``epoch`` is the one that is being given: going on from there gives the rest, which
        may be no batch. When the loop has ended it is the next epoch, with ``samples`` at 0. What workers
        have read ahead does not count. After a loop that was left early it stays where the loop left;
        iterating again begins the next epoch.
        """
        return self._describe(self._progress.at)

    def resume_position(self) -> dict[str, Any]:
        """Return :meth:`position` for a checkpoint, in which a loop that has evaluated and ended is over.

        A loop in which no step is taken is not training: when it was left early, a resumed run must not go on
        in the middle of its samples, as the interrupted one would not have.
        """
        goes_on = self._book.may_go_on(self.number)
        return self._describe(self._progress.at if goes_on else self._progress.start())

    def seek(self, position: Mapping[str, Any]) -> None:
        """Let the next iteration go on where :meth:`position` was called, with the same order.

        The number of data ranks may be another one, and so may the number of workers, unless the dataset
        divides a stream among them.

        Raises:
            UsageError: It is no position, or one of another kind of loader or of a dataset of another length.
        """
        wanted = Position.from_dict(position)
        mine = Position.from_dict(self.position())
        if (wanted.order, wanted.length) != (mine.order, mine.length):
            raise UsageError(
                f"the position is one in {wanted.length} {wanted.order}, "
                f"this loader has {mine.length} {mine.order}",
                hint="restore the position into a loader over the same dataset, made in the same way",
            )
        self._progress.seek(wanted)

    # --- internals ------------------------------------------------------------------------------------------

    def _describe(self, at: Position) -> dict[str, Any]:
        """Return a position with what a later run compares, as JSON can hold it."""
        try:
            length = self._source.num_elements()
        except TypeError:
            length = None
        return evolve(at, length=length, batch_rows=self._source.batch_rows or 0).to_dict()

    def _give(self, opening: Opening) -> Iterator[Any]:
        """Yield the batches, and keep the books."""
        record = self._book.open(self.number)
        epoch = self._progress.at.epoch
        try:
            # A list, so that nothing here holds on to a batch while the user's loop works with it.
            while found := self._read(record, opening):
                batch = [move_to(found[0][1], self._device, non_blocking=self.pin_memory)]
                answer: Answer = found.pop()[0]
                share = Share(
                    rows=answer.rows,
                    global_rows=answer.global_rows,
                    is_last_of_epoch=answer.is_last is True,
                )
                self._progress.count(share, answer.units)
                self.last_share = share
                record.give(share)
                yield batch.pop()
        finally:
            record.close()
            if self._progress.at.is_over:  # the loop may have been left in the body of the last batch
                self._progress.end(epoch)
        self._progress.end(epoch)

    def _read(self, record: Record, opening: Opening) -> list[Any]:
        """Return a list of the next answer, or an empty one."""
        self._book.begin_batch(record)
        return list(itertools.islice(opening.answers, 1))

    def _check_head(self, start: Position, opening: Opening) -> None:
        """Compare an order with the one of a stored position, and with those of other ranks."""
        if opening.head is None:
            return
        if start.head is not None and (start.samples or start.batches) and start.head != opening.head:
            raise UsageError(
                f"epoch {start.epoch} now has another order than when the position was stored",
                hint="let the sampler or dataset draw from the global generators of torch, random or numpy, "
                "from a generator that is its attribute, or from what set_epoch(epoch) tells it",
            )
        if self._is_compared and os.environ.get(CHECK_VARIABLE) != "1":
            return
        self._is_compared = True
        digests = self._agreement.share(f"order of epoch {start.epoch}", opening.head[1])
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            what = "IterableDataset" if self._source.order.startswith("stream") else "sampler"
            raise RankMismatchError(
                f"the {what} of the loader gives ranks {different} other samples than rank 0 in epoch "
                f"{start.epoch}; a boosted loader divides what every rank reads alike",
                hint=f"do not divide by rank in the {what}, and seed it equally on all ranks; or keep the "
                "loader out of boost and let it give this rank's share",
            )


@final
class _Order(Sampler[Any]):
    """The ``sampler`` of a boosted loader: the order of all ranks together in the next epoch.

    It does not hold the loader: workers are only ended at once where no cycle keeps a loader that is left
    alone.
    """

    def __init__(self, source: AbstractSource, progress: Progress) -> None:
        self._source = source
        self._progress = progress

    def __iter__(self) -> Iterator[Any]:
        at = self._progress.at
        return iter(self._source.draw(at.seed, at.epoch) if isinstance(self._source, MapSource) else ())

    def __len__(self) -> int:
        return self._source.num_elements()

    def set_epoch(self, epoch: int) -> None:
        """Do what the loader's ``set_epoch`` does."""
        self._progress.set_epoch(epoch)


def _draws_lists(loader: DataLoader[Any]) -> bool:
    """Whether a loader without automatic batches has a sampler that yields lists of indices."""
    return isinstance(loader.sampler, torch.utils.data.BatchSampler)
