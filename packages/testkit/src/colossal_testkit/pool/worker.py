"""A worker: plays one rank of one job after the other, each time as if it had just started.

The main thread runs jobs. A second thread watches a socket of its own: it writes down what the rank is doing
when the parent asks, and ends the process when the parent is gone, even while the main thread is stuck in a
collective. A third one buries old process groups, whose destructors wait for gloo's threads for some 20 ms
(measured on two cores).
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import os
import queue
import random
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from colossal_testkit.pool import groups
from colossal_testkit.pool.failures import describe_failure
from colossal_testkit.pool.messages import Failure, Job, Ready, Report, Reset, WarningFilter
from colossal_testkit.pool.references import ModuleLoader
from colossal_testkit.pool.values import dumps, loads

__all__ = ["run_worker"]


def run_worker(
    *,
    control_descriptor: int,
    watch_descriptor: int,
    output_descriptor: int,
    listen_descriptor: int | None,
) -> NoReturn:
    """Serve jobs until the parent closes the control socket; never return.

    Args:
        control_descriptor: Socket of jobs and reports.
        watch_descriptor: Socket of requests for stacks; its end of file ends the process.
        output_descriptor: File that takes stdout and stderr.
        listen_descriptor: Listening socket of the rendezvous store, for the one worker that serves it.
    """
    _take_output(output_descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Works from C, so also when the main thread is stuck with the interpreter's lock in its hands.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    torch.set_num_interop_threads(1)
    # What the forkserver's imports registered is for no process in particular; from here on, see
    # `_end_program`.
    atexit._clear()  # noqa: SLF001 - no public name
    worker = _Worker(Connection(control_descriptor), listen_descriptor)
    threading.Thread(target=_watch, args=(watch_descriptor, worker), name="watch", daemon=True).start()
    worker.serve()
    os._exit(0)


def _take_output(descriptor: int) -> None:
    """Send everything that this process prints to its output file, native code included."""
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a descriptor for dup2, not a path to work with
        os.dup2(nothing.fileno(), 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # The forkserver's streams stay in use; the descriptors below them are what changed.
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = os.fdopen(number, "w", buffering=1, errors="backslashreplace", closefd=False)
        setattr(sys, name, stream)
    faulthandler.enable(file=sys.stderr)


def _watch(descriptor: int, worker: _Worker) -> None:
    """Write down the latest collectives of this rank on request; end the process when the parent is gone."""
    with socket.socket(fileno=descriptor) as requests:
        while requests.recv(1):
            for line in groups.describe_latest(worker.started_ns):
                sys.stderr.write(f"{line}\n")
            requests.sendall(b".")
    os._exit(1)


class _Worker:
    """One rank's processes, store and loaded files, for the life of the process."""

    def __init__(self, control: Connection, listen_descriptor: int | None) -> None:
        """Remember the sockets; the store is opened with the first job."""
        self._control = control
        self._listen_descriptor = listen_descriptor
        self.started_ns = 0
        self._store: TCPStore | None = None
        self._job_store: TCPStore | None = None
        self._modules = ModuleLoader()
        self._graveyard: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=self._bury, name="bury", daemon=True).start()

    def serve(self) -> None:
        """Answer messages until the parent closes its end."""
        while True:
            try:
                message = loads(self._control.recv_bytes())
            except EOFError:
                return
            answer: Report | Ready
            if isinstance(message, Job):
                answer = self._run(message)
            elif isinstance(message, Reset):
                answer = self._reset()
            else:
                answer = Ready(problem=f"unknown message {message!r}")
            sys.stdout.flush()
            sys.stderr.flush()
            self._control.send_bytes(dumps(answer))

    def _run(self, job: Job) -> Report:
        """Run one job from a clean state and report, whatever it does."""
        result: bytes | None = None
        failure: Failure | None = None
        self.started_ns = time.time_ns()
        try:
            self._prepare(job)
            result = _call(self._modules, job)
        except BaseException as err:  # noqa: BLE001 - border of the process: all goes to the parent
            failure = describe_failure(err, file=job.reference.module.file)
        ended = time.monotonic()
        records = groups.list_groups(self.started_ns)
        return Report(rank=job.rank, time=ended, result=result, failure=failure, groups=records)

    def _prepare(self, job: Job) -> None:
        """Take over the parent's surroundings, reset ambient state, and open the job's process group."""
        os.environ.clear()
        os.environ.update(job.environment)
        os.chdir(job.directory)
        sys.path[:] = job.import_path
        _reset_torch()
        _seed(job.seed)
        if self._store is None:
            self._store = self._open_store(job.store_port)
        if job.makes_group:
            dist.init_process_group(
                "gloo",
                store=PrefixStore(f"job{job.number}", self._store),
                rank=job.rank,
                world_size=job.num_ranks,
                # Longer than the parent waits: a hang is the parent's to report, with the stacks of all
                # ranks.
                timeout=timedelta(seconds=job.timeout_seconds + 30),
            )
        else:
            os.environ["MASTER_PORT"] = str(self._serve_job(job, self._store))

    def _serve_job(self, job: Job, store: TCPStore) -> int:
        """Return the port of a store for this job alone, since torch puts no prefix before its keys there."""
        key = f"port{job.number}"
        if job.rank == 0:
            self._job_store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
            store.set(key, str(self._job_store.port))
        return int(store.get(key))

    def _open_store(self, port: int) -> TCPStore:
        """Serve the rendezvous store of the crew, or connect to it."""
        serves = self._listen_descriptor is not None
        return TCPStore(
            "127.0.0.1",
            port,
            None,
            serves,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
            master_listen_fd=self._listen_descriptor,
        )

    def _reset(self) -> Ready:
        """Take the groups of the last job down and forget what it left."""
        _end_program()
        self._graveyard.put([groups.take_down(), self._job_store])
        self._job_store = None
        _reset_torch()
        gc.collect()
        return Ready()

    def _bury(self) -> None:
        """Drop old process groups, one job's after the other, off the path of the next job."""
        while True:
            dead = self._graveyard.get()
            del dead


