"""Saving: collect what this rank writes, write it now or beside training, and publish.

The one idea: a save is a value (:class:`~.parts.Part`) that is made at once and written by whoever has time:
this thread, or one beside it that works on a copy. Nothing is communicated from that thread; ranks find out
at their next common step how it went, so an error of one is an error of all.
"""

from __future__ import annotations

import platform
import secrets
import sys
import threading
import warnings
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from attrs import define, evolve, field

from colossal_core.checkpoint.directory import (
    MANIFEST_NAME,
    clear_save,
    data_file_name,
    find_complete,
    publish,
    retain,
    step_directory,
)
from colossal_core.checkpoint.manifest import Manifest
from colossal_core.errors import CheckpointError, ColossalError, UsageError
from colossal_core.runtime.checkpointing.hub import Form, configuration_texts, names_in_files
from colossal_core.runtime.checkpointing.parts import ObjectPart, Part, join_parts, wait_for_parts, write_part
from colossal_core.runtime.checkpointing.run_state import (
    collect_run_state,
    model_details,
    optimizer_details,
    random_text,
)
from colossal_core.runtime.checkpointing.shards import (
    Collected,
    average_holdings,
    deal,
    model_holdings,
    optimizer_holdings,
    places_by_key,
)
from colossal_core.runtime.checkpointing.values import pack_values

if TYPE_CHECKING:
    from colossal_core.runtime.agreement import Agreement
    from colossal_core.runtime.engine import Engine

__all__ = ["Saver", "average_name", "check_root", "optimizer_name"]

PARTS_TIMEOUT_SECONDS = 3600.0
"""How long rank 0 waits for others to write: disks may be slow, and a dead rank ends the run by itself."""


@final
@define(eq=False)
class _Background:
    """A save that is written beside training.

    Attributes:
        part: What this rank writes.
        keep: How many complete checkpoints stay.
        error: Why it failed, once it is over.
    """

    part: Part
    keep: int | None
    error: ColossalError | None = None
    thread: threading.Thread = field(init=False)

    def start(self) -> None:
        """Begin; the interpreter waits for it at exit."""
        self.thread = threading.Thread(target=self._run, name="colossal-save", daemon=False)
        self.thread.start()

    def _run(self) -> None:
        """Write, and on rank 0 publish when all others have written."""
        try:
            write_part(self.part)
            if self.part.rank == 0:
                _publish(self.part, self.keep)
        except ColossalError as err:
            self.error = err
        except Exception as err:  # noqa: BLE001 - whatever it is belongs to the thread that waits for it
            self.error = CheckpointError(f"saving {self.part.directory} failed: {err!r}", hint="report this")
        if self.error is not None and not threading.main_thread().is_alive():
            print(self.error.render(), file=sys.stderr)  # noqa: T201 - nobody is left who could raise it


