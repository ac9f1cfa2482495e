"""The calls of a Booster that keep and restore a run.

The one idea: what a run is, on disk, has nothing to do with how it is computed, so these calls stand by
themselves; they only need what ``boost`` has built.
"""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossal_core.checkpoint.export_directory import MAX_SHARD_BYTES
from colossal_core.runtime.checkpointing.exporting import export_model
from colossal_core.runtime.checkpointing.importing import import_model
from colossal_core.runtime.checkpointing.restoring import load_checkpoint
from colossal_core.runtime.checkpointing.stopping import Stopping

if TYPE_CHECKING:
    import torch
    from torch import nn

    from colossal_core.runtime.averages import Average
    from colossal_core.runtime.checkpointing.report import Loaded, LoadReport
    from colossal_core.runtime.engine import Engine

__all__ = ["StateCalls"]


class StateCalls(ABC):
    """Saving, loading and counting; a base of :class:`~colossal_core.Booster`."""

    @abstractmethod
    def _built(self, name: str) -> Engine:
        """Return the engine, or say that ``boost`` comes first."""

    # --- checkpoints ----------------------------------------------------------------------------------------

    def save(
        self,
        root: str | os.PathLike[str],
        *,
        extra: Any = None,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> Path:
        """Write a checkpoint of everything that was boosted into ``root/step-N``; collective over all ranks.

        It holds models, optimizers, running averages, schedulers, positions of loaders, the loss scale,
        random state and counters, so a run that loads it goes on as if it had not stopped. Call it between a
        step and the next backward: gradients are not kept. It appears at once, when everything is on the
        disk; whatever interrupts it leaves earlier checkpoints as they were.

        Args:
            root: A directory that all ranks see; made when it is not there.
            extra: Plain values and tensors of your own, nested; :meth:`load` gives them back. Equal on all
                ranks; those of rank 0 are kept.
            keep: Delete older checkpoints under ``root`` beyond this number; None keeps all.
            asynchronous: Return as soon as the state is copied, and write beside training. At most one such
                save is under way: the next one waits for it. Its errors are raised at the next step, or by
                :meth:`wait_for_save`.

        Returns:
            ``root/step-N``, N being :attr:`step`.

        Raises:
            UsageError: An accumulation window is open, ranks pass different directories, or ``root`` is a
                file or a checkpoint.
            CheckpointError: The disk refuses, or ranks do not see one directory; on every rank.
        """
        engine = self._built("save")
        with engine.reporting():
            return engine.saver.save(_absolute(root), extra=extra, keep=keep, asynchronous=asynchronous)

    def wait_for_save(self) -> None:
        """Wait until the save that was started with ``asynchronous=True`` is complete; collective.

        Raises:
            CheckpointError: It failed on some rank; on every rank.
        """
        engine = self._built("wait_for_save")
        with engine.reporting():
            engine.saver.finish()

    def save_on_signal(
        self,
        root: str | os.PathLike[str],
        *,
        extra: Callable[[], Any] | None = None,
        keep: int | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
    ) -> None:
        """Save and exit with code 143 when any rank gets a signal, as schedulers of clusters send one.

        All ranks agree at the next step; the save happens when the next iteration begins: when a boosted
        loader is asked for the next batch, else with the next forward in training mode. A second signal does
        what it would have done without this call. Costs a message of 4 bytes at each step.

        Args:
            root: As for :meth:`save`.
            extra: Returns what :meth:`save` takes as ``extra``; called at that moment.
            keep: As for :meth:`save`.
            signals: Which signals.

        Raises:
            UsageError: This is not the main thread, or ``root`` is a file or a checkpoint.
        """
        engine = self._built("save_on_signal")
        if engine.stopping is not None:
            engine.stopping.close()
        engine.stopping = Stopping(engine, _absolute(root), signals=signals, extra=extra, keep=keep)

    def load(
        self, root: str | os.PathLike[str], *, missing_ok: bool = False, strict: bool = True
    ) -> Loaded | None:
        """Bring everything that was boosted where it was when it was saved; collective over all ranks.

        The plan and the number of ranks may be other ones than those that saved: each rank reads what it
        needs. On the same layout a run goes on bit for bit; on another one with the same samples in the same
        order.

        Args:
            root: A directory of checkpoints, of which the newest complete one is taken, or exactly one
                ``step-N`` directory.
            missing_ok: Return None when there is none, as at the first start of a run.
            strict: Refuse what does not fit exactly, before anything is changed. Otherwise load what fits,
                and say in the report what did not.

        Returns:
            Where the run goes on, with ``extra`` and a report.

        Raises:
            CheckpointError: There is none, it is damaged, or it does not fit; on every rank. When a file
                turns out to be damaged while it is read, what was boosted is left partly loaded.
        """
        engine = self._built("load")
        with engine.reporting():
            engine.saver.finish()
            return load_checkpoint(
                engine, _absolute(root), engine.saver.agreement, missing_ok=missing_ok, strict=strict
            )

    # --- weights --------------------------------------------------------------------------------------------

    def export(
        self,
        model: nn.Module,
        directory: str | os.PathLike[str],
        *,
        dtype: str | torch.dtype | None = None,
        max_file_bytes: int = MAX_SHARD_BYTES,
        average: Average | None = None,
    ) -> Path:
        """Write a model as plain safetensors files, as ``from_pretrained`` reads them; collective.

        Tensors have their serial names, or those of the hub for models of transformers; tied ones are written
        once; configuration files lie beside. Readers see an earlier export until this one is complete.

        Args:
            model: A boosted model.
            directory: Where to: missing, empty, or an earlier export, on a disk that all ranks see.
            dtype: Dtype of floating tensors, ``"bf16"`` for example; that of the masters when None.
            max_file_bytes: Bytes of tensors in one file; what is larger is divided, with an index.
            average: A running average of the model, written in place of its parameters.

        Returns:
            The directory, complete.

        Raises:
            CheckpointError: The directory holds foreign files or is not shared, or the disk refuses; on every
                rank.
        """
        engine = self._built("export")
        model = engine.models[engine.name_of(model)]
        with engine.reporting():
            return export_model(
                engine,
                model,
                _absolute(directory),
                dtype=dtype,
                max_file_bytes=max_file_bytes,
                average=average,
            )

    def import_weights(
        self, model: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True
    ) -> LoadReport:
        """Read weights that others have written into a boosted model; collective over all ranks.

        Each rank reads the rows that it holds, under any plan. Masters take the stored values, 16-bit values
        are rounded from them; states of optimizers stay as they are.

        Args:
            model: A boosted model.
            directory: A directory with ``model.safetensors``, or an index and its files, or one such file.
            strict: Refuse missing, unexpected and differently shaped tensors. Otherwise they are reported,
                and what the files do not give stays as it is.

        Returns:
            What was found.

        Raises:
            CheckpointError: Files are missing, damaged or no safetensors files, or do not fit; on every rank.
        """
        engine = self._built("import_weights")
        model = engine.models[engine.name_of(model)]
        with engine.reporting():
            return import_model(engine, model, _absolute(directory), strict=strict)

    # --- counters -------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Real steps so far, of the first optimizer; restored by :meth:`load`."""
        engine = self._engine
        return 0 if engine is None else engine.num_steps

    @property
    def epoch(self) -> int:
        """Epoch of the loader that training reads, from 0; restored by :meth:`load`.

        The one that is being given, until its loop has ended; between two of them that which comes next.
        That loader is the boosted one that gave the batch of the last step, before the first step the first
        one; 0 without a boosted loader.
        """
        return 0 if self._engine is None else self._engine.epoch

    @property
    def samples(self) -> int:
        """Samples of all ranks that training has used up; restored by :meth:`load`.

        Counted by boosted loaders, at each step of the first optimizer, skipped steps included; a loop over
        an evaluation set counts nothing.
        """
        return 0 if self._engine is None else self._engine.shares.samples

    _engine: Engine | None


def _absolute(path: str | os.PathLike[str]) -> Path:
    """Return a path that stays valid when the working directory changes; links in it stay what they are."""
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
