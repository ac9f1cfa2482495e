"""Words received per rank, by formula and by ledger.

Bytes on a socket depend on a backend's algorithm. Counted are instead the words that a rank receives when a
bandwidth-optimal algorithm moves the full tensor of ``S`` elements among ``n`` ranks:

===================================  =================
all-gather, reduce-scatter           ``(n-1)/n S``
all-to-all of a local buffer         ``(n-1)/n S``
all-reduce                           ``2(n-1)/n S``
broadcast, reduce, receive           ``S``
send                                 0
===================================  =================

The formulas are written here a second time, apart from the ledger's own, so that tests compare two things.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, final

import attrs

if TYPE_CHECKING:
    from colossal_core.runtime.ledger import Transfer

__all__ = [
    "PhaseTraffic",
    "Traffic",
    "TrafficError",
    "all_reduce_words",
    "check_words",
    "gather_words",
    "measure_traffic",
]


class TrafficError(AssertionError):
    """A step moved other words than the formula says. Lists the phases with their operations."""


def all_reduce_words(num_elements: float, num_ranks: int) -> float:
    """Return the words that one rank receives when that many elements are summed among ranks."""
    return 2 * (num_ranks - 1) / num_ranks * num_elements


def gather_words(num_elements: float, num_ranks: int) -> float:
    """Return the words of an all-gather, a reduce-scatter or an all-to-all of that many elements in full."""
    return (num_ranks - 1) / num_ranks * num_elements


@final
@attrs.frozen(kw_only=True)
class PhaseTraffic:
    """What was moved for one purpose.

    Attributes:
        words: Elements received per rank.
        message_bytes: Bytes of the full tensors of all operations, whatever the number of ranks.
        operations: Number of calls by kind.
    """

    words: float = 0.0
    message_bytes: int = 0
    operations: Mapping[str, int] = attrs.field(factory=dict)


@final
@attrs.frozen(kw_only=True)
class Traffic:
    """What one rank moved, by purpose (``"gradients"``, ``"parameters"``, ``"norm"``, ``"loss"``, ...)."""

    phases: Mapping[str, PhaseTraffic]

    def phase(self, name: str) -> PhaseTraffic:
        """Return one purpose, empty when nothing was moved for it."""
        return self.phases.get(name, PhaseTraffic())

    def words_except(self, *phases: str) -> float:
        """Return the words received for everything but these purposes."""
        return sum(phase.words for name, phase in self.phases.items() if name not in phases)

    def describe(self) -> str:
        """Return a line for each purpose."""
        return "\n".join(
            f"  {name}: {phase.words:.1f} words, {phase.message_bytes} bytes, "
            + ", ".join(f"{count} {op}" for op, count in sorted(phase.operations.items()))
            for name, phase in sorted(self.phases.items())
        )


def measure_traffic(transfers: Iterable[Transfer]) -> Traffic:
    """Sum entries of a ledger, such as ``booster.last_traffic`` or what ``ledger.recording()`` collected."""
    phases: dict[str, PhaseTraffic] = {}
    for transfer in transfers:
        phase = phases.get(transfer.phase, PhaseTraffic())
        operations = {**phase.operations, transfer.op: phase.operations.get(transfer.op, 0) + 1}
        phases[transfer.phase] = PhaseTraffic(
            words=phase.words + _received_words(transfer),
            message_bytes=phase.message_bytes + transfer.full_bytes,
            operations=operations,
        )
    return Traffic(phases=phases)


def check_words(
    traffic: Traffic,
    expected_words: float,
    *,
    excess: float = 0.001,
    without: Iterable[str] = ("norm", "loss"),
) -> None:
    """Compare the words received with a formula.

    Args:
        traffic: What was measured.
        expected_words: What the formula says.
        excess: How much more is allowed, as a fraction: flags and padding. Less than the formula never is.
        without: Purposes that the formula does not speak of.

    Raises:
        TrafficError: It was more, or less.
    """
    words = traffic.words_except(*without)
    if not expected_words * (1 - 1e-12) <= words <= expected_words * (1 + excess):
        limits = f"expected {expected_words:.1f} and at most {excess:.2%} more"
        raise TrafficError(f"received {words:.1f} words, {limits}\n{traffic.describe()}")


def _received_words(transfer: Transfer) -> float:
    """Return the words of one operation by the table above."""
    num_elements = transfer.full_bytes / transfer.item_bytes
    if transfer.op == "all_reduce":
        return all_reduce_words(num_elements, transfer.num_ranks)
    if transfer.op in ("all_gather", "reduce_scatter", "all_to_all"):
        return gather_words(num_elements, transfer.num_ranks)
    if transfer.op in ("broadcast", "reduce", "receive"):
        return num_elements
    if transfer.op == "send":
        return 0.0
    raise TrafficError(f"the ledger holds an operation without a formula: {transfer.op!r}")