@final
class Saver:
    """Saves one Booster's run; at most one save is written beside training.

    Attributes:
        agreement: How ranks compare; waits as long as a slow disk may take.
    """

    def __init__(self, engine: Engine, agreement: Agreement) -> None:
        """Have nothing to write yet.

        Args:
            engine: The built pieces.
            agreement: See above.
        """
        self._engine = engine
        self.agreement = agreement
        self._background: _Background | None = None
        self._copies: list[torch.Tensor] = []
        self._names_in_files: dict[str, dict[str, list[str]] | None] = {}

    def save(self, root: Path, *, extra: Any, keep: int | None, asynchronous: bool) -> Path:
        """Write a checkpoint; see ``Booster.save``."""
        self.finish()
        step = self._engine.num_steps
        directory, mark = self._begin(root, step=step, keep=keep)
        try:
            part = self.agreement.attempt(
                "collect the state", lambda: self._collect(directory, mark, extra=extra)
            )
            if asynchronous:
                self._background = _Background(self._snapshot(part), keep)
                self._background.start()
                return directory
            self.agreement.attempt("write the checkpoint", lambda: write_part(part))
            self.agreement.attempt("publish the checkpoint", lambda: self._publish_on_first(part, keep))
        except ColossalError:
            clear_save(directory, mark)
            raise
        self._engine.observers.after_checkpoint_saved(directory, step)
        return directory

    def check(self) -> None:
        """Find out whether a save beside training is over; called by all ranks at each step.

        Raises:
            CheckpointError: It failed on some rank; on every rank.
        """
        if self._background is not None:
            self._conclude(wait=False)

    def finish(self) -> None:
        """Wait for the save that is written beside training, if there is one; on all ranks.

        Raises:
            CheckpointError: It failed on some rank; on every rank.
        """
        if self._background is not None:
            self._background.thread.join()
            self._conclude(wait=True)

    # --- internals ------------------------------------------------------------------------------------------

    def _begin(self, root: Path, *, step: int, keep: int | None) -> tuple[Path, str]:
        """Check the call on all ranks, and make the one directory that all of them see."""
        rank = self._engine.context.mesh.rank
        mark = secrets.token_hex(6)
        # The engine's own agreement: when a rank does not come, the others should learn it soon.
        agreement = self._engine.agreement
        agreement.attempt("save", lambda: self._check(root, keep))
        roots = agreement.share("save into", f"{mark}{root}")
        different = [other for other, text in enumerate(roots) if text[12:] != str(root)]
        if different:
            raise UsageError(
                f"rank {rank} saves into {root}, rank {different[0]} into {roots[different[0]][12:]}",
                hint="pass the same directory on all ranks; all of them have to see it",
            )
        mark = roots[0][:12]
        directory = step_directory(root, step)
        probe = directory / data_file_name("probe", 0, mark, "json")
        try:
            self.agreement.attempt(
                "make the directory", lambda: _make(directory, probe, root) if rank == 0 else None
            )
            self.agreement.attempt("see the directory", lambda: _see(probe, rank))
        except ColossalError:
            clear_save(directory, mark)
            raise
        return directory, mark

    def _check(self, root: Path, keep: int | None) -> None:
        """Refuse a save that cannot be what the user wants."""
        if keep is not None and keep < 1:
            raise UsageError(f"keep is {keep}", hint="keep at least 1 checkpoint, or pass None to keep all")
        for optimizer in self._engine.optimizers:
            if optimizer.is_in_window:
                raise UsageError(
                    "save inside an accumulation window: its gradients would be lost",
                    hint="save after the step() that closes the window, or call optimizer.flush() first",
                )
        if any(average.is_shown for _, average in self._engine.averages):
            raise UsageError(
                "save inside average.applied(): the model shows averages in place of its weights",
                hint="save outside; averages are part of every checkpoint",
            )
        check_root(root)

    def _collect(self, directory: Path, mark: str, *, extra: Any) -> Part:
        """Return what this rank writes, as views of where it lives."""
        engine, mesh = self._engine, self._engine.context.mesh
        places = places_by_key(engine)
        objects = []
        for name, model in engine.models.items():
            collected = model_holdings(engine, name, places=places)
            if name not in self._names_in_files:
                forms = {key: Form(spec.dtype, spec.shape) for key, spec in collected.specs.items()}
                self._names_in_files[name] = names_in_files(model, forms)
            renamed = self._names_in_files[name]
            hub = {"needs_conversion": renamed is None, "names": renamed or {}}
            objects.append(self._part_of(name, "model", collected, {**model_details(model), "hub": hub}))
        for index in range(len(engine.optimizers)):
            details = optimizer_details(engine, index)
            collected = optimizer_holdings(engine, index, places=places)
            objects.append(self._part_of(optimizer_name(index), "optimizer", collected, details))
        for index, (model_name, average) in enumerate(engine.averages):
            details = {"model": model_name, "decay": average.decay, "num_updates": average.num_updates}
            collected = average_holdings(engine, model_name, average)
            objects.append(self._part_of(average_name(index), "average", collected, details))
        head = Manifest(
            step=engine.num_steps,
            epoch=engine.epoch,
            samples=engine.shares.samples,
            objects={},
            files={},
            run=collect_run_state(engine),
            extra=pack_values(extra, "extra"),
            plan={"plan": engine.context.plan.to_dict(), "world_size": mesh.layout.world_size, "mark": mark},
            versions=_versions(),
            configurations=self._configurations(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        return Part(
            directory=directory,
            mark=mark,
            rank=mesh.rank,
            world_size=mesh.layout.world_size,
            objects=objects,
            random=random_text(),
            head=head,
        )

    def _configurations(self) -> dict[str, dict[str, str]]:
        """Return the configuration files of all models; on rank 0, whose manifest counts."""
        if self._engine.context.mesh.rank > 0:
            return {}
        found = {name: configuration_texts(model) for name, model in self._engine.models.items()}
        return {name: texts for name, texts in found.items() if texts}

    def _part_of(self, name: str, kind: Any, collected: Collected, details: Any) -> ObjectPart:
        """Return what this rank writes of one object."""
        mine = deal(collected.holdings, self._engine.context.mesh.rank)
        return ObjectPart(
            name=name,
            kind=kind,
            collected=Collected(specs=collected.specs, holdings=mine),
            details=details,
        )

    def _snapshot(self, part: Part) -> Part:
        """Return a part whose tensors are copies in host memory, which the next snapshot uses again."""
        copies = iter(self._copies)
        kept, objects = [], []
        for thing in part.objects:
            holdings = []
            for held in thing.collected.holdings:
                copy = next(copies, None)
                if copy is None or (copy.shape, copy.dtype) != (held.view.shape, held.view.dtype):
                    pinned = held.view.device.type == "cuda"
                    copy = torch.empty(held.view.shape, dtype=held.view.dtype, pin_memory=pinned)
                with held.present():
                    copy.copy_(held.view.detach(), non_blocking=True)
                kept.append(copy)
                holdings.append(evolve(held, view=copy, place=None))
            collected = Collected(specs=thing.collected.specs, holdings=holdings)
            objects.append(evolve(thing, collected=collected))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._copies = kept
        return evolve(part, objects=objects)

    def _publish_on_first(self, part: Part, keep: int | None) -> None:
        """Publish on rank 0."""
        if part.rank == 0:
            _publish(part, keep)

    def _conclude(self, *, wait: bool) -> None:
        """Agree whether the save is over everywhere, and raise its error everywhere."""
        job = self._background
        assert job is not None
        is_over = wait or not job.thread.is_alive()
        state = torch.tensor([float(is_over), float(is_over and job.error is not None)])
        mesh = self._engine.context.mesh
        state = state.to(mesh.device)
        self._engine.context.collectives.all_reduce(state, mesh.everyone(), phase="checkpoint").wait()
        num_over, num_failed = state.tolist()
        if num_over < mesh.layout.world_size:
            return
        job.thread.join()
        self._background = None
        if num_failed:
            clear_save(job.part.directory, job.part.mark)
            texts = self._engine.agreement.share(
                "failed save", "" if job.error is None else job.error.message
            )
            # Rank 0 may only have heard of it: the last one speaks for itself.
            rank, text = [(rank, text) for rank, text in enumerate(texts) if text][-1]
            raise CheckpointError(
                f"the save of {job.part.directory} that was started before this step failed on rank {rank}: "
                f"{text}",
                hint="earlier checkpoints are as they were",
            )
        self._engine.observers.after_checkpoint_saved(job.part.directory, job.part.head.step)


def check_root(root: Path) -> None:
    """Refuse what cannot hold the checkpoints of a run.

    Raises:
        UsageError: It is a file, or a checkpoint: ``load`` would take that one and not those inside.
    """
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root} is a file", hint="pass a directory; save() makes step-N inside")
    if (root / MANIFEST_NAME).is_file():
        raise UsageError(f"{root} is a checkpoint itself", hint=f"save into {root.parent}, or elsewhere")


def optimizer_name(index: int) -> str:
    """Return the name of an optimizer in a checkpoint, by its position in the ``boost`` call."""
    return f"optimizer_{index}" if index else "optimizer"


def average_name(index: int) -> str:
    """Return the name of a running average in a checkpoint, by the order in which they were made."""
    return f"average_{index}" if index else "average"


def _make(directory: Path, probe: Path, root: Path) -> None:
    """Make the directory of a save, with a file in it that other ranks look for.

    Raises:
        CheckpointError: The disk refuses.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_text("{}", encoding="utf-8")  # not synced: training waits here, and nobody reads it later
    except OSError as err:
        raise CheckpointError(
            f"cannot make {directory}: {err.strerror or err}", hint="choose a directory that can be written"
        ) from err
    newer = [path.name for step, path in find_complete(root) if step > int(directory.name.partition("-")[2])]
    if newer:
        warnings.warn(
            f"{root} holds {newer[0]}, which is newer than {directory.name}, so load({str(root)!r}) would "
            "take it. Save elsewhere when you go on from an older checkpoint, or delete the newer ones.",
            stacklevel=7,  # the line that calls save()
        )


def _see(probe: Path, rank: int) -> None:
    """Check that this rank sees what rank 0 has made.

    Raises:
        CheckpointError: It does not.
    """
    if not probe.is_file():
        raise CheckpointError(
            f"rank {rank} does not see {probe.parent}, which rank 0 has made",
            hint="save into a directory that all machines share",
        )


def _publish(part: Part, keep: int | None) -> None:
    """Join what all ranks have written, make it visible, and delete what is not to be kept."""
    notes = wait_for_parts(part, timeout_seconds=PARTS_TIMEOUT_SECONDS)
    publish(part.directory, join_parts(part.head, notes))
    retain(part.directory.parent, keep, part.head.step)


def _versions() -> dict[str, str]:
    """Return the versions that wrote a checkpoint."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "colossal-core": version("colossal-core"),
    }
