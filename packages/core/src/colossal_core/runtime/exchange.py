"""Optimizer states in full shapes, gathered from the ranks that own pieces of them.

The one idea: each rank describes the pieces that it owns in one line of JSON and appends their bytes; one
gather of sizes and one of bytes later every rank puts the pieces together. Nothing needs to know in advance
which states an optimizer keeps, and of which shapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from colossal_core.errors import CapabilityError
from colossal_core.mesh import GroupSpec
from colossal_core.states import is_like

if TYPE_CHECKING:
    from colossal_core.runtime.collectives import Collectives
    from colossal_core.runtime.context import Context
    from colossal_core.runtime.mesh import Group
    from colossal_core.runtime.segments import SegmentedOptimizer

__all__ = ["exchange_states"]

PHASE = "inspection"

States = dict[torch.Tensor, dict[str, Any]]


def exchange_states(driver: SegmentedOptimizer, context: Context) -> States:
    """Return the state of every parameter in full shape, as fresh tensors; collective.

    Args:
        driver: Holds the pieces of this rank.
        context: Mesh, table and collectives.

    Raises:
        CapabilityError: A state is neither a tensor nor a plain value.
    """
    found = driver.state_of_parameters()
    specs: dict[GroupSpec, list[torch.Tensor]] = {}
    for owned in driver.owned:
        if owned.divided.axes:
            specs.setdefault(owned.divided, []).extend(slot.parameter for slot in owned.buffer.slots)
    for spec, parameters in specs.items():
        group = context.mesh.group(spec)
        order = {parameter: number for number, parameter in enumerate(parameters)}
        pieces = [piece for piece in _pieces(driver, spec) if piece[0] in order]
        lines = [_describe(order[parameter], name, value, start) for parameter, name, value, start in pieces]
        content = [value for _, _, value, _ in pieces if isinstance(value, torch.Tensor)]
        for line, values in _exchange(lines, content, group, context.collectives):
            _put(found, parameters, line, values)
    return found


def _pieces(
    driver: SegmentedOptimizer, spec: GroupSpec
) -> Iterator[tuple[torch.Tensor, str, Any, int | None]]:
    """Yield (parameter, state, value, first element) that this rank owns; None instead of one for a whole."""
    for segment in driver.segments:
        if segment.owned.divided != spec:
            continue
        for name, value in driver.inner.state.get(segment.leaf, {}).items():
            for slot in segment.slots:
                if not is_like(name, value, segment.leaf):
                    yield slot.parameter, name, value, None
                    continue
                first, last = slot.within(segment.start, segment.stop)
                flat = value.reshape(-1)[first - segment.start : last - segment.start]
                yield slot.parameter, name, flat, first - slot.start


def _describe(number: int, name: str, value: Any, start: int | None) -> dict[str, Any]:
    """Describe one piece in terms of JSON.

    Raises:
        CapabilityError: It cannot be sent.
    """
    line: dict[str, Any] = {"parameter": number, "name": name, "start": start}
    if isinstance(value, torch.Tensor):
        shape = list(value.shape)
        return line | {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": shape,
            "device": value.device.type,
        }
    if not isinstance(value, bool | int | float | str | None):
        raise CapabilityError(
            f"the optimizer keeps {name!r} as a {type(value).__name__}, which cannot be gathered from ranks",
            hint="keep states as tensors or numbers",
        )
    return line | {"value": value}


def _exchange(
    lines: list[dict[str, Any]], content: list[torch.Tensor], group: Group, collectives: Collectives
) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yield the description and the bytes of every piece of every member, in group order."""
    text = torch.frombuffer(bytearray(json.dumps(lines).encode()), dtype=torch.uint8).to(group.device)
    pieces = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in content]
    mine = torch.cat([text, *(piece.to(group.device) for piece in pieces)])
    sizes = torch.empty(2 * group.size, dtype=torch.int64, device=group.device)
    own_sizes = torch.tensor([text.numel(), mine.numel()], device=group.device)
    collectives.all_gather(sizes, own_sizes, group, phase=PHASE).wait()
    table = sizes.view(-1, 2).tolist()
    largest = max(total for _, total in table)
    padded = torch.zeros(largest, dtype=torch.uint8, device=group.device)
    padded[: mine.numel()].copy_(mine)
    everything = padded.new_empty(group.size * largest)
    collectives.all_gather(everything, padded, group, phase=PHASE).wait()
    for member, (text_bytes, _) in zip(everything.view(group.size, -1), table, strict=True):
        position = text_bytes
        for line in json.loads(bytes(member[:text_bytes].tolist())):
            num_bytes = _bytes_of(line)
            yield line, member[position : position + num_bytes]
            position += num_bytes


def _bytes_of(line: Mapping[str, Any]) -> int:
    """Return the bytes that belong to a description."""
    if "dtype" not in line:
        return 0
    dtype: torch.dtype = getattr(torch, line["dtype"])
    return torch.Size(line["shape"]).numel() * dtype.itemsize


def _put(found: States, parameters: list[torch.Tensor], line: Mapping[str, Any], raw: torch.Tensor) -> None:
    """Put one piece where it belongs."""
    parameter = parameters[line["parameter"]]
    target = found.setdefault(parameter, {})
    name, start = line["name"], line["start"]
    if "dtype" not in line:
        target[name] = line["value"]
        return
    value = raw.clone().view(getattr(torch, line["dtype"])).view(line["shape"]).to(line["device"])
    if start is None:
        target[name] = value
        return
    if name not in target:
        target[name] = torch.zeros(parameter.shape, dtype=value.dtype, device=value.device)
    target[name].view(-1)[start : start + value.numel()].copy_(value)
