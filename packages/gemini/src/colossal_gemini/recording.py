"""Writing down what a step uses while it runs.

The one idea: whoever brings chunks tells the recorder what is needed and which gradients are held, and the
recorder reads meanwhile how much memory everything else takes. On the CPU, and for fake tensors, that is
counted storage by storage; on CUDA the allocator knows it, at no cost.

What is called between two needs of the same chunks is one moment: modules of one unit, and what autograd
saved of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol, final

import torch
from attrs import define, evolve

from colossal_core.runtime.live import LiveStorages
from colossal_gemini.trace import Chunk, Moment, Trace

__all__ = ["Recorder"]

Phase = Literal["forward", "backward", "update"]


class _Meter(Protocol):
    """Reads how much memory everything takes that is no chunk."""

    def begin(self, existing: Iterable[torch.Tensor]) -> None:
        """Begin to read."""

    def take_peak(self) -> int:
        """Return the most since the last call, and begin again at what is there now."""

    def end(self) -> None:
        """Read no more, or not for a while."""

    def resume(self) -> None:
        """Go on to read."""


@final
class _Counter:
    """Counts storages; see :class:`~colossal_core.runtime.live.LiveStorages`."""

    def __init__(self, excludes: Callable[[torch.Tensor], bool]) -> None:
        """Begin with nothing."""
        self._live = LiveStorages(excludes=excludes)

    def begin(self, existing: Iterable[torch.Tensor]) -> None:
        """Enter the dispatch mode."""
        self._live.add(existing)
        self._live.resume()

    def take_peak(self) -> int:
        """Return the most since the last call."""
        peak = self._live.peak
        self._live.reset_peak()
        return peak

    def end(self) -> None:
        """Leave the dispatch mode."""
        self._live.pause()

    def resume(self) -> None:
        """Enter the dispatch mode again."""
        self._live.resume()


@final
class _Allocator:
    """Reads the statistics of CUDA's allocator, which counts chunks as well."""

    def __init__(self, device: torch.device, chunk_bytes: Callable[[], int]) -> None:
        """Know the device.

        Args:
            device: A CUDA device.
            chunk_bytes: What chunks take of the allocator's memory now.
        """
        self._device, self._chunk_bytes = device, chunk_bytes
        self._held = 0

    def begin(self, existing: Iterable[torch.Tensor]) -> None:
        """Begin with what is there."""
        del existing  # the allocator knows it
        self._reset()

    def take_peak(self) -> int:
        """Return the most since the last call.

        Chunks that came meanwhile are not counted: what they and the rest took at one time is unknown, and
        the rest is what is wanted.
        """
        peak: int = torch.cuda.max_memory_allocated(self._device)
        found = max(0, peak - max(self._held, self._chunk_bytes()))
        self._reset()
        return found

    def end(self) -> None:
        """Nothing has to be undone."""

    def resume(self) -> None:
        """The statistics have gone on."""

    def _reset(self) -> None:
        """Begin again."""
        self._held = self._chunk_bytes()
        torch.cuda.reset_peak_memory_stats(self._device)


@define
class _Open:
    """A moment that has not ended.

    Attributes:
        moment: What is known of it.
        gradients: Those that were held at one time, when they took most.
        flop: Operations so far.
    """

    moment: Moment
    gradients: frozenset[int]
    flop: int = 0


