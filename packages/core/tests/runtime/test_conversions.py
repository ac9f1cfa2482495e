"""Conversions that somebody else wrote: what they need, what comes out, and how their failure is told."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from colossal_core.boxes import Box
from colossal_core.errors import CapabilityError
from colossal_core.runtime.checkpointing.conversions import Conversion, Form, Origins, connect

NAMES = tuple(f"expert.{number}" for number in range(300))
FORMS = {name: Form(torch.bfloat16, (2, 3)) for name in NAMES}
FIRST, LAST = Box((0, 0, 0), (1, 2, 3)), Box((298, 0, 1), (2, 2, 1))


def stack(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make one tensor of all experts."""
    return {"experts": torch.stack([tensors[name] for name in NAMES])}


def fail(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Do what this version of a library does not."""
    raise NotImplementedError("no such operation")


def make(run: object = stack, *, is_move: bool = True) -> Conversion:
    """Return a conversion of many small tensors."""
    assert callable(run)
    targets = {"experts": Form(torch.float32, (300, 2, 3))}
    return Conversion(sources=NAMES, targets=targets, run=run, dtype=torch.float32, is_move=is_move)


def test_boxes_of_a_result_need_some_sources() -> None:
    """Only those that an element in a box comes from, however many there are, and only where it does."""
    whole, column = Box((0, 0), (2, 3)), Box((0, 1), (2, 1))
    expected = {"expert.0": whole, "expert.298": column, "expert.299": column}
    assert make().needed(FORMS, {"experts": [FIRST, LAST]}) == expected
    assert set(make().needed(FORMS, {"experts": [Box((0, 0, 0), (300, 2, 3))]})) == set(NAMES)


def test_what_computes_or_fails_needs_everything() -> None:
    """Numbers in place of weights mean nothing to a conversion that calculates with them."""
    assert set(make(is_move=False).needed(FORMS, {"experts": [FIRST]})) == set(NAMES)
    assert set(make(fail).needed(FORMS, {"experts": [FIRST]})) == set(NAMES)


def test_sources_are_cast_and_failures_are_ours() -> None:
    """What goes in has the dtype of the model; whatever goes wrong names the tensor."""
    sources = {name: torch.zeros(2, 3, dtype=torch.bfloat16) for name in NAMES}

    assert make().convert(sources)["experts"].dtype == torch.float32
    with pytest.raises(CapabilityError, match=r"'expert\.0' cannot be converted.*no such operation"):
        make(fail).convert(sources)


def test_origins_follow_views_and_copies() -> None:
    """Tensors without memory show what a result is made of, through views, copies and writes in place."""
    sources = {name: torch.empty(4, 6, device="meta") for name in "abcd"}

    with Origins(sources) as origins:
        joined = torch.cat([sources["a"], sources["b"]]).t().contiguous()
        part = sources["c"][1:, :2]
        filled = torch.empty(2, 2, device="meta")
        filled[:, :1] = part[:2, :1] * sources["d"][:2, :1]

    assert origins.of(joined) == {"a", "b"}
    assert origins.of(part) == {"c"}
    assert origins.of(filled) == {"c", "d"}
    assert origins.of(torch.empty(1, device="meta")) == frozenset()


def test_groups_are_joined_by_what_they_share() -> None:
    """Two results that need one tensor are made together, and so is what is joined by a third."""
    results = {"x": {"a"}, "y": {"b", "c"}, "z": {"c"}, "w": {"a", "b"}, "v": {"d"}}

    groups = connect({name: frozenset(inputs) for name, inputs in results.items()})

    assert [(sorted(a), sorted(b)) for a, b in groups] == [
        (["a", "b", "c"], ["w", "x", "y", "z"]),
        (["d"], ["v"]),
    ]
