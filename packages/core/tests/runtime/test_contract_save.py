"""Saving, sentence by sentence: what `save` promise.

Each test is named after what is promised and looks at it in its smallest form; the files about the parts
(resume, reshard, export, import, checkpoint layouts, format) look further. Rank functions assert by
themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from colossal_core import CheckpointError, RankMismatchError, UsageError
from colossal_core.checkpoint import find_complete, read_manifest
from colossal_core.runtime.checkpointing import parts, saving
from colossal_testkit import run_ranks, run_ranks_expecting_errors
from colossal_testkit.engine import engine_of

from .keeping import boosted, take_steps, weights_of

# --- save ---------------------------------------------------------------------------------------------------


def save_some(root: Path, **options: Any) -> list[str]:
    """Save after steps 1, 2 and 3; return what `save` returned."""
    booster, *objects = boosted()
    paths = []
    for _ in range(3):
        take_steps(booster, *objects, 1)
        paths.append(str(booster.save(root, **options)))
    booster.wait_for_save()
    return paths


def test_save_writes_root_step_n_and_returns_the_path(tmp_path: Path) -> None:
    """On every rank, with a manifest that says the step."""
    returned = run_ranks(save_some, 2, tmp_path)

    assert returned == [[str(tmp_path / f"step-{step}") for step in (1, 2, 3)]] * 2
    assert [read_manifest(tmp_path / f"step-{step}").step for step in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_keep_deletes_older_checkpoints(tmp_path: Path, *, asynchronous: bool) -> None:
    """The newest ones stay; other files in the directory are nobody's business."""
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")

    run_ranks(save_some, 2, tmp_path, keep=2, asynchronous=asynchronous)

    assert [step for step, _ in find_complete(tmp_path)] == [3, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-3", "notes.txt"}


def save_again(root: Path) -> None:
    """Save one step twice, with other content."""
    booster, model, optimizer, loader = boosted()
    take_steps(booster, model, optimizer, loader, 1)
    booster.save(root, extra="first")
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    booster.save(root, extra="second")
    loaded = booster.load(root)
    assert loaded is not None
    assert loaded.extra == "second"
    assert bool((model[0].weight == 0.5).all())


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    """The second one counts, and nothing of the first is left behind."""
    run_ranks(save_again, 2, tmp_path)

    marks = Counter(path.name[-24:-12] for path in (tmp_path / "step-1").glob("*.safetensors"))
    assert len(marks) == 1


def extra_round_trip(root: Path) -> None:
    """Keep every kind of plain value."""
    booster, *_ = boosted()
    extra: dict[Any, Any] = {
        "numbers": (1, 2.5, float("inf"), True, None),
        3: {"set": {1, 2}},
        "tensor": torch.arange(3, dtype=torch.bfloat16),
        "generator": torch.Generator().manual_seed(4).get_state(),
        "bytes": b"\x00\xff",
    }
    booster.save(root, extra=extra)
    loaded = booster.load(root)
    assert loaded is not None
    found = loaded.extra
    assert found.keys() == extra.keys()
    assert all(found[key] == extra[key] for key in ("numbers", 3, "bytes"))
    assert torch.equal(found["tensor"], extra["tensor"])
    assert found["tensor"].dtype == torch.bfloat16
    assert torch.equal(found["generator"], extra["generator"])


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    """Nested plain values and tensors, with their types."""
    run_ranks(extra_round_trip, 2, tmp_path)


def save_behaviour(root: Path) -> None:
    """Try to keep a function."""
    booster, *_ = boosted()
    booster.save(root, extra={"callbacks": [print]})


def test_extra_that_is_no_data_is_refused_on_every_rank(tmp_path: Path) -> None:
    """It is named by its path, and nothing is left on the disk."""
    errors = run_ranks_expecting_errors(save_behaviour, 2, tmp_path, error=UsageError)

    assert "extra['callbacks'][0] is a builtins.builtin_function_or_method" in str(errors[0])
    assert not list(tmp_path.iterdir())


def train_while_writing(root: Path) -> None:
    """Save beside training, train on at once, and save again; keep what was true at each call."""
    booster, model, optimizer, loader = boosted()
    wanted = {}
    for _ in range(4):
        take_steps(booster, model, optimizer, loader, 1)
        booster.save(root, asynchronous=True)
        wanted[booster.step] = weights_of(model).clone()
        take_steps(booster, model, optimizer, loader, 2)
    booster.wait_for_save()
    for step, weights in wanted.items():
        booster.load(root / f"step-{step}")
        assert torch.equal(weights_of(model), weights)


def test_asynchronous_save_holds_the_state_of_the_call(tmp_path: Path) -> None:
    """Training goes on while it is written; a second save waits for the first."""
    run_ranks(train_while_writing, 2, tmp_path)


def save_and_leave(root: Path) -> None:
    """Start a save and end."""
    booster, *objects = boosted()
    take_steps(booster, *objects, 1)
    booster.save(root, asynchronous=True)


def test_asynchronous_save_is_complete_when_the_process_has_ended(tmp_path: Path) -> None:
    """Without waiting for it by hand."""
    script = tmp_path / "script.py"
    folder = Path(__file__).parent
    script.write_text(
        "from pathlib import Path\n"
        "from runtime.test_contract_save import save_and_leave\n"
        f"save_and_leave(Path({str(tmp_path / 'saved')!r}))\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(folder.parent)}

    subprocess.run([sys.executable, script], check=True, env=environment, timeout=25)

    assert [step for step, _ in find_complete(tmp_path / "saved")] == [1]


def fail_in_background(root: Path) -> None:
    """Let the disk of one rank refuse while training goes on."""
    booster, *objects = boosted()
    take_steps(booster, *objects, 1)
    booster.save(root)
    take_steps(booster, *objects, 1)
    with full_disk(is_full=not booster.is_first):
        booster.save(root, asynchronous=True)
        for _ in range(200):
            take_steps(booster, *objects, 1)
            time.sleep(0.02)  # the writer needs some time, too, where the machine is busy


def full_disk(*, is_full: bool) -> Any:
    """Return a context in which nothing can be written."""
    error = CheckpointError("cannot write 'x': No space left on device", hint="free space")
    return mock.patch.object(parts, "write_tensors", side_effect=error) if is_full else nullcontext()


def test_error_of_an_asynchronous_save_is_raised_at_the_next_step_on_every_rank(tmp_path: Path) -> None:
    """It names the rank and the reason; the earlier checkpoint is as it was."""
    errors = run_ranks_expecting_errors(fail_in_background, 2, tmp_path, error=CheckpointError)

    assert not [str(error) for error in errors if "failed on rank 1" not in str(error)]
    assert all("No space left" in str(error) for error in errors)
    assert [step for step, _ in find_complete(tmp_path)] == [1]
    assert not (tmp_path / "step-2").exists()


def fail_now(root: Path) -> None:
    """Let the disk of one rank refuse."""
    booster, *objects = boosted()
    take_steps(booster, *objects, 1)
    booster.save(root)
    take_steps(booster, *objects, 1)
    with full_disk(is_full=not booster.is_first):
        booster.save(root)


def test_failed_save_raises_on_every_rank_and_leaves_the_older_one(tmp_path: Path) -> None:
    """Nothing of it is left, and it can be tried again."""
    errors = run_ranks_expecting_errors(fail_now, 2, tmp_path)

    assert all("No space left" in str(error) for error in errors)
    assert [step for step, _ in find_complete(tmp_path)] == [1]
    assert not (tmp_path / "step-2").exists()


def save_in_window(root: Path) -> None:
    """Save after one of three micro-batches."""
    booster, model, optimizer, loader = boosted(accumulate=3)
    samples, targets = next(iter(loader))
    booster.forward_backward(model, (samples, targets), F.mse_loss)
    optimizer.step()
    booster.save(root)


def test_save_is_refused_inside_an_accumulation_window(tmp_path: Path) -> None:
    """Its gradients would be lost."""
    errors = run_ranks_expecting_errors(save_in_window, 2, tmp_path, error=UsageError)

    assert "accumulation window" in str(errors[0])


def save_apart(root: Path) -> None:
    """Pass each rank a directory of its own."""
    booster, *_ = boosted()
    booster.save(root / str(booster.world.rank))


def test_save_checks_that_ranks_pass_one_directory(tmp_path: Path) -> None:
    """Both directories are named."""
    errors = run_ranks_expecting_errors(save_apart, 2, tmp_path, error=UsageError)

    assert str(tmp_path / "0") in str(errors[0])
    assert str(tmp_path / "1") in str(errors[0])


def test_save_checks_that_ranks_see_one_directory(tmp_path: Path) -> None:
    """A local disk on each machine would hold a part of a checkpoint each."""
    errors = run_ranks_expecting_errors(see_nothing, 2, tmp_path)

    assert all("does not see" in str(error) for error in errors)
    assert not list(tmp_path.iterdir())


def see_nothing(root: Path) -> None:
    """Let rank 1 see another disk under the same path."""
    booster, *_ = boosted()
    look = saving._see
    with mock.patch.object(saving, "_see", lambda probe, rank: look(probe.with_suffix(".other"), rank)):
        booster.save(root)


def save_alone(root: Path) -> None:
    """Let only rank 0 save, as scripts for other systems do."""
    booster, *_ = boosted()
    if booster.is_first:
        engine_of(booster).agreement._timeout = timedelta(seconds=1)
        booster.save(root)
    else:
        time.sleep(1.5)
        raise UsageError("rank 1 did something else")


def test_save_that_only_rank_0_calls_ends_with_an_error_that_names_the_others(tmp_path: Path) -> None:
    """Not in a wait without end."""
    errors = run_ranks_expecting_errors(save_alone, 2, tmp_path)

    assert isinstance(errors[0], RankMismatchError)
    assert "ranks [1] did not reach 'save'" in str(errors[0])
    assert "is_first" in str(errors[0])