def _end_program() -> None:
    """Do what the end of a program would do: run exit handlers, and forget that it was launched.

    Handlers hold on to what they finish, so without this models and groups of every job would stay alive.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - no public name
    launcher = sys.modules.get("colossal_core.runtime.launch")
    if launcher is not None:
        vars(launcher)["_launched"] = None


def _call(modules: ModuleLoader, job: Job) -> bytes:
    """Load the function and its arguments, call it, and return its pickled result."""
    modules.forget_changed()
    function = modules.resolve(job.reference)
    for needed in job.modules:
        modules.load(needed)
    args, kwargs = cast("tuple[tuple[object, ...], dict[str, object]]", loads(job.payload))
    with warnings.catch_warnings():
        _install_filters(job.filters)
        result = function(*args, **kwargs)
    try:
        return dumps(result)
    except Exception as err:
        message = (
            f"the result of {job.reference.qualname!r} on rank {job.rank} cannot be sent back: {err}. "
            f"Return plain values and tensors."
        )
        raise TypeError(message) from err


def _install_filters(filters: Sequence[WarningFilter]) -> None:
    """Make warnings mean what they mean in the parent; skip those whose category cannot be imported here."""
    warnings.resetwarnings()
    for entry in filters:
        try:
            category = getattr(importlib.import_module(entry.category_module), entry.category_name)
        except (ImportError, AttributeError):
            continue
        # The action is one of the known words, since the parent's own filters were checked when they were
        # made.
        action: Any = entry.action
        warnings.filterwarnings(action, entry.message, category, entry.module, entry.line, append=True)


def _seed(seed: int) -> None:
    """Start every generator alike on all ranks."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _reset_torch() -> None:
    """Set the modes of torch that a test may have left changed back to those of a new process."""
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_autocast_enabled("cpu", False)
    torch.clear_autocast_cache()
    torch.set_float32_matmul_precision("highest")
    torch.set_flush_denormal(False)
