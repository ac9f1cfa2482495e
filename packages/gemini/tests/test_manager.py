"""Training within budgets: the numbers of one process, whatever lives where, and budgets to the byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_core import Booster, Recompute, Replicated
from colossal_core.errors import CapabilityError
from colossal_gemini import Gemini
from colossal_testkit import run_ranks
from colossal_testkit.engine import engine_of

WIDTH, NUM_BLOCKS = 12, 5


class Block(nn.Module):
    """A residual block with a few parameters of odd sizes."""

    def __init__(self) -> None:
        """Make two layers and a norm."""
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add what the layers make of the inputs."""
        found: torch.Tensor = inputs + self.down(torch.tanh(self.up(self.norm(inputs))))
        return found


def build(dtype: torch.dtype = torch.float64, kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    """Return the same model each time."""
    torch.manual_seed(3)
    blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
    return kind(nn.Linear(7, WIDTH), blocks, nn.Linear(WIDTH, 3)).to(dtype)


def batch(step: int, rank: int, num_rows: int = 4, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return inputs and targets of one rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    shapes = ((num_rows, 7), (num_rows, 3))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a mean of squares."""
    return (outputs - targets).square().mean()


def train(
    piece: Any,
    *,
    num_steps: int = 3,
    dtype: torch.dtype = torch.float64,
    between: Callable[[int, nn.Module], None] = lambda _step, _model: None,
    extra: tuple[Any, ...] = (),
    kind: type[nn.Sequential] = nn.Sequential,
    **settings: Any,
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Train some steps; return losses, weights and the manager."""
    precision = {torch.float64: "fp64", torch.float32: "fp32"}[dtype]
    booster = Booster(piece, *extra, **{"precision": precision, **settings})
    model = build(dtype, kind)
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), 1e-2))
    losses = []
    for step in range(num_steps):
        inputs, targets = batch(step, dist.get_rank(), dtype=dtype)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        between(step, model)
    manager: Any = engine_of(booster).manager
    if isinstance(piece, Gemini):
        assert piece.device_budget is None or manager.tiers.device.peak <= piece.device_budget
    with booster.full_parameters(model) as shown:
        weights = {name: value.clone() for name, value in shown.items()}
    return losses, weights, manager


