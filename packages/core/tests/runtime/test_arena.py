"""Arenas: budgets are exact, released memory is gone, and tensors over it stay."""

from __future__ import annotations

import gc
import resource
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_core.errors import MemoryBudgetError
from colossal_core.runtime import arena as arenas
from colossal_core.runtime.arena import Arena, Block
from colossal_testkit.programs import run_program

PAGE = resource.getpagesize()
MIB = 1 << 20
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(params=["mapped", "allocated"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with mappings, and with the allocator, which is what accelerators and other systems have."""
    chosen: str = request.param
    monkeypatch.setattr(Arena, "is_mapped", chosen == "mapped" and Arena.is_mapped)
    return chosen


def resident_bytes() -> int:
    """Return what of this process is in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_holds_what_is_written_to_any_view_of_it(dtype: torch.dtype) -> None:
    """Views taken before the memory was there show it, in every dtype."""
    block = Arena("host").reserve(1000, dtype)
    block.acquire()
    early = block.tensor[10:20].view(2, 5)
    block.release()

    block.acquire()
    block.tensor.zero_()
    early.fill_(1)

    assert block.tensor.dtype == dtype
    assert int(block.tensor.to(torch.float64).sum()) == 10
    block.close()


@pytest.mark.usefixtures("kind")
def test_views_are_valid_after_release_and_acquire() -> None:
    """Parameters, their views and storages are the same objects at a second life of the block."""
    block = Arena("host").reserve(12, torch.float32)
    parameter = torch.nn.Parameter(torch.empty(0))
    block.acquire()
    parameter.data = block.tensor[2:8].view(2, 3)
    block.release()
    shape, storage = parameter.shape, block.tensor.untyped_storage()._cdata
    for _ in range(2):
        block.acquire()
        block.tensor.copy_(torch.arange(12.0))

        (parameter * parameter).sum().backward()

        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 2 * torch.arange(2.0, 8.0).view(2, 3))
        parameter.grad = None
        block.release()
    assert parameter.shape == shape
    assert parameter.untyped_storage()._cdata == storage
    block.close()


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 5000), max_size=8), data=st.data())
def test_used_and_peak_are_those_of_the_blocks_that_are_held(sizes: list[int], data: st.DataObject) -> None:
    """Whatever comes and goes, the counters equal a sum over held blocks and its maximum."""
    arena = Arena("host")
    blocks = [arena.reserve(size, torch.float32) for size in sizes]
    peak = 0
    turns = data.draw(st.lists(st.sampled_from(range(len(blocks))), max_size=20)) if blocks else []
    for turn in turns:
        block = blocks[turn]
        if block.is_held:
            block.release()
        else:
            block.acquire()
        used = sum(one.nbytes for one in blocks if one.is_held)
        peak = max(peak, used)
        assert (arena.used, arena.peak) == (used, peak)
    arena.reset_peak()
    assert arena.peak == arena.used
    arena.close()
    assert arena.used == 0


@pytest.mark.usefixtures("kind")
def test_a_budget_is_kept_to_the_byte() -> None:
    """What fits exactly is given; one block more, or one byte less of budget, is not."""
    arena = Arena("device", budget=None)
    first, second = (arena.reserve(3000, torch.float32, name=name) for name in ("first", "second"))
    assert first.nbytes >= 12000
    arena.budget = first.nbytes + second.nbytes

    first.acquire()
    second.acquire()
    assert arena.room() == 0
    second.release()
    arena.budget -= 1
    with pytest.raises(MemoryBudgetError):
        second.acquire()

    assert (arena.used, second.is_held) == (first.nbytes, False)
    arena.close()


def test_a_refusal_names_numbers_and_the_largest_holders() -> None:
    """It says who asks for how much, what is used, by whom, and what to do."""
    arena = Arena("device", budget=10 * PAGE)
    sizes = {"h.0": 1, "h.1": 4, "h.2": 3, "h.3": 2}
    blocks = {name: arena.reserve(size * PAGE, torch.uint8, name=name) for name, size in sizes.items()}
    for block in blocks.values():
        block.acquire()

    with pytest.raises(MemoryBudgetError) as caught:
        arena.reserve(PAGE, torch.uint8, name="h.4").acquire()

    assert caught.value.code == "C060"
    assert caught.value.message == (
        f"device memory: 'h.4' asks for {PAGE} bytes, {10 * PAGE} are used of a budget of {10 * PAGE}; "
        f"the largest of 4 that hold some: 'h.1' with {4 * PAGE}, 'h.2' with {3 * PAGE}, "
        f"'h.3' with {2 * PAGE}"
    )
    assert "raise the budget of device memory" in caught.value.hint
    arena.close()


def test_a_lowered_budget_leaves_what_is_held_and_refuses_more() -> None:
    """The room is negative until enough was released."""
    arena = Arena("device")
    blocks = [arena.reserve(PAGE, torch.uint8) for _ in range(3)]
    blocks[0].acquire()
    blocks[1].acquire()

    arena.budget = PAGE

    assert arena.room() == -PAGE
    with pytest.raises(MemoryBudgetError):
        blocks[2].acquire()
    blocks[0].release()
    with pytest.raises(MemoryBudgetError):
        blocks[2].acquire()
    blocks[1].release()
    blocks[2].acquire()
    arena.close()


