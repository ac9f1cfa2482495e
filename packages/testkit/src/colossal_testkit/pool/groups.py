"""Process groups of a job: what was issued in each, and how they are taken down.

torch's flight recorder, which its gloo backend feeds, remembers the latest collectives of each group. It
counts collectives and point-to-point calls apart, so two ranks of a group that issued different numbers of
collectives are found out exactly, without a collective that could hang. This is the one place that uses names
torch does not document; where a version lacks them, the record says so (``num_collectives`` is None) and the
check is left out.
"""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from colossal_testkit.pool.messages import GroupRecord
from colossal_testkit.pool.processes import NUM_RECORDS

__all__ = ["describe_latest", "list_groups", "take_down"]

_NUM_LATEST = 5


def list_groups(since_ns: int) -> tuple[GroupRecord, ...]:
    """Return a record of each group that this rank belongs to.

    Args:
        since_ns: ``time.time_ns()`` at the start of the job; older entries belong to earlier groups of the
            same names.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ()
    entries = _read_recorder(since_ns)
    return tuple(_describe_group(group, entries) for group in _known_groups())


def describe_latest(since_ns: int) -> list[str]:
    """Return one line for each of the latest collectives since a moment, with the unfinished ones marked."""
    lines = []
    for entry in (_read_recorder(since_ns) or [])[-_NUM_LATEST:]:
        state = "finished" if entry["retired"] else "NOT FINISHED"
        lines.append(f"group {entry['process_group'][0]}: {_describe_entry(entry)}: {state}")
    return lines


def take_down() -> list[object]:
    """Destroy all groups and return what must still be dropped, which may take tens of milliseconds."""
    if not dist.is_initialized():
        return []
    remains: list[object] = list(_known_groups())
    dist.destroy_process_group()
    return remains


def _known_groups() -> list[dist.ProcessGroup]:
    """Return the groups that this rank belongs to, in order of creation."""
    return list(distributed_c10d._world.pg_map)  # noqa: SLF001 - no public list of groups


def _describe_group(group: dist.ProcessGroup, entries: list[dict[str, Any]] | None) -> GroupRecord:
    """Return the record of one group."""
    own = [entry for entry in entries or () if entry["process_group"][0] == group.group_name]
    numbers = [int(entry["collective_seq_id"]) for entry in own if not entry["is_p2p"]]
    # A full recorder has forgotten some entries of this job, perhaps all those of this group.
    is_complete = entries is not None and len(entries) < NUM_RECORDS
    count = numbers[-1] if numbers else (0 if is_complete else None)
    return GroupRecord(
        name=group.group_name,
        ranks=tuple(dist.get_process_group_ranks(group)),
        num_collectives=count,
        latest=tuple(_describe_entry(entry) for entry in own[-_NUM_LATEST:]),
    )


def _describe_entry(entry: dict[str, Any]) -> str:
    """Return an entry of the recorder as text, such as ``#3 all_reduce Float[2, 3]``."""
    operation = str(entry["profiling_name"]).removeprefix("gloo:")
    shapes = " ".join(
        f"{dtype}{size}" for dtype, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    )
    return f"#{entry['collective_seq_id']} {operation} {shapes}".rstrip()


def _read_recorder(since_ns: int) -> list[dict[str, Any]] | None:
    """Return the flight recorder's entries since a moment, oldest first; None without a recorder."""
    dump = vars(_distributed_c10d).get("_dump_fr_trace_json")
    if dump is None:
        return None
    entries: list[dict[str, Any]] = json.loads(dump()).get("entries", [])
    return [entry for entry in entries if entry["time_created_ns"] >= since_ns]
