"""``boost``: what goes in, what comes back, and the small calls around it."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from colossal_core import Booster, Replicated
from colossal_core.errors import UsageError
from colossal_core.runtime.optimizer import BoostedOptimizer
from colossal_testkit import run_ranks
from colossal_testkit.stories import Awkward, sgd

from .small_models import make, train

# --- what comes back -------------------------------------------------------------------------------------


def test_everything_comes_back_in_its_place() -> None:
    """Any order and subset, None and keywords included; models and criteria are the same objects."""
    model, optimizer = make()
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    criterion = nn.CrossEntropyLoss()

    back = Booster().boost(criterion, None, optimizer, nn.functional.mse_loss, model, scheduler, teacher=None)

    assert len(back) == 7
    assert back[0] is criterion
    assert back[1] is None
    assert isinstance(back[2], BoostedOptimizer)
    assert back[3] is nn.functional.mse_loss
    assert back[4] is model
    assert isinstance(back[5], lr_scheduler.StepLR)
    assert back[6] is None


def test_one_object_comes_back_alone() -> None:
    """``model = booster.boost(model)``."""
    model, _ = make()

    assert Booster().boost(model) is model


def test_model_comes_back_with_an_optimizer_of_none() -> None:
    """The same line serves training and inference."""
    model, _ = make()

    assert Booster().boost(model, None) == (model, None)


def test_keywords_come_last_and_name_their_objects() -> None:
    """Messages call a model by the name that the user gave it."""
    model, optimizer = make()
    other = make()[0].double()

    booster = Booster()
    with pytest.raises(UsageError, match="float64"):
        booster.boost(optimizer, model, critic=other)
    returned = Booster().boost(critic=model, optimizer=optimizer)

    assert returned[0] is model
    assert isinstance(returned[1], BoostedOptimizer)


def test_model_keeps_its_class_attributes_and_parameters() -> None:
    """The object is changed in place: same class, same Parameter objects, same names."""
    model: Any = Awkward()
    model.note = "mine"
    before = dict(model.named_parameters())
    names = list(model.state_dict())

    boosted, _ = Booster(precision="fp64").boost(model, sgd(model))

    assert boosted is model
    assert type(boosted) is Awkward
    assert boosted.note == "mine"
    assert list(boosted.state_dict()) == names
    assert all(value is before[name] for name, value in boosted.named_parameters())
    assert boosted.tied.weight is boosted.head_b.weight


def test_copies_and_checkpoints_of_a_boosted_model_are_plain() -> None:
    """``deepcopy``, ``state_dict`` and ``torch.save`` work as in torch, and a copy does not follow."""
    model, optimizer = make()
    model, optimizer = Booster().boost(model, optimizer)
    train(model, optimizer, range(2))

    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again, _ = make(seed=1)
    again.load_state_dict(torch.load(file, weights_only=True))
    before = [value.clone() for value in twin.parameters()]
    after = train(model, optimizer, range(2, 4))

    assert all(torch.equal(one, two) for one, two in zip(twin.parameters(), before, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(again.parameters(), before, strict=True))
    assert not torch.equal(after[0], before[0])
    assert file.getbuffer().nbytes < 10_000
    twin(torch.ones(1, 5)).sum().backward()
    gradient = next(twin.parameters()).grad
    assert gradient is not None
    assert not gradient.isnan().any()


# --- twice -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["model", "optimizer", "old optimizer"])
def test_boosting_what_is_boosted_is_refused(what: str) -> None:
    """A second Booster does not take over what the first one holds."""
    model, optimizer = make()
    model, boosted = Booster().boost(model, optimizer)
    objects = {
        "model": [model],
        "optimizer": [make()[0], boosted],
        "old optimizer": [model, optimizer],
    }[what]

    with pytest.raises(UsageError, match="boosted already"):
        Booster().boost(*objects)

    train(model, boosted, range(1))


def test_calls_before_boost_say_what_comes_first() -> None:
    """Every method that needs a model names the call that is missing."""
    booster = Booster()
    model, _ = make()

    for call in (
        lambda: booster.forward_backward(model, (torch.ones(1, 5), torch.ones(1, 3)), nn.MSELoss()),
        lambda: booster.release(model),
        lambda: booster.mean(1.0),
        booster.report,
    ):
        with pytest.raises(UsageError, match=r"call booster.boost\(model, optimizer\) first"):
            call()


def test_models_of_others_are_refused_in_calls() -> None:
    """The message names the models that there are."""
    model, optimizer = make()
    booster = Booster()
    booster.boost(optimizer, actor=model)

    with pytest.raises(UsageError, match="was not boosted by this Booster, which has actor"):
        booster.forward_backward(make()[0], (torch.ones(1, 5), torch.ones(1, 3)), nn.MSELoss())


# --- small calls -----------------------------------------------------------------------------------------


def call_everything() -> dict[str, Any]:
    """Use what tells a rank its place, and what averages."""
    model, optimizer = make()
    booster = Booster(Replicated(), max_grad_norm=1.0)
    booster.boost(model, optimizer)
    rank = dist.get_rank()
    found = {
        "place": (booster.data_rank, booster.data_degree, booster.is_first, booster.world.rank),
        "mean": booster.mean(float(rank), weight=rank),
        "tensor": booster.mean(torch.tensor(rank + 1.0)),
        "none": "",
        "step": booster.step,
    }
    booster.print("only once")
    try:
        booster.mean(1.0, weight=0.0)
    except UsageError as error:
        found["none"] = str(error)
    return found


def test_ranks_know_their_place_and_average_by_weight(capsys: pytest.CaptureFixture[str]) -> None:
    """``mean`` weighs, and weights that sum to nothing are an error everywhere."""
    results = run_ranks(call_everything, 3)

    for rank, result in enumerate(results):
        assert result["place"] == (rank, 3, rank == 0, rank)
        assert result["mean"] == pytest.approx(5 / 3)
        assert result["tensor"] == pytest.approx(2.0)
        assert "sum to 0.0" in result["none"]
        assert result["step"] == 0
    assert capsys.readouterr().out.count("only once") == 1


def test_report_counts_bytes_by_category() -> None:
    """Memory of a bf16 plan with AdamW: 2 bytes of values and gradients, 4 of masters, 8 of moments."""
    model, optimizer = make()
    booster = Booster(precision="bf16")
    model, optimizer = booster.boost(model, optimizer)
    train(model, optimizer, range(1))
    numel = sum(value.numel() for value in model.parameters())

    memory = booster.report()["memory"]

    assert memory["value"] == 2 * numel
    assert memory["gradient"] == 2 * numel
    assert memory["master"] == 4 * numel
    assert memory["optimizer state"] == 8 * numel


def test_full_parameters_shows_and_keeps_edits() -> None:
    """By serial name; what is written inside is there afterwards."""
    model, optimizer = make()
    booster = Booster()
    booster.boost(model, optimizer)

    with booster.full_parameters(model) as found:
        names = list(found)
        found["0.bias"].fill_(math.pi)

    assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.equal(model.get_parameter("0.bias"), torch.full((4,), math.pi))


def test_describe_names_every_setting_with_its_origin() -> None:
    """The effective plan, a line each."""
    text = Booster(max_grad_norm=0.5).describe()

    assert "max_grad_norm = 0.5" in text
    assert all("(" in line and "=" in line for line in text.splitlines())