@pytest.mark.usefixtures("kind")
def test_an_empty_block_costs_nothing() -> None:
    """It is held and released like others, also without any room."""
    block = Arena("host", budget=1).reserve(0, torch.bfloat16)

    block.acquire()

    assert (block.nbytes, block.is_held, block.tensor.numel()) == (0, True, 0)
    block.release()
    block.close()
    block.close()


@needs_linux
def test_released_memory_goes_back_to_the_system() -> None:
    """The resident memory of the process grows and falls by what the block counts."""
    block = Arena("host").reserve(64 * MIB, torch.uint8)
    gc.collect()
    before = resident_bytes()

    block.acquire()
    held = resident_bytes()
    block.release()
    after = resident_bytes()

    assert held - before > 60 * MIB
    assert abs(after - before) < 4 * MIB
    block.close()


@needs_linux
@pytest.mark.parametrize("size", [3 * PAGE + 1, 5 * MIB + 3])
def test_address_space_goes_when_the_last_view_does(size: int) -> None:
    """A closed block stays mapped under a view that somebody kept, and no longer."""

    def is_mapped(address: int) -> bool:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        spans = (line.split()[0].split("-") for line in lines if line.split()[1] == "---p")
        return any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)

    block: Block = Arena("host").reserve(size, torch.uint8)
    view, address = block.tensor[1:5], block.tensor.data_ptr()

    block.close()
    assert is_mapped(address)
    del view
    assert not is_mapped(address)


@needs_linux
def test_only_held_blocks_count_towards_the_data_limit_and_the_interpreter_ends_cleanly() -> None:
    """Reserving ten times the limit works, one part at a time is held, and two parts are refused by name."""
    ended = run_program(
        """
        import resource, torch
        from colossal_core.errors import MemoryBudgetError
        from colossal_core.runtime.arena import Arena

        status = dict(line.split(":") for line in open("/proc/self/status") if "VmData" in line)
        limit = int(status["VmData"].split()[0]) * 1024 + (96 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        arena = Arena("host")
        blocks = [arena.reserve(60 << 20, torch.uint8, name=f"h.{n}") for n in range(16)]
        views = [block.tensor[5:10] for block in blocks]
        for block in blocks:
            block.acquire()
            block.tensor.fill_(1)
            block.release()
        blocks[0].acquire()
        try:
            blocks[1].acquire()
        except MemoryBudgetError as err:
            print(err)
        blocks[2].close()
        """
    )

    assert ended.returncode == 0, ended.stderr
    asked = 60 << 20
    assert ended.stdout.splitlines()[0] == (
        f"host memory: 'h.1' asks for {asked} bytes, {asked} are used without budget; the largest of 1 that "
        f"hold some: 'h.0' with {asked}; the system refuses: Cannot allocate memory"
    )
    assert "RLIMIT_DATA" in ended.stdout


@needs_linux
def test_a_limit_on_addresses_is_an_error_that_names_it() -> None:
    """Reserving what the system has no addresses for says which limit to raise."""
    block = Arena("host")

    with pytest.raises(MemoryBudgetError, match="no address space for 'huge'") as caught:
        block.reserve(1 << 50, torch.uint8, name="huge")

    assert "RLIMIT_AS" in caught.value.hint


class FakeCudart:
    """The two calls of the CUDA runtime that lock pages."""

    def __init__(self, result: int) -> None:
        """Answer every registration with ``result``."""
        self.result = result
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, _address: int, nbytes: int, _flags: int) -> int:  # noqa: N802 - CUDA's name
        """Note the call."""
        self.calls.append(("register", nbytes))
        return self.result

    def cudaHostUnregister(self, _address: int) -> int:  # noqa: N802 - CUDA's name
        """Note the call."""
        self.calls.append(("unregister", 0))
        return 0


@pytest.mark.parametrize("result", [0, 2])
def test_pinned_blocks_are_locked_while_held_and_work_where_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, result: int
) -> None:
    """Pages are registered with CUDA and unregistered; a refusal is a warning with the number of bytes."""
    cudart = FakeCudart(result)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    block = Arena("host", is_pinned=True).reserve(PAGE, torch.uint8)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        block.acquire()
    block.tensor.fill_(1)
    block.close()

    expected = [("register", PAGE), ("unregister", 0)] if result == 0 else [("register", PAGE)]
    assert cudart.calls == expected
    assert [str(PAGE) in str(one.message) for one in caught] == ([] if result == 0 else [True])


def test_views_of_host_memory_may_be_taken_before_there_is_any() -> None:
    """Parameters are laid out in a buffer that is acquired later."""
    block = Arena("host").reserve(1000, torch.bfloat16)
    early = block.tensor[10:20].view(2, 5)

    block.acquire()
    block.tensor.fill_(3)

    assert early.tolist() == [[3.0] * 5] * 2
    block.close()
    with pytest.raises(AssertionError, match="closed"):
        block.acquire()


def test_small_and_large_blocks_start_on_pages_and_huge_pages() -> None:
    """Files are read into them directly, and huge pages can back them."""
    arena = Arena("host")

    small, large = arena.reserve(10, torch.uint8), arena.reserve(5 * MIB, torch.uint8)

    assert small.tensor.data_ptr() % PAGE == 0
    assert large.tensor.data_ptr() % arenas._HUGE == 0
    small.close()
    large.close()
