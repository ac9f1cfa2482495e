"""Containers that enter and leave a model in 16 bit keep their types and what they carry."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import torch
from torch import nn

from colossal_core import Booster
from colossal_core.runtime.precision import cast_floating


class Pair(NamedTuple):
    """A named tuple of the typed kind."""

    left: torch.Tensor
    right: Any


Plain = namedtuple("Plain", ["value"])  # noqa: PYI024 - the untyped kind exists as well


@dataclasses.dataclass
class Outputs:
    """What models of many libraries return."""

    logits: torch.Tensor
    extra: Any = None
    size: int = dataclasses.field(default=0, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """One that cannot be changed, without a ``__dict__``."""

    logits: torch.Tensor


class Batch(dict[str, Any]):
    """A dict of a user's own kind, with an attribute."""

    source = "nowhere"


class Rows(list[Any]):
    """A list of a user's own kind."""


def nested() -> Any:
    """Return every kind of container around a bf16 tensor, an integer, a mask and a None."""
    value = torch.ones(2, dtype=torch.bfloat16)
    outputs = Outputs(value, extra=[value, None])
    outputs.size = 3
    batch = Batch(value=value, inner=Rows([value]))
    batch.source = "here"
    return {
        "tuple": (value, 1, "text"),
        "list": [value, [value]],
        "ordered": OrderedDict(b=value, a=value),
        "default": defaultdict(list, a=value),
        "pair": Pair(value, Plain(value)),
        "outputs": outputs,
        "frozen": Frozen(value),
        "batch": batch,
        "integers": torch.tensor([1, 2]),
        "mask": torch.tensor([True]),
        "complex": torch.ones(1, dtype=torch.complex64),
        "wide": torch.ones(1, dtype=torch.float64),
        "none": None,
    }


def test_containers_keep_their_types_and_what_they_carry() -> None:
    """Floating tensors are cast wherever they are; everything else is the same, in the same containers."""
    found = cast_floating(nested(), torch.float32, only=(torch.bfloat16,))

    assert [type(value) for value in found.values()] == [type(value) for value in nested().values()]
    assert [value.dtype for value in (found["tuple"][0], found["list"][0], found["list"][1][0])] == [
        torch.float32
    ] * 3
    assert found["tuple"][1:] == (1, "text")
    assert list(found["ordered"]) == ["b", "a"]
    assert found["ordered"]["a"].dtype == torch.float32
    assert found["default"]["a"].dtype == torch.float32
    assert found["default"].default_factory is list
    assert found["pair"].left.dtype == torch.float32
    assert isinstance(found["pair"].right, Plain)
    assert found["pair"].right.value.dtype == torch.float32
    assert found["outputs"].logits.dtype == torch.float32
    assert found["outputs"].extra[0].dtype == torch.float32
    assert found["outputs"].extra[1] is None
    assert found["outputs"].size == 3
    assert found["frozen"].logits.dtype == torch.float32
    assert found["batch"]["value"].dtype == torch.float32
    assert found["batch"].source == "here"
    assert isinstance(found["batch"]["inner"], Rows)
    assert found["batch"]["inner"][0].dtype == torch.float32
    assert found["integers"].dtype == torch.int64
    assert found["mask"].dtype == torch.bool
    assert found["complex"].dtype == torch.complex64
    assert found["wide"].dtype == torch.float64
    assert found["none"] is None


def test_casting_changes_no_container_of_the_user() -> None:
    """The user's batch holds afterwards what it held before."""
    tree = nested()

    cast_floating(tree, torch.float32)

    assert tree["list"][0].dtype == torch.bfloat16
    assert tree["outputs"].logits.dtype == torch.bfloat16
    assert tree["batch"]["value"].dtype == torch.bfloat16


class Returning(nn.Module):
    """Takes and returns nested containers."""

    def __init__(self) -> None:
        """Hold a layer."""
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, batch: Batch, *, ids: torch.Tensor, extra: Outputs) -> Outputs:
        """Use a tensor of each container."""
        self.seen = [batch["value"].dtype, extra.logits.dtype, ids.dtype]
        return Outputs(self.layer(batch["value"] + extra.logits), extra=Pair(ids, batch))


def test_models_get_and_return_their_own_containers() -> None:
    """Arguments and outputs of any type cross the border of a bf16 model, gradients included."""
    model: Any = Returning()
    model, optimizer = Booster(precision="bf16").boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    value = torch.ones(1, 2, requires_grad=True)

    outputs = model(Batch(value=value), ids=torch.tensor([3]), extra=Outputs(torch.ones(1, 2)))
    outputs.logits.sum().backward()
    optimizer.step()

    assert model.seen == [torch.bfloat16, torch.bfloat16, torch.int64]
    assert isinstance(outputs, Outputs)
    assert outputs.logits.dtype == torch.float32
    assert outputs.extra.left.dtype == torch.int64
    assert isinstance(outputs.extra.right, Batch)
    assert outputs.extra.right["value"].dtype == torch.float32
    assert value.grad is not None
    assert value.grad.dtype == torch.float32
