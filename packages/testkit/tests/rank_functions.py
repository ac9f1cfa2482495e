"""Functions for ranks that live beside the tests, to check that siblings resolve in workers as in pytest."""

from __future__ import annotations

import torch.distributed as dist


def who_am_i() -> tuple[int, int]:
    """Return rank and world size."""
    return dist.get_rank(), dist.get_world_size()
