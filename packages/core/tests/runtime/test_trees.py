"""Batches on their way to the device."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import attrs
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from colossal_core.runtime.trees import move_to

from .loaders import CPU


class Point(NamedTuple):
    """A named tuple."""

    x: torch.Tensor
    name: str


@attrs.frozen
class Opaque:
    """Not a container."""

    x: torch.Tensor


class Marked(dict[str, Any]):
    """A dict with an attribute."""

    mark = "none"


def test_batches_move_to_the_device_and_keep_their_types() -> None:
    """Nested containers of any type; what has a ``to`` moves itself."""
    x = torch.ones(2)
    marked = Marked(x=x)
    marked.mark = "kept"
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    by_default: defaultdict[str, Any] = defaultdict(list, a=x)
    tree = {
        "point": Point(x, "p"),
        "list": [x, (x, 1)],
        "ordered": OrderedDict(b=x, a=1),
        "marked": marked,
        "user": UserDict(a=x),
        "default": by_default,
        "packed": packed,
        "opaque": Opaque(x),
        "text": "text",
    }

    moved = move_to(tree, torch.device("meta"))

    assert moved["point"].x.is_meta
    assert moved["point"].name == "p"
    assert moved["list"][0].is_meta
    assert moved["list"][1][0].is_meta
    assert moved["list"][1][1] == 1
    for name, value in tree.items():
        assert type(moved[name]) is type(value)
    assert list(moved["ordered"]) == ["b", "a"]
    assert moved["marked"].mark == "kept"
    assert moved["user"]["a"].is_meta
    assert moved["default"].default_factory is list
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["packed"].data.is_meta
    assert moved["opaque"] is tree["opaque"]
    assert move_to(tree, CPU) is tree