@final
class Recorder:
    """Records one step.

    ::

    recorder = Recorder(chunks, key=key, excludes=lies_in_a_chunk)
    recorder.begin([*buffers, *batch])
    recorder.moment("transformer.h.0", "forward", needs)   # at each need, before its values come
    recorder.hold_gradient(chunk)                          # when its unreduced gradient gets memory
    recorder.drop_gradient(chunk)                          # when that is given back
    trace = recorder.finish()                              # after backward; the update is added
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        key: str,
        excludes: Callable[[torch.Tensor], bool],
        device: torch.device | None = None,
        chunk_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """Know the chunks.

        Args:
            chunks: All of them.
            key: What the trace will hold for.
            excludes: Whether a tensor lies in a chunk: values or gradients; asked once for each storage. Not
                used on CUDA.
            device: Where the model computes.
            chunk_bytes: On CUDA what chunks take of the allocator's memory now.
        """
        self._chunks, self._key = tuple(chunks), key
        self._is_recording = False
        self._moments: list[Moment] = []
        self._open: _Open | None = None
        self._held: set[int] = set()
        self._meter: _Meter
        if device is not None and device.type == "cuda" and torch.cuda.is_available():
            self._meter = _Allocator(device, chunk_bytes)
        else:
            self._meter = _Counter(excludes)

    def begin(self, existing: Iterable[torch.Tensor] = ()) -> None:
        """Begin to record, with nothing needed yet.

        Args:
            existing: Tensors of before that take memory while the step runs: buffers, the batch.
        """
        self._is_recording = True
        self._meter.begin(existing)

    def moment(self, name: str, phase: Phase, needs: Iterable[int]) -> None:
        """Note a need; it begins a moment unless it is that of the moment that runs.

        Args:
            name: What needs it: the name of a unit.
            phase: Pass of the step.
            needs: Chunks whose values have to be there.
        """
        wanted = tuple(sorted(set(needs)))
        if self._open is not None:
            now = self._open.moment
            if (now.name, now.phase, now.needs) == (name, phase, wanted):
                return
        self._close()
        self._open = _Open(Moment(name=name, phase=phase, needs=wanted), frozenset(self._held))

    def hold_gradient(self, chunk: int) -> None:
        """Note that the unreduced gradient of a chunk has memory from now on.

        Where backward has needed no values yet, it is what begins its first moment.
        """
        if self._open is not None and self._open.moment.phase == "forward":
            self.moment(self._chunks[chunk].name, "backward", ())
        self._held.add(chunk)
        if self._open is not None and self._bytes_of(self._held) >= self._bytes_of(self._open.gradients):
            self._open.gradients = frozenset(self._held)

    def drop_gradient(self, chunk: int) -> None:
        """Note that it has none any more; in the moment that runs, what took most at one time counts."""
        self._held.discard(chunk)

    def _bytes_of(self, chunks: Iterable[int]) -> int:
        """Return what the unreduced gradients of chunks take."""
        return sum(self._chunks[chunk].whole_bytes for chunk in chunks)

    def add_flop(self, number: int) -> None:
        """Count floating point operations towards the moment that runs."""
        if self._open is not None:
            self._open.flop += number

    def pause(self) -> None:
        """Read nothing until :meth:`resume`: what comes may be anything, and the step may never go on."""
        if self._is_recording:
            self._meter.end()

    def resume(self) -> None:
        """Go on after :meth:`pause`; without effect otherwise."""
        if self._is_recording:
            self._meter.resume()

    def cancel(self) -> None:
        """Stop, as after an error; nothing of what was recorded is kept."""
        if self._is_recording:
            self._is_recording = False
            self._meter.end()
        self._moments.clear()
        self._open = None
        self._held.clear()

    def finish(self, *, has_update: bool = True) -> Trace:
        """Stop, and return the trace.

        Args:
            has_update: Whether the step ends with an update, which is added; an evaluation has none.
        """
        self._close()
        self._held.clear()
        if has_update and not (self._moments and self._moments[-1].phase == "update"):
            self.moment("update", "update", ())
            self._close()
        moments = tuple(self._moments)
        self.cancel()
        return Trace(key=self._key, chunks=self._chunks, moments=moments)

    def _close(self) -> None:
        """End the moment that runs; what was there before the first one counts towards it."""
        if self._open is None:
            return
        gradients = tuple(sorted(self._open.gradients))
        other, flop = self._meter.take_peak(), self._open.flop
        self._moments.append(evolve(self._open.moment, gradients=gradients, other=other, flop=flop))
        self._open = None
