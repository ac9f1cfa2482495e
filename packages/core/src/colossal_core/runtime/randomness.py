"""Random state from boost on: different where samples differ, equal where ranks work on the same samples.

The one idea: every generator is seeded anew from (seed, data coordinate), so ranks that bring different
samples draw different dropout masks, ranks along tensor, sequence and pipeline axes draw the same, and a run
with the same seed on the same layout repeats itself. The seed is the one that rank 0 set last, by ``launch``
or by ``torch.manual_seed``, and all ranks take it, also if they had set another.

Where there is one data rank, generators go on from where they are: such a run, on one rank or on many, draws
what the plain script draws on one process. Ranks whose states differ then take over that of rank 0.

A permutation that all ranks have to draw alike belongs into a ``torch.Generator`` of its own.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from colossal_core.runtime.draws import mix_seed, seed_process

if TYPE_CHECKING:
    from colossal_core.mesh import MeshLayout
    from colossal_core.runtime.agreement import Agreement

__all__ = ["read_states", "reseed", "settle_randomness", "write_states"]


def reseed(seed: int, data_coordinate: int) -> None:
    """Seed torch with its accelerators, ``random``, and numpy where it was imported, for one data coordinate.

    Args:
        seed: Seed of the run, the same on all ranks.
        data_coordinate: Which share of the global batch this rank brings.
    """
    derived = mix_seed("data coordinate", seed, data_coordinate)
    torch.manual_seed(derived)
    seed_process(derived)


def settle_randomness(layout: MeshLayout, rank: int, agreement: Agreement) -> int:
    """Bring the generators of all ranks into the state that they train with; called on every rank by boost.

    Args:
        layout: Axes of the run.
        rank: This rank.
        agreement: How ranks compare.

    Returns:
        The seed of the run.
    """
    if layout.world_size == 1:
        return torch.initial_seed()
    seed = int(agreement.share("seed", str(torch.initial_seed()))[0])
    if layout.data_degree > 1:
        reseed(seed, layout.data_coordinate(rank))
        return seed
    mine = read_states()
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    if len(set(agreement.share("random states", digest))) > 1:
        write_states(json.loads(agreement.share("states of rank 0", json.dumps(mine))[0]))
    return seed


def read_states() -> dict[str, Any]:
    """Return the states of the generators that are in use here, as plain numbers and texts."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state().tolist()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = [kind, keys.tolist(), *rest]
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state().tolist()
    return found


def write_states(states: Mapping[str, Any]) -> None:
    """Set the generators that are in use here to the states of another rank or another time."""
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(tuple(states["numpy"]))
    if torch.cuda.is_initialized() and "cuda" in states:
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))