def differ(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Whether two runs have other losses or weights, in any bit."""
    return first[0] != second[0] or any(not torch.equal(first[1][name], second[1][name]) for name in first[1])


def fit(folder: Path, dtype: torch.dtype, **options: Any) -> tuple[int, str]:
    """Return the least device budget, and where the trace is that it follows from."""
    report = Gemini(device_budget="1MiB", **options).fit(
        build(dtype),
        tuple(batch(0, 0, dtype=dtype)),
        criterion=loss_of,
        ranks=dist.get_world_size(),
        precision={torch.float64: "fp64", torch.float32: "fp32"}[dtype],
    )
    assert report.least_budget is not None
    path = folder / "fit.json"
    if dist.get_rank() == 0:
        report.save(path)
    dist.barrier()
    return report.least_budget, str(path)


def plan_of(manager: Any) -> Any:
    """Return the plan that the last step followed."""
    assert manager.plan is not None
    return manager.plan


def tiers(kind: str, folder: Path) -> dict[str, Any]:
    """Return options for tiers below the device."""
    return {
        "host": {},
        "disk": {"disk": str(folder), "host_budget": "96KiB"},
        "static": {"placement": "static"},
    }[kind]


def check_budgets(kind: str, folder: Path, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Compare runs from the least budget to all resident; return (budget, gathers)."""
    options = tiers(kind, folder)
    reference = train(Replicated(), dtype=dtype)
    least, path = fit(folder, dtype, **options)
    found = []
    for budget in (least, least + 9_000, least + 40_000, 1 << 20):
        run = train(Gemini(device_budget=budget, trace=path, **options), dtype=dtype)
        assert not differ(reference, run), budget
        found.append((budget, plan_of(run[2]).num_gathers))
    with pytest.raises(CapabilityError, match="1 more than its budget"):
        train(Gemini(device_budget=least - 1, trace=path, **options), dtype=dtype)
    return found


@pytest.mark.parametrize("kind", ["host", "disk", "static"])
@pytest.mark.parametrize("nproc", [1, 2])
def test_every_budget_gives_the_bits_of_one_process(kind: str, nproc: int, tmp_path: Path) -> None:
    """From the least budget, where one byte less is refused by boost, to all resident; in each tier."""
    found = run_ranks(check_budgets, nproc, kind, tmp_path, torch.float32)

    for rank in found:
        gathers = [number for _, number in rank]
        assert gathers == sorted(gathers, reverse=True)
        # The root once, the block that forward ends with once, every other one twice.
        assert gathers[0] == 2 * NUM_BLOCKS


# --- what a loop may do -------------------------------------------------------------------------------------


def evaluate_between(_step: int, model: nn.Module) -> None:
    """Run the model without gradients, and a second forward that is dropped."""
    with torch.no_grad():
        model(torch.ones(2, 7, dtype=torch.float64))
    model(torch.ones(3, 7, dtype=torch.float64))


STORIES: Mapping[str, dict[str, Any]] = {
    "evaluation": {"between": evaluate_between},
    "recompute": {"extra": (Recompute(),)},
    "clipping": {"max_grad_norm": 0.05},
}


def tell(name: str, folder: Path) -> float:
    """Return by how much a run within a tight budget differs from one without budgets."""
    budget, _ = fit(folder, torch.float64)
    story = STORIES[name]
    reference = train(Replicated(), num_steps=4, **story)
    run = train(Gemini(device_budget=budget + 6_000), num_steps=4, **story)
    losses = max(abs(first - second) for first, second in zip(reference[0], run[0], strict=True))
    return max(losses, *(float((run[1][name] - w).abs().max()) for name, w in reference[1].items()))


@pytest.mark.parametrize("name", STORIES)
def test_what_a_loop_may_do_is_exact_within_a_budget(name: str, tmp_path: Path) -> None:
    """Evaluation and forwards without backward between steps, recomputation, clipping."""
    assert max(run_ranks(tell, 2, name, tmp_path)) < 1e-12


class Penalised(nn.Sequential):
    """Reads weights of its blocks where no module is known to read them."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Let outputs depend on weights of blocks that do not run then."""
        first, *_, last = (module for module in self.modules() if isinstance(module, Block))
        scale = torch.stack([first.norm.weight, last.norm.weight]).mean()
        outputs: torch.Tensor = self[2](self[1](self[0](inputs * scale))) + first.up.weight.square().mean()
        return outputs


def read_elsewhere() -> float:
    """Return by how much weights of a run of such a model within a tight budget are off."""
    reference = train(Replicated(), num_steps=4, kind=Penalised)
    run = train(Gemini(device_budget="40KiB"), num_steps=4, kind=Penalised)
    return max(float((run[1][name] - w).abs().max()) for name, w in reference[1].items())


def test_weights_that_no_module_is_known_to_read_come_and_go() -> None:
    """Also in the steps that follow a plan."""
    assert max(run_ranks(read_elsewhere, 2)) < 1e-12


def vary_lengths() -> tuple[float, list[int]]:
    """Train on batches of changing length; return the difference, and known steps after each step."""
    known: list[int] = []

    def run(piece: Any) -> list[float]:
        booster = Booster(piece, precision="fp64")
        model = build()
        model, optimizer = booster.boost(model, torch.optim.SGD(model.parameters(), 1e-2))
        losses = []
        for step, rows in enumerate((4, 4, 6, 5, 6, 3)):
            inputs, targets = batch(step, dist.get_rank(), rows + dist.get_rank())
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            manager: Any = engine_of(booster).manager
            if isinstance(piece, Gemini):
                known.append(len(manager._course._known))
        return losses

    pairs = zip(run(Replicated()), run(Gemini(device_budget="1MiB")), strict=True)
    return max(abs(first - second) for first, second in pairs), known


def test_longer_batches_are_traced_again_and_shorter_ones_are_like_longer_ones() -> None:
    """Ranks agree on the longest; what was seen serves what is no longer."""
    for difference, known in run_ranks(vary_lengths, 2):
        assert difference < 1e-12
        # One plan for the first step, one for those after a step, one more for the longer batch.
        assert known == [1, 2, 3, 3, 3, 3]


def train_in_turns() -> tuple[float, int, bool]:
    """Train two models with an optimizer each, one after the other."""
    found: list[Any] = []

    def run(piece: Any) -> list[float]:
        booster = Booster(piece, precision="fp64")
        first, second = build(), build()
        firsts, seconds = (torch.optim.AdamW(model.parameters(), 1e-2) for model in (first, second))
        first, second, firsts, seconds = booster.boost(first, second, firsts, seconds)
        losses = []
        for step in range(3):
            for model, optimizer in ((first, firsts), (second, seconds)):
                inputs, targets = batch(step, dist.get_rank())
                loss = loss_of(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        manager: Any = engine_of(booster).manager
        if isinstance(piece, Gemini):
            found.append((len(manager._course._known), manager._course.is_lost))
        return losses

    pairs = zip(run(Replicated()), run(Gemini(device_budget="1MiB")), strict=True)
    return max(abs(first - second) for first, second in pairs), *found[0]


def test_two_models_in_turns_have_a_plan_each() -> None:
    """Numbers are those of plain training, and no step is served without a plan from the second round on."""
    for difference, known, is_lost in run_ranks(train_in_turns, 2):
        assert difference < 1e-12
        assert (known, is_lost) == (3, False)


def average_and_resume(folder: Path) -> list[bool]:
    """Average, save, and load into plain training and back; return what is equal."""
    booster = Booster(Gemini(device_budget="1MiB", disk=str(folder), placement="static"), precision="fp64")
    model = build()
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), 1e-2))
    average = booster.average(model, 0.9)

    def step(number: int, model: Any, optimizer: Any) -> float:
        inputs, targets = batch(number, dist.get_rank())
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    for number in range(3):
        step(number, model, optimizer)
    inputs, _ = batch(9, 0)
    with average.applied(), torch.no_grad():
        shown = model(inputs).clone()
    booster.save(folder / "run")
    losses = [step(number, model, optimizer) for number in (3, 4)]

    def resume(piece: Any) -> tuple[list[float], torch.Tensor]:
        other = Booster(piece, precision="fp64")
        twin = build()
        twin, again = other.boost(twin, torch.optim.AdamW(twin.parameters(), 1e-2))
        mean = other.average(twin, 0.9)
        other.load(folder / "run")
        with mean.applied(), torch.no_grad():
            seen = twin(inputs).clone()
        return [step(number, twin, again) for number in (3, 4)], seen

    equal = []
    for piece in (
        Replicated(),
        Gemini(),
        Gemini(device_budget="64KiB", host_budget="96KiB", disk=str(folder)),
    ):
        found, seen = resume(piece)
        equal.append(found == losses and torch.equal(seen, shown))
    return equal


def test_averages_and_checkpoints_come_from_every_tier_and_go_to_any(tmp_path: Path) -> None:
    """State that lives in files is saved; plain training and other tiers go on with the same bits."""
    assert run_ranks(average_and_resume, 2, tmp_path) == [[True] * 3] * 2


def fail_in_forward() -> float:
    """Raise inside a block, and train on."""

    def run(piece: Any, *, fails: bool) -> list[float]:
        booster = Booster(piece, precision="fp64")
        model = build()
        model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters(), 1e-2))
        losses = []
        for step in range(4):
            inputs, targets = batch(step, dist.get_rank())
            if fails and step == 2:
                with pytest.raises(RuntimeError, match="shape"):
                    model(inputs[:, :5])
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = run(Replicated(), fails=False)
    return max(abs(a - b) for a, b in zip(plain, run(Gemini(device_budget="1MiB"), fails=True), strict=True))


def test_an_error_in_forward_leaves_a_model_that_trains_on() -> None:
    """On all ranks alike; the step is served without a plan."""
    assert max(run_ranks(fail_in_forward, 2)) < 1e-12
