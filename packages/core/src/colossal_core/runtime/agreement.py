"""Agreement of ranks through the rendezvous store, before any collective can hang.

The one idea: each rank publishes what it believes, or the error that it met, under a numbered topic of the
store and reads what the others published. Only when all say the same does anybody communicate; otherwise
every rank raises, with the lines that differ. A rank that failed alone is named on all others.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from colossal_core.errors import CheckpointError, ColossalError, RankMismatchError

__all__ = ["Agreement"]

T = TypeVar("T")

Explain = Callable[[Mapping[int, Sequence[str]], Mapping[int, str]], str | None]
"""Renders the lines that differ, given lines and hosts by rank; None when nothing differs."""


class Agreement:
    """Exchanges small texts between all ranks through a store.

    Calls are numbered, and so are the agreements of one store, so all ranks make the same ones in the same
    order.
    """

    def __init__(
        self, store: Store | None, rank: int, world_size: int, *, timeout_seconds: float = 60.0
    ) -> None:
        """Use a store that all ranks reach.

        Args:
            store: The store of the process group; None in a world of one rank.
            rank: This rank.
            world_size: Number of ranks.
            timeout_seconds: How long to wait for the others.
        """
        self._store: Store | None = None
        if store is not None and world_size > 1:
            number = store.add(f"colossal.agreements.{rank}", 1)
            self._store = PrefixStore(f"colossal.agreement.{number}", store)
        self._rank = rank
        self._world_size = world_size
        self._timeout = timedelta(seconds=timeout_seconds)
        self._calls = 0
        self._exchanges = 0

    def share(self, topic: str, text: str) -> list[str]:
        """Publish a text and return those of all ranks, in rank order.

        Raises:
            RankMismatchError: Another rank did not come; names it.
        """
        self._calls += 1
        if self._store is None:
            return [text]
        keys = [f"{self._calls}.{topic}.{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], text)
        try:
            self._store.wait(keys, self._timeout)
        except dist.DistError as err:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RankMismatchError(
                f"ranks {missing} did not reach {topic!r} within {self._timeout.total_seconds():.0f} seconds",
                hint="look at their output; every rank must make the same calls in the same order, also "
                "those that write: save() and export() do not belong under `if booster.is_first`",
            ) from err
        return [self._store.get(key).decode() for key in keys]

    def attempt(self, topic: str, action: Callable[[], T]) -> T:
        """Run something that may fail on some ranks only; raise on every rank when it failed on any.

        The failing rank raises its own error, the others a :class:`RankMismatchError` that quotes it: a
        :class:`CheckpointError` where a checkpoint is the reason, so that a script which catches it and
        takes an older one does so on all ranks.
        """
        error: Exception | None = None
        result: list[T] = []
        try:
            result.append(action())
        except Exception as err:  # noqa: BLE001 - raised below, once the others know
            error = err
        notes = self.share(topic, "" if error is None else json.dumps(_describe(error)))
        if error is not None:
            raise error
        failed = [(rank, json.loads(note)) for rank, note in enumerate(notes) if note]
        if failed:
            rank, (message, hint, code) = failed[0]
            kind = CheckpointError if code == CheckpointError.default_code else RankMismatchError
            raise kind(f"rank {rank} could not go on: {message}", hint=hint)
        return result[0]

    def begin_exchange(self) -> None:
        """Begin a call in which a rank may fail alone; what was noted in earlier ones is over."""
        self._exchanges += 1

    def note_failure(self, error: ColossalError) -> None:
        """Leave the reason why this rank stops, for ranks that find its part of a message to be NaN."""
        if self._store is not None:
            key = f"failed.{self._exchanges}.{self._rank}"
            self._store.set(key, json.dumps([error.message, error.hint]))

    def raise_noted_failure(self) -> None:
        """Raise if another rank noted a failure in this exchange; otherwise do nothing.

        Raises:
            RankMismatchError: Quotes the failure of the lowest rank that noted one.
        """
        for rank in range(self._world_size if self._store is not None else 0):
            key = f"failed.{self._exchanges}.{rank}"
            if rank != self._rank and self._store is not None and self._store.check([key]):
                message, hint = json.loads(self._store.get(key).decode())
                raise RankMismatchError(f"rank {rank} could not go on: {message}", hint=hint)

    def compare(self, topic: str, lines: Sequence[str], explain: Explain) -> None:
        """Check that all ranks have the same lines.

        Raises:
            RankMismatchError: They do not; on every rank, with the differing lines by rank and host.
        """
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        if len(set(self.share(topic, digest))) == 1:
            return
        everything = [
            json.loads(text) for text in self.share(topic, json.dumps([socket.gethostname(), list(lines)]))
        ]
        hosts = {rank: host for rank, (host, _) in enumerate(everything)}
        text = explain({rank: theirs for rank, (_, theirs) in enumerate(everything)}, hosts)
        raise RankMismatchError(
            f"ranks disagree about {topic}:\n{text}",
            hint="start the same script with the same versions and settings on every rank",
        )


def _describe(error: Exception) -> tuple[str, str, str]:
    """Return what other ranks are told: message, hint and code."""
    if isinstance(error, ColossalError):
        return error.message, error.hint, error.code
    return f"{type(error).__name__}: {error}", "look at the output of that rank", ""
