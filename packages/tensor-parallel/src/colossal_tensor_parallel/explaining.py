"""What would become of a model, printed before anything is cut."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from attrs import frozen

from colossal_core.plugins.registry import Registry
from colossal_tensor_parallel.decisions import Decision, ModelPlan
from colossal_tensor_parallel.examples import Example
from colossal_tensor_parallel.groups import list_layers
from colossal_tensor_parallel.planning import plan_model

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Explanation", "Row", "explain"]


@final
@frozen(kw_only=True)
class Row:
    """What becomes of one layer.

    Attributes:
        module: Its name.
        decision: ``"column"``, ``"row"``, ``"gathered-column"``, ``"vocabulary"`` or ``"whole"``; for modules
            that are cut in one piece ``"experts"`` or ``"attention"``.
        reason: Why.
        whole_bytes: Weight and bias of the serial layer, a tied weight counted at its first name.
        rank_bytes: Most that a rank holds of them.
    """

    module: str
    decision: str
    reason: str
    whole_bytes: int
    rank_bytes: int


@final
@frozen(kw_only=True)
class Explanation:
    """What becomes of a model; ``str`` makes a table.

    Attributes:
        degree: Number of ranks.
        rows: One for each layer, in order of registration.
        scaled: Integers that change on each rank, ``"blocks.0.num_heads: 4 -> 2"``.
        shared: Parameters that stay whole and whose gradients are summed over the ranks.
        whole_bytes: All parameters of the model.
        rank_bytes: Most that a rank holds of them.
        divided: Layers whose outputs stay divided along the tokens.
        gathered: Where divided activations are read whole, besides column layers and heads.
    """

    degree: int
    rows: tuple[Row, ...]
    scaled: tuple[str, ...]
    shared: tuple[str, ...]
    whole_bytes: int
    rank_bytes: int
    divided: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Print as a table, with what changes besides below it."""
        head = ("module", "decision", "bytes", "per rank", "reason")
        cells = [
            (row.module, row.decision, f"{row.whole_bytes:,}", f"{row.rank_bytes:,}", row.reason)
            for row in self.rows
        ]
        widths = [max(len(line[index]) for line in (head, *cells)) for index in range(4)]
        lines = [
            f"{line[0]:<{widths[0]}}  {line[1]:<{widths[1]}}  {line[2]:>{widths[2]}}  "
            f"{line[3]:>{widths[3]}}  {line[4]}"
            for line in (head, *cells)
        ]
        share = self.rank_bytes / max(self.whole_bytes, 1)
        lines.append(
            f"parameters: {self.whole_bytes:,} bytes, {self.rank_bytes:,} on each of {self.degree} ranks "
            f"({share:.1%})"
        )
        if self.scaled:
            lines.append(f"integers that change: {', '.join(self.scaled)}")
        if self.shared:
            lines.append(f"gradients that are summed over the ranks: {', '.join(self.shared)}")
        if self.divided:
            lines.append(f"outputs that stay divided along the tokens: {', '.join(self.divided)}")
        if self.gathered:
            lines.append(f"divided activations are read whole in: {', '.join(self.gathered)}")
        return "\n".join(lines)


def explain(
    model: nn.Module,
    degree: int,
    *,
    plan: Mapping[str, str] | None = None,
    batch: Any = None,
    sequence: bool = False,
    registry: Registry | None = None,
) -> Explanation:
    """Print what ``TensorParallel(degree)`` would do to a model, and return it; nothing is changed.

    Args:
        model: The serial model.
        degree: Number of ranks.
        plan: Patterns as for :class:`~colossal_tensor_parallel.TensorParallel`.
        batch: What the model's forward takes: a tensor, a tuple of arguments, or a mapping of keyword
            arguments. Guessed when None.
        sequence: As for :class:`~colossal_tensor_parallel.TensorParallel`.
        registry: Where sharding policies come from; by default every installed plugin that is enabled here.

    Returns:
        The rows that were printed.

    Raises:
        UsageError: A pattern matches nothing, or heads do not divide.
        CapabilityError: Nothing can be cut, or nothing divided along the sequence.
    """
    policies = (registry or Registry.discover()).records("sharding_policy")
    made = plan_model(model, degree, plan, _example_of(batch), sequence=sequence, policies=policies)
    found = describe(model, made, degree)
    sys.stdout.write(f"{found}\n")
    return found


def _example_of(batch: Any) -> Example | None:
    """Return arguments of a forward from what a user gives."""
    if batch is None:
        return None
    if isinstance(batch, Mapping):
        return Example(kwargs=batch)
    return Example(args=tuple(batch) if isinstance(batch, (tuple, list)) else (batch,))


def describe(model: nn.Module, made: ModelPlan, degree: int) -> Explanation:
    """Return the explanation of a plan.

    Args:
        model: The serial model.
        made: Its plan.
        degree: Number of ranks.
    """
    layers = list_layers(model)
    seen: set[nn.Parameter] = set()
    rows, saved = [], 0
    for decision in made.decisions:
        whole, mine = 0, 0
        for kind, parameter in layers[decision.name].module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            size = parameter.numel() * parameter.element_size()
            whole += size
            mine += _rank_bytes(decision, kind, size, degree)
        saved += whole - mine
        rows.append(
            Row(
                module=decision.name,
                decision=decision.cut,
                reason=decision.reason,
                whole_bytes=whole,
                rank_bytes=mine,
            )
        )
    for cut in made.units:
        whole, mine = 0, 0
        for kind, (_, split) in cut.splits.items():
            parameter = model.get_submodule(cut.name).get_parameter(kind)
            size = parameter.numel() * parameter.element_size()
            whole += size
            mine += max(split.local_size(rank, degree) for rank in range(degree)) * size // split.size
        saved += whole - mine
        rows.append(
            Row(
                module=cut.name,
                decision=cut.kind,
                reason=cut.reason,
                whole_bytes=whole,
                rank_bytes=mine,
            )
        )
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    scaled = tuple(
        f"{change.module}.{change.name}: {vars(model.get_submodule(change.module))[change.name]} -> "
        + "/".join(map(str, dict.fromkeys(change.values)))
        for change in made.attributes
    )
    return Explanation(
        degree=degree,
        rows=tuple(rows),
        scaled=scaled,
        shared=made.shared,
        whole_bytes=total,
        rank_bytes=total - saved,
        divided=() if made.regions is None else made.regions.divided,
        gathered=() if made.regions is None else made.regions.gathered,
    )


def _rank_bytes(decision: Decision, kind: str, size: int, degree: int) -> int:
    """Return the most bytes that a rank holds of a parameter."""
    split = decision.split
    if split is None or (kind == "bias" and decision.cut == "row"):
        return size
    return max(split.local_size(rank, degree) for rank in range(degree)) * size // split.size
