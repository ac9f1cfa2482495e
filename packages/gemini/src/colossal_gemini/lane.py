"""Reducing gradients in little memory.

The one idea: the buffers of unreduced gradients are as large as the model, so only those of the units that
backward is in may have memory. The order in which buffers leave is fixed, and each may leave at any time: a
gradient that comes later starts another round. So whoever is short of memory sends what it has.

# Note [Waiting]
Where a message still uses a buffer that the next backward reaches, this lane waits for it, while the base
class takes more memory. A rank that waits inside backward has to be answered: the others answer when they
reach the same place or their ``step()``, unless they wait for this rank before.
"""

from __future__ import annotations

from typing import Any, final

from colossal_core.runtime.backward_end import is_in_inner_backward
from colossal_core.runtime.scattered import ScatteredLane

__all__ = ["FrugalLane"]

MAX_UNITS = 2
"""Units besides the root whose unreduced gradients may have memory: that of now and the one before."""


@final
class FrugalLane(ScatteredLane):
    """A lane whose buffers have memory only while backward is near."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As for the base class; every parameter is expected to get one gradient in the first backward."""
        super().__init__(*arguments, **options)
        for touch in self._all:
            touch.num_predicted = 1
        self.predict()

    def _is_over(self) -> bool:
        """Whether this backward has delivered all that it will; what was expected may never come."""
        return super()._is_over() or not is_in_inner_backward()

    def _make_room(self, index: int) -> None:
        """Have memory for the unreduced gradients of a buffer, and for not too many others."""
        while index in self._busy and self._on_their_way:
            self._collect_first()
        if not self.buffers[index].has_gradients and self._may_launch:
            self._send_old(index)
        super()._make_room(index)

    def _launch_next(self) -> None:
        """Send the next buffer; what has arrived leaves the device while backward goes on."""
        super()._launch_next()
        self._collect_done()

    def _send_old(self, index: int) -> None:
        """Send buffers of units that backward has left."""
        self._collect_buffers()
        unit = self.buffers[index].kind.unit
        held = [
            number
            for number, buffer in enumerate(self.buffers)
            if buffer.has_gradients and buffer.kind.unit not in {"", unit}
        ]
        units = list(dict.fromkeys(self.buffers[number].kind.unit for number in held))
        for old in units[: len(units) - MAX_UNITS + 1]:
            last = max(number for number in held if self.buffers[number].kind.unit == old)
            while self.next <= min(last, index - 1):
                self._launch_next()
                self._collect_buffers()

    def _collect_buffers(self) -> None:
        """Wait for all buffers that are on their way.

        Who has sent one has sent the closing message of the round before, so that has come as well.
        """
        while any(message.index is not None for message in self._on_their_way):
            self._collect_first()
