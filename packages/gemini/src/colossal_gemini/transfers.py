"""Transfers: bytes on their way from one memory to another, while something else runs.

Who starts one keeps both ends alive and unchanged until it has *finished*. *Waiting* makes the target usable
by what is computed next, which on an accelerator is earlier: its stream waits, not this thread.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Protocol, final

import torch

from colossal_core.errors import ColossalError, DiskTierError

__all__ = ["Copier", "Transfer", "Work"]


class Transfer(Protocol):
    """Bytes on their way."""

    def wait(self) -> None:
        """Return when what is computed next may use the target.

        Raises:
            ColossalError: The transfer failed; what the target holds is undefined. Raised at each call.
        """

    def finish(self) -> None:
        """Return when neither end is touched any more. Raises nothing."""


@final
class Work:
    """A transfer that a thread of ours carries out."""

    def __init__(self, future: Future[None]) -> None:
        """Follow a future."""
        self._future = future

    def wait(self) -> None:
        """Return when it is done; raises what the thread raised."""
        try:
            self._future.result()
        except CancelledError as err:
            raise DiskTierError("the transfer was not carried out: its tier has been closed") from err

    def finish(self) -> None:
        """Return when it is done, however it ended."""
        with contextlib.suppress(ColossalError, CancelledError):
            self._future.result()


@final
class _Streamed:
    """A transfer that an accelerator carries out on a stream of its own."""

    def __init__(self, module: Any, event: Any, *, is_read_by_host: bool) -> None:
        """Follow an event; ``module`` is what torch calls the module of the device."""
        self._module = module
        self._event = event
        self._is_read_by_host = is_read_by_host

    def wait(self) -> None:
        """Let the current stream wait, and this thread too when the target is host memory."""
        self._module.current_stream().wait_event(self._event)
        if self._is_read_by_host:
            self._event.synchronize()

    def finish(self) -> None:
        """Let this thread wait."""
        self._event.synchronize()


def _copy_memory(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy host memory; lets other threads run meanwhile."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


@final
class Copier:
    """Copies between memories, one after another, beside what is computed.

    Between host memories a thread copies, else a stream. Neither bumps the version of the target: it gets
    values that it had, or that its owner announces.
    """

    def __init__(self) -> None:
        """Start nothing yet."""
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, Any] = {}

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Begin to copy between contiguous tensors of one dtype and size; both stay as they are meanwhile."""
        if source.device.type == target.device.type == "cpu":
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="colossal-copy")
            return Work(self._thread.submit(_copy_memory, source, target))
        device = target.device if source.device.type == "cpu" else source.device
        with self.beside(device):
            target.data.copy_(source, non_blocking=True)
        return self._mark(device, is_read_by_host=target.device.type == "cpu")

    def mark(self, device: torch.device) -> Transfer | None:
        """Return what has been asked for beside a device so far, as a transfer; None where that is done."""
        return None if device.type == "cpu" else self._mark(device, is_read_by_host=False)

    def _mark(self, device: torch.device, *, is_read_by_host: bool) -> Transfer:
        """Return the stream of a device up to here, as a transfer."""
        event = self._streams[device].record_event()
        return _Streamed(torch.get_device_module(device), event, is_read_by_host=is_read_by_host)

    @contextlib.contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Let an accelerator do what is asked for within a context beside what it computes, once that is due.

        Whoever uses the results has its stream wait. Elsewhere nothing changes.
        """
        if device.type == "cpu":
            yield
            return
        module = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream(device=device)
        stream = self._streams[device]
        stream.wait_stream(module.current_stream(device))
        with module.stream(stream):
            yield

    def copies_now(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Copy on this thread, where it is what copies, and return whether it is."""
        if not source.device.type == target.device.type == "cpu":
            return False
        _copy_memory(source, target)
        return True

    def close(self) -> None:
        """End the thread once it has carried out what was started."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
