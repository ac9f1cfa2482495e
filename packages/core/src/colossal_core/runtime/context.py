"""What every piece is given: the mesh, the book, the wire and the plan, as one value instead of globals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from attrs import field, frozen

from colossal_core.runtime.batchnorm import RowWeights
from colossal_core.runtime.borders import Crossing

if TYPE_CHECKING:
    from torch import nn

    from colossal_core.plan import Plan
    from colossal_core.runtime.accumulation import LossWeights
    from colossal_core.runtime.agreement import Agreement
    from colossal_core.runtime.arrivals import Arrivals
    from colossal_core.runtime.collectives import Collectives
    from colossal_core.runtime.mesh import Mesh
    from colossal_core.runtime.precision import Precision
    from colossal_core.runtime.table import ParameterTable

__all__ = ["Context"]


@frozen(kw_only=True, eq=False)
class Context:
    """Handed to strategies, the memory manager and the executor; valid until ``booster.release``.

    Attributes:
        mesh: Ranks and groups.
        table: The parameter table.
        collectives: The only way to communicate, with its ledger.
        plan: The plan of this run.
        precision: Dtypes of the plan.
        agreement: How ranks tell each other what they decided, without a collective.
        arrivals: Weight and loss scale of gradients that backward delivers.
        weights: What losses of micro-batches weigh, for executors.
        row_weights: How much the rows of this rank's batch count in batch statistics; set by whoever hands
            out the batch.
        before_rerun: Called with a module whose forward is about to run again inside backward, without its
            hooks; for managers that have to bring its parameters back.
        crossing: Where outputs go that leave a model now, for borders.
        serial_views: What lets a model compute as the serial one does, for looks at shapes: with parameters
            of serial shapes, and without communication. Each takes the model.
        undo: What ``booster.release`` calls, last first, once parameters own their memory again.
    """

    mesh: Mesh
    table: ParameterTable
    collectives: Collectives
    plan: Plan
    precision: Precision
    agreement: Agreement
    arrivals: Arrivals
    weights: LossWeights
    row_weights: RowWeights = field(factory=RowWeights)
    before_rerun: list[Callable[[nn.Module], None]] = field(factory=list)
    crossing: Crossing = field(factory=Crossing)
    serial_views: list[Callable[[nn.Module], AbstractContextManager[None]]] = field(factory=list)
    undo: list[Callable[[], None]] = field(factory=list)
