"""What ``colossal doctor`` looks at in core: torch, devices, backends, compilers, the network of one machine.

Every check is a function without arguments that returns findings. A check that finds nothing wrong says in a
note what it saw, because that is what people paste into reports.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from colossal_core.errors import ColossalError
from colossal_core.placement import LOOPBACK, read_placement
from colossal_core.plugins.records import Finding, Severity

__all__ = [
    "check_backends",
    "check_compilers",
    "check_devices",
    "check_environment",
    "check_network",
    "check_torch",
]

_OLDEST_TORCH = (2, 11)  # the floor of colossal-core's own requirement
_LEAST_SHARED_BYTES = 64 * 2**20  # docker's default, with which loaders that use workers die


def _find(severity: Severity, code: str, message: str, hint: str = "") -> Finding:
    """Return a finding."""
    return Finding(severity=severity, code=code, message=message, hint=hint)


def check_torch() -> Iterator[Finding]:
    """Check that torch is recent enough and was built with what runs on many ranks."""
    version = torch.__version__
    numbers = tuple(int(part) for part in version.partition("+")[0].split(".")[:2] if part.isdigit())
    if numbers < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        yield _find("error", "torch-version", f"torch is {version}, expected at least {oldest}")
    if not dist.is_available():
        yield _find("error", "torch-distributed", f"torch {version} was built without torch.distributed")
    yield _find("note", "torch-version", f"torch {version}, python {platform.python_version()}")


def check_devices() -> Iterator[Finding]:
    """Check that the accelerators of this machine can be used, and how many threads a rank would get."""
    count = torch.cuda.device_count()
    if count and not torch.cuda.is_available():
        yield _find("error", "devices", f"{count} CUDA devices are there, but torch cannot use them")
    for index in range(count if torch.cuda.is_available() else 0):
        try:
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as err:
            reason = str(err).partition("\n")[0]
            yield _find("error", "devices", f"cuda:{index} does not answer: {reason}")
        else:
            name = torch.cuda.get_device_name(index)
            message = f"cuda:{index} is {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
            yield _find("note", "devices", message)
    if not count and any(Path("/dev").glob("nvidia[0-9]*")):
        yield _find(
            "warning", "devices", f"this machine has an NVIDIA GPU, but torch {torch.__version__} shows none"
        )
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    message = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads here, OMP_NUM_THREADS {threads}"
    yield _find("note", "devices", message)


def check_backends() -> Iterator[Finding]:
    """Check that ranks of this machine could talk to each other."""
    if not dist.is_available():
        return
    present = [
        name for name, has in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if has
    ]
    if "gloo" not in present:
        yield _find("error", "backends", "torch was built without gloo, which every CPU run needs")
    if torch.cuda.is_available() and "nccl" not in present:
        yield _find("warning", "backends", "CUDA is available, but torch was built without nccl")
    yield _find("note", "backends", f"backends: {', '.join(present) or 'none'}")


def check_compilers() -> Iterator[Finding]:
    """Check for what builds CPU kernels: a C++ compiler and ninja. Without them, plain torch is used."""
    chosen = os.environ.get("CXX", "")
    compiler = (
        shutil.which(chosen.split()[0]) if chosen.split() else shutil.which("c++") or shutil.which("g++")
    )
    if compiler is None:
        where = f"CXX is {chosen!r}, which does not exist" if chosen else "no c++ or g++ on PATH"
        yield _find("warning", "compilers", f"{where}; compiled CPU kernels cannot be built")
    ninja = shutil.which("ninja")
    if ninja is None:
        yield _find(
            "note", "compilers", "no ninja on PATH; compiled CPU kernels are built one file at a time"
        )
    if compiler is not None:
        yield _find("note", "compilers", f"compiler {compiler}, ninja {ninja or 'missing'}")


def check_network() -> Iterator[Finding]:
    """Check the loopback interface and the places that ranks and loader workers share."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname(), 5):
            pass
    except OSError as err:
        yield _find("error", "network", f"no connection over {LOOPBACK}: {err}")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(name, "").lstrip("^=")
        present = [interface for _, interface in socket.if_nameindex()]
        missing = [
            part for part in wanted.split(",") if part and not any(p.startswith(part) for p in present)
        ]
        if missing:
            message = f"{name} names {missing[0]!r}, but this machine has {', '.join(present)}"
            yield _find("error", "network", message, f"unset {name}, or name one of these")
    shared = Path("/dev/shm")  # noqa: S108 - looked at, never written to
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        if free <= _LEAST_SHARED_BYTES:
            message = f"{shared} has {free / 2**20:.0f} MiB free, too little for loaders with workers"
            yield _find("warning", "network", message, "start the container with --shm-size=1g or --ipc=host")
    temporary = Path(tempfile.gettempdir())
    if not os.access(temporary, os.W_OK):
        yield _find("error", "network", f"{temporary} cannot be written to", "set TMPDIR")


def check_environment() -> Iterator[Finding]:
    """Check that ``launch`` would understand the variables that a launcher left in the environment."""
    try:
        placement = read_placement()
    except ColossalError as err:
        yield _find("error", "environment", err.message, err.hint)
        return
    if placement.world_size > 1:
        message = f"{placement.origin} says: rank {placement.rank} of {placement.world_size}"
        yield _find("note", "environment", message)
