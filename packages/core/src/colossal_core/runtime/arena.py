"""Arenas: tiers of memory with a budget in bytes, whose blocks come and go under tensors that stay.

The one idea: a block is address space for as long as it exists, and memory only while it is held.
Parameters, their views and what autograd saved of them keep their addresses, so nothing has to be pointed
anew when memory comes back; and what is released is gone from the process at once, since no allocator keeps
it.

# Note [Blocks in host memory]
A block is an anonymous private mapping. Reserved or released it is ``PROT_NONE``: no pages, and nothing
that counts towards ``RLIMIT_DATA`` or the commit limit (towards ``RLIMIT_AS`` it counts, as any address
space does). Acquiring makes it writable, which is where the kernel refuses what exceeds a limit, instead of
killing the process later. Releasing maps fresh ``PROT_NONE`` over it, one call that gives back pages and
accounts.

New pages have to be zeroed, and taking that fault for each 4 KiB costs more than the transfer that follows.
Copying 16 MiB into memory that is there took 0.7 ms, into a new block 20.5 ms with plain pages, 1.4 ms with
``MADV_HUGEPAGE``, 1.1 ms with that and ``MADV_POPULATE_WRITE``, which is what is done here. Moving pages of
a released block with ``mremap`` would save the last 0.4 ms, but only by keeping what was given back.
(November 2026, x86-64 virtual machine, Linux 6.18.)

# Note [Blocks on accelerators]
Elsewhere the storage of a tensor is resized to nothing and back. Views share the storage, so they stay valid
objects as well, but torch lets new ones be taken only while the block is held. The allocator of the device
may keep what is released, for the next block of that size.

# Note [Hard limits]
Under ``RLIMIT_DATA`` other things count beside blocks: 8 MiB of stack for each thread, and the heap. glibc
raises the size from which it maps blocks to the largest that was freed, up to 32 MiB, and does not use a
freed block of its heap for the next aligned one of that size. So the optimizer states that a first update
makes, chunk by chunk, stay there although they have moved into blocks of an arena. :func:`map_large_blocks`
fixes that size to 1 MiB. Its price are new pages for each tensor beyond it, 1.7 us for 4 KiB (two cores of a
virtual machine, November 2026), so it is for processes with a limit only.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, final

import torch

from colossal_core.errors import MemoryBudgetError

__all__ = ["Arena", "Block", "bytes_of_storage", "is_limited", "map_large_blocks"]

_PAGE = mmap.PAGESIZE
_HUGE = 2 << 20
"""Huge pages of x86-64, and of arm64 with pages of 4 KiB; elsewhere aligning to it does no harm."""

_MAP_FIXED = 0x10
"""The same on Linux and macOS; Python's mmap module does not name it."""

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
"""Of Linux; the second since 5.14. Kernels that do not know them refuse, and pages come one by one."""

_SHOWN_HOLDERS = 3
"""Holders that an error about the budget names."""


_HELD = "colossal_held_bytes"
"""Attribute of the storages of blocks: bytes that are there, which their size does not tell."""


def bytes_of_storage(storage: torch.UntypedStorage) -> int:
    """Return the bytes of memory that a storage has now, be it that of a block or any other."""
    found: int = getattr(storage, _HELD, -1)
    return storage.nbytes() if found < 0 else found


class _Memory(Protocol):
    """The memory of one block."""

    tensor: torch.Tensor

    def acquire(self) -> None:
        """Have memory; raises OSError or an error of torch when there is none."""

    def release(self) -> None:
        """Give the memory back."""

    def alias(self) -> torch.Tensor:
        """Return the memory as a tensor with a storage of its own, where that can be."""


def _load_libc() -> Any:
    """Return the C library with the signatures of what is called here, or None where it has no mmap."""
    if sys.platform not in {"linux", "darwin"}:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    size, number, address = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [address, size]
    libc.mprotect.argtypes = [address, size, number]
    libc.madvise.argtypes = [address, size, number]
    return libc


_LIBC = _load_libc()

