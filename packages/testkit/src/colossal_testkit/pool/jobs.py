"""Jobs of a function, one for each rank, with the surroundings of the parent."""

from __future__ import annotations

import os
import pickle
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from colossal_core.errors import UsageError
from colossal_testkit.pool.messages import Job, WarningFilter
from colossal_testkit.pool.processes import WORKER_VARIABLES
from colossal_testkit.pool.references import FunctionReference, ModuleReference, refer_to_modules
from colossal_testkit.pool.values import dumps

__all__ = ["Arguments", "make_jobs", "pack_arguments"]

Arguments: TypeAlias = tuple[bytes, tuple[ModuleReference, ...]]
"""Pickled arguments, and the modules that must be loaded before they are unpickled."""

_SEED = 1024


def pack_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> Arguments:
    """Pickle the arguments of a job; return them with the modules of their functions and classes.

    Raises:
        UsageError: One of them cannot be pickled.
    """
    modules: set[str] = set()
    try:
        return dumps((tuple(args), dict(kwargs)), modules), refer_to_modules(modules)
    except pickle.PicklingError as err:
        raise UsageError(
            f"an argument of run_ranks cannot travel to the ranks: {err}.",
            hint="Pass plain values, tensors and objects of importable classes; make the rest there.",
        ) from err


def make_jobs(
    reference: FunctionReference,
    arguments: Arguments,
    *,
    number: int,
    num_ranks: int,
    store_port: int,
    timeout_seconds: float,
    makes_group: bool,
) -> list[Job]:
    """Return the job of each rank, in rank order.

    Args:
        reference: The function.
        arguments: What `pack_arguments` made of its arguments.
        number: Count of jobs of the pool.
        num_ranks: World size.
        store_port: Port of the crew's rendezvous store.
        timeout_seconds: When the parent gives up.
        makes_group: Whether the default group is made before the function starts.
    """
    payload, modules = arguments
    filters = _describe_filters()
    return [
        Job(
            number=number,
            rank=rank,
            num_ranks=num_ranks,
            reference=reference,
            payload=payload,
            modules=modules,
            environment={
                **os.environ,
                **WORKER_VARIABLES,
                **_rank_variables(rank, num_ranks, store_port),
            },
            directory=str(Path.cwd()),
            import_path=tuple(sys.path),
            filters=filters,
            store_port=store_port,
            timeout_seconds=timeout_seconds,
            makes_group=makes_group,
            seed=_SEED,
        )
        for rank in range(num_ranks)
    ]


def _rank_variables(rank: int, num_ranks: int, store_port: int) -> dict[str, str]:
    """Return what torchrun would put into the environment of a rank."""
    return {
        "GROUP_RANK": "0",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store_port),
        "RANK": str(rank),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "testkit",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(num_ranks),
    }


def _describe_filters() -> tuple[WarningFilter, ...]:
    """Return the warning filters that hold here, strongest first."""
    return tuple(
        WarningFilter(
            action=action,
            message=_pattern_of(message),
            category_module=kind.__module__,
            category_name=kind.__qualname__,
            module=_pattern_of(module),
            line=line,
        )
        for action, message, category, module, line in warnings.filters
        for kind in (category if isinstance(category, tuple) else (category,))
    )


def _pattern_of(part: object) -> str:
    """Return the expression of one part of a filter: compiled, a literal of the interpreter, or None."""
    if part is None:
        return ""
    if isinstance(part, re.Pattern):
        return str(part.pattern)
    return re.escape(str(part)) + r"\Z"
