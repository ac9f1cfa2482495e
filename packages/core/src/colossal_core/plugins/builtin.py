"""What core itself offers, in one visible list, through the same hooks as every plugin.

Light by rule: nothing here, and nothing that it imports, reaches torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from colossal_core.plugins.hookspec import hookimpl
from colossal_core.plugins.records import DiagnosticSpec, MemoryManagerSpec, StrategySpec
from colossal_core.plugins.target import Target

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "RECOMPUTE",
    "REPLICATED",
    "colossal_register_diagnostics",
    "colossal_register_memory_managers",
    "colossal_register_strategies",
]

REPLICATED = MemoryManagerSpec(
    name="replicated",
    summary="Keep everything whole on every rank, and average gradients over the data ranks.",
    options=Target("colossal_core.pieces:Replicated"),
    target=Target("colossal_core.runtime.replicated:ReplicatedManager"),
)
"""The manager of a plan that names none."""

RECOMPUTE = StrategySpec(
    name="recompute",
    summary="Keep only the inputs of blocks, and run them again when backward needs the rest.",
    options=Target("colossal_core.pieces:Recompute"),
    target=Target("colossal_core.runtime.recompute:RecomputeStrategy"),
    phase="recompute",
)
"""Recomputation by blocks."""


@hookimpl
def colossal_register_memory_managers() -> Iterable[MemoryManagerSpec]:
    """Offer the memory managers of core."""
    yield REPLICATED


@hookimpl
def colossal_register_strategies() -> Iterable[StrategySpec]:
    """Offer the strategies of core."""
    yield RECOMPUTE


@hookimpl
def colossal_register_diagnostics() -> Iterable[DiagnosticSpec]:
    """Offer the checks of core for ``colossal doctor``."""
    checks = {
        "torch": ("The version of torch, and how it was built.", "install torch 2.11 or later"),
        "devices": ("Accelerators and cores.", "install a build of torch for this accelerator"),
        "backends": ("What carries collectives.", "install a build of torch with gloo, and nccl for CUDA"),
        "compilers": ("What builds CPU kernels.", "install a C++ compiler, or set CXX to one"),
        "network": ("Loopback, interfaces and shared folders.", "ask whoever runs this machine"),
        "environment": ("Variables that a launcher left.", "unset them, or start with `colossal run`"),
    }
    for code, (title, fix) in checks.items():
        check = Target(f"colossal_core.runtime.diagnostics:check_{code}")
        yield DiagnosticSpec(code=code, title=title, check=check, fix=fix)
