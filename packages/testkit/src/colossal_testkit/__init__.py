"""Many-rank test harness and contract classes for Colossal plugins.

The pytest plugin comes with the installation; everything else is imported from its module, or lazily from
here (PEP 562) so that a test run without many-rank tests never imports torch.

- `colossal_testkit.ranks`: run a function on many ranks.
- `colossal_testkit.parity`: compare a boosted run with one plain process.
- `colossal_testkit.models`: reference models with awkward sizes.
- `colossal_testkit.traffic`, `colossal_testkit.memory`: words received and bytes held, exactly.
- `colossal_testkit.checkpoints`: hand-made checkpoints in any layout, without torch.
- `colossal_testkit.programs`: run a program in an interpreter of its own.
- `colossal_testkit.registry`: a registry with nothing in it but what a test puts there.
- `colossal_testkit.contracts`: what every strategy and memory manager must pass.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colossal_testkit.ranks import Outcome as Outcome
    from colossal_testkit.ranks import RankDiedError as RankDiedError
    from colossal_testkit.ranks import RankError as RankError
    from colossal_testkit.ranks import RankFailedError as RankFailedError
    from colossal_testkit.ranks import RanksDisagreeError as RanksDisagreeError
    from colossal_testkit.ranks import RankTimeoutError as RankTimeoutError
    from colossal_testkit.ranks import collect_ranks as collect_ranks
    from colossal_testkit.ranks import run_ranks as run_ranks
    from colossal_testkit.ranks import run_ranks_expecting_errors as run_ranks_expecting_errors

_HOMES = {
    "Outcome": "ranks",
    "RankDiedError": "ranks",
    "RankError": "ranks",
    "RankFailedError": "ranks",
    "RankTimeoutError": "ranks",
    "RanksDisagreeError": "ranks",
    "collect_ranks": "ranks",
    "run_ranks": "ranks",
    "run_ranks_expecting_errors": "ranks",
}

__all__ = [
    "Outcome",
    "RankDiedError",
    "RankError",
    "RankFailedError",
    "RankTimeoutError",
    "RanksDisagreeError",
    "collect_ranks",
    "run_ranks",
    "run_ranks_expecting_errors",
]


def __getattr__(name: str) -> object:
    """Import the home of a public name on first use, once for each."""
    home = _HOMES.get(name)
    if home is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
