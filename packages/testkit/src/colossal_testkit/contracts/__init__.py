"""What a piece must pass, whoever wrote it: one class for each kind, to subclass in the piece's own tests.

::

    class TestMine(MemoryManagerContract):
        def make_piece(self) -> object:
            return Mine(stage=1)

        def words_per_step(self, num_elements: int, num_ranks: int) -> float:
            return all_reduce_words(num_elements, num_ranks)

        def live_bytes(self, num_elements: int, num_ranks: int) -> float:
            return 16 * num_elements

A subclass says what the piece is and what it costs. It cannot make a test easier: see
`colossal_testkit.contracts.protection`.
"""

from __future__ import annotations

from colossal_testkit.contracts.memory import MemoryManagerContract
from colossal_testkit.contracts.protection import Contract
from colossal_testkit.contracts.schedule import ScheduleContract
from colossal_testkit.contracts.strategy import StrategyContract

__all__ = ["Contract", "MemoryManagerContract", "ScheduleContract", "StrategyContract"]