_M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt."""

_MAPPED_BYTES = 1 << 20
"""Blocks of malloc that are mapped each by itself where a limit counts; see Note [Hard limits]."""


def is_limited() -> bool:
    """Whether the system refuses this process memory beyond a limit (``RLIMIT_DATA``, ``RLIMIT_AS``)."""
    if sys.platform not in {"linux", "darwin"}:
        return False
    import resource

    kinds = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    return any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in kinds)


def map_large_blocks() -> bool:
    """Let malloc give large blocks back to the system as they are freed; see Note [Hard limits].

    Returns:
        Whether the C library does so from now on. It holds for the process, and cannot be undone.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(_LIBC, "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES))


def _map_nothing(address: int | None, nbytes: int) -> int:
    """Map address space without memory, over what was at ``address`` if given, and return where it is."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if address is None else _MAP_FIXED)
    found: int | None = _LIBC.mmap(address, nbytes, 0, flags, -1, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: {nbytes} bytes of address space")
    return found


def _reserve_aligned(nbytes: int) -> int:
    """Return the address of so many bytes of address space, aligned to huge pages where they can be used."""
    slack = _HUGE if nbytes >= _HUGE else 0
    start = _map_nothing(None, nbytes + slack)
    if not slack:
        return start
    address = -(-start // _HUGE) * _HUGE
    for edge, size in ((start, address - start), (address + nbytes, start + slack - address)):
        if size:
            _LIBC.munmap(edge, size)
    return address


class _Mapped:
    """Pages of the system; see Note [Blocks in host memory].

    The mapping lives for as long as any tensor can see it, and is leaked rather than torn down when the
    interpreter ends first.
    """

    def __init__(self, numel: int, dtype: torch.dtype, *, is_pinned: bool) -> None:
        """Reserve the addresses."""
        self.nbytes = -(-numel * dtype.itemsize // _PAGE) * _PAGE
        self._is_pinned = is_pinned
        self._is_registered = False
        self._address = _reserve_aligned(self.nbytes)
        self._buffer = buffer = (ctypes.c_byte * self.nbytes).from_address(self._address)
        self.tensor = torch.frombuffer(buffer, dtype=dtype, count=numel)
        # torch holds the buffer with the storage, so this runs when the last view is gone, and not at exit.
        weakref.finalize(buffer, _LIBC.munmap, self._address, self.nbytes).atexit = False

    def acquire(self) -> None:
        """Make the pages usable and have them all."""
        if _LIBC.mprotect(self._address, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        if sys.platform == "linux":
            _LIBC.madvise(self._address, self.nbytes, _MADV_HUGEPAGE)
            _LIBC.madvise(self._address, self.nbytes, _MADV_POPULATE_WRITE)
        if self._is_pinned:
            self._is_registered = _register(self._address, self.nbytes)

    def release(self) -> None:
        """Give the pages back."""
        if self._is_registered:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._is_registered = False
        _map_nothing(self._address, self.nbytes)

    def alias(self) -> torch.Tensor:
        """Return another tensor over the mapping."""
        return torch.frombuffer(self._buffer, dtype=self.tensor.dtype, count=self.tensor.numel())


def _register(address: int, nbytes: int) -> bool:
    """Lock pages for transfers of CUDA and return whether that worked; it is faster, and never necessary."""
    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
        return True
    warnings.warn(
        f"the system does not lock {nbytes} bytes of host memory, transfers will be slower: raise ulimit -l",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


class _Allocated:
    """Memory of torch's allocator for a device; see Note [Blocks on accelerators]."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the tensor, and give its memory back."""
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._exact = numel * dtype.itemsize
        self.release()

    def acquire(self) -> None:
        """Allocate."""
        self.tensor.untyped_storage().resize_(self._exact)

    def release(self) -> None:
        """Free."""
        self.tensor.untyped_storage().resize_(0)

    def alias(self) -> torch.Tensor:
        """Return the same tensor: memory that moves has one storage."""
        return self.tensor


@final
class Block:
    """1-D memory that comes and goes while every view of it stays a valid object.

    Reading or writing a view while the block is not held ends the process: whoever hands views out has to put
    something else in their place before it releases.

    Attributes:
        name: For messages.
        arena: Whose budget it counts towards while it is held.
        tensor: ``[numel]``. Views of it may be taken at any time in host memory, and while the block is held
            on accelerators.
        nbytes: What it counts while held: bytes of its elements; the system rounds up to pages.
        is_held: Whether there is memory.
    """

    def __init__(self, arena: Arena, memory: _Memory | None, tensor: torch.Tensor, name: str) -> None:
        """Begin without memory. Made by :meth:`Arena.reserve`; ``memory`` is None for an empty block."""
        self.name = name
        self.arena = arena
        self.tensor = tensor
        self.nbytes = tensor.numel() * tensor.element_size()
        self.is_held = False
        self._memory = memory
        self._is_closed = False
        self._storage = tensor.untyped_storage()
        setattr(self._storage, _HELD, 0)

    def acquire(self) -> None:
        """Have memory. Its content is undefined.

        Raises:
            MemoryBudgetError: The budget of the arena, or the system, does not allow it; nothing changed.
        """
        assert not self.is_held, f"block {self.name!r} is held already"
        assert not self._is_closed, f"block {self.name!r} is closed"
        self.arena.check_room(self)
        if self._memory is not None:
            try:
                self._memory.acquire()
            except (OSError, RuntimeError) as err:
                raise self.arena.refusal(self, cause=err) from err
        self.is_held = True
        setattr(self._storage, _HELD, self.nbytes)
        self.arena.note(self)

    def release(self) -> None:
        """Give the memory back to the system; the content is lost."""
        assert self.is_held, f"block {self.name!r} is not held"
        if self._memory is not None:
            self._memory.release()
        self.is_held = False
        setattr(self._storage, _HELD, 0)
        self.arena.note(self)

    def alias(self) -> torch.Tensor:
        """Return a tensor over the same memory, whose references can be told from those to ``tensor``.

        In host memory it has a storage of its own, which counts no bytes; on accelerators it is ``tensor``.
        """
        if self._memory is None:
            return self.tensor
        found = self._memory.alias()
        if found is not self.tensor:
            setattr(found.untyped_storage(), _HELD, 0)
        return found

    def close(self) -> None:
        """Release if held, and let go of the addresses as soon as no view is left. May be called again."""
        if self.is_held:
            self.release()
        self._memory = None
        self._is_closed = True
        self.tensor = self.tensor.new_empty(0)
        self._storage = self.tensor.untyped_storage()


@final
class Arena:
    """A tier of memory with a budget in bytes.

    Not for several threads at a time.

    Attributes:
        name: For messages.
        budget: Most bytes that held blocks may count, None for no limit. May be set at any time; what is held
            stays held when it is more.
        device: Where the memory is.
        used: Bytes of the blocks that are held.
        peak: Most of them since the beginning or :meth:`reset_peak`.
        reclaim: Asked for so many bytes when there is no room, before a block is refused; None to refuse at
            once.
    """

    is_mapped: ClassVar[bool] = _LIBC is not None
    """Whether blocks in host memory are mappings of their own, or come from torch's allocator."""

    def __init__(
        self,
        name: str,
        *,
        budget: int | None = None,
        device: torch.device | None = None,
        is_pinned: bool = False,
    ) -> None:
        """Begin empty.

        Args:
            name: For messages.
            budget: Most bytes that held blocks may count, None for no limit.
            device: Where the memory is; host memory by default.
            is_pinned: Whether to lock host memory for transfers to and from CUDA devices.
        """
        self.name = name
        self.budget = budget
        self.device = torch.device("cpu") if device is None else device
        self.used = 0
        self.peak = 0
        self.reclaim: Callable[[int], None] | None = None
        self._is_pinned = is_pinned
        self._held: dict[Block, None] = {}

    def __repr__(self) -> str:
        """Return the name and what is used."""
        of = "no limit" if self.budget is None else f"{self.budget}"
        return f"<Arena {self.name!r}: {self.used} bytes of {of}>"

    def room(self) -> float:
        """Return how many bytes can still be acquired, negative when the budget was lowered below that."""
        return math.inf if self.budget is None else self.budget - self.used

    def reset_peak(self) -> None:
        """Let ``peak`` begin again at what is used now."""
        self.peak = self.used

    def reserve(self, numel: int, dtype: torch.dtype, *, name: str = "") -> Block:
        """Return a block without memory.

        Args:
            numel: Elements, 0 or more.
            dtype: Their type.
            name: For messages.

        Raises:
            MemoryBudgetError: The system has no address space left (``RLIMIT_AS``).
        """
        if not numel:
            return Block(self, None, torch.empty(0, dtype=dtype, device=self.device), name)
        memory: _Memory
        if self.device.type != "cpu" or not self.is_mapped:
            memory = _Allocated(numel, dtype, self.device)
        else:
            try:
                memory = _Mapped(numel, dtype, is_pinned=self._is_pinned)
            except OSError as err:
                message = f"{self.name} memory: no address space for {name or 'a block'!r}: {err.strerror}"
                hint = "raise RLIMIT_AS (ulimit -v): addresses are reserved for everything that may come"
                raise MemoryBudgetError(message, hint=hint) from err
        return Block(self, memory, memory.tensor, name)

    def close(self) -> None:
        """Close all blocks that are held."""
        for block in tuple(self._held):
            block.close()

    def check_room(self, block: Block) -> None:
        """Refuse a block that exceeds the budget."""
        if block.nbytes > self.room() and self.reclaim is not None:
            self.reclaim(block.nbytes)
        if block.nbytes > self.room():
            raise self.refusal(block)

    def note(self, block: Block) -> None:
        """Count a block that was acquired or released."""
        if block.is_held:
            self._held[block] = None
            self.used += block.nbytes
            self.peak = max(self.peak, self.used)
        else:
            del self._held[block]
            self.used -= block.nbytes

    def refusal(self, block: Block, cause: Exception | None = None) -> MemoryBudgetError:
        """Return the error for a block that there is no memory for."""
        budget = "without budget" if self.budget is None else f"of a budget of {self.budget}"
        message = (
            f"{self.name} memory: {block.name or 'a block'!r} asks for {block.nbytes} bytes, "
            f"{self.used} are used {budget}"
        )
        largest = sorted(self._held, key=lambda held: -held.nbytes)[:_SHOWN_HOLDERS]
        if largest:
            shown = ", ".join(f"{held.name or 'a block'!r} with {held.nbytes}" for held in largest)
            message += f"; the largest of {len(self._held)} that hold some: {shown}"
        if cause is None:
            hint = f"raise the budget of {self.name} memory, or use less of it, as smaller batches do"
            return MemoryBudgetError(message, hint=hint)
        why = cause.strerror if isinstance(cause, OSError) and cause.errno == errno.ENOMEM else cause
        hint = f"lower the budget of {self.name} memory below what the system gives, or raise RLIMIT_DATA"
        return MemoryBudgetError(f"{message}; the system refuses: {why}", hint=hint)
