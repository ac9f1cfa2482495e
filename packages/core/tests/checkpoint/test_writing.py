"""Writing: a full disk leaves nothing behind, and nothing that was there is lost."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from colossal_core.checkpoint import MANIFEST_NAME, find_complete, read_manifest
from colossal_core.checkpoint.verifying import verify
from colossal_core.checkpoint.writing import sync_directory, write_all, write_tensors, write_text
from colossal_core.errors import CheckpointError
from colossal_testkit.checkpoints import SampleTensor, write_checkpoint


def test_a_file_that_exists_is_never_written_over(tmp_path: Path) -> None:
    """Nor deleted, when the error is cleared up."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"mine")

    with pytest.raises(CheckpointError, match=r"cannot create .*model\.safetensors"):
        write_tensors(path, [("w", "U8", (1,))], [[b"x"]])

    assert path.read_bytes() == b"mine"


def test_an_error_of_whoever_gives_the_bytes_leaves_no_file(tmp_path: Path) -> None:
    """The error stays what it is."""

    def fail() -> Iterator[bytes]:
        yield b"x"
        raise KeyError("device lost")

    with pytest.raises(KeyError, match="device lost"):
        write_tensors(tmp_path / "a.safetensors", [("w", "U8", (2,))], [fail()])

    assert [*tmp_path.iterdir()] == []


def test_a_vanished_directory_is_named(tmp_path: Path) -> None:
    """Not a bare "no such file"."""
    gone = tmp_path / "gone"

    with pytest.raises(CheckpointError, match=r"its directory .*gone has vanished"):
        write_tensors(gone / "a.safetensors", [], [])
    with pytest.raises(CheckpointError, match=r"its directory .*gone has vanished"):
        write_text(gone / "a.json", "{}")


def test_empty_views_and_views_of_any_shape_are_bytes(tmp_path: Path) -> None:
    """What a library hands over need not be flat."""
    with (tmp_path / "a").open("wb", buffering=0) as file:
        write_all(file.fileno(), memoryview(b""))
        write_all(file.fileno(), memoryview(b"abcdef").cast("B", (2, 3)))
        write_all(file.fileno(), memoryview(bytes(8)).cast("q"))

    assert (tmp_path / "a").read_bytes() == b"abcdef" + bytes(8)


def test_a_file_system_without_directories_to_sync_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some on a network say that there is nothing to do; a broken disk is still an error."""

    def refuse(number: int) -> None:
        def fail(_handle: int) -> None:
            raise OSError(number, "no")

        monkeypatch.setattr("os.fsync", fail)

    refuse(errno.EINVAL)
    sync_directory(tmp_path)
    refuse(errno.EIO)
    with pytest.raises(OSError, match="no"):
        sync_directory(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_refuses_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The error names tensor, file and size; nothing of the new save is left."""
    older = _write(tmp_path, 1)

    def refuse(_handle: int, _data: bytes) -> int:
        raise OSError(number, "refused")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", refuse)
        with pytest.raises(CheckpointError, match="refused") as caught:
            _write(tmp_path, 2)

    assert "model-00000-0123456789ab.safetensors" in caught.value.message
    assert "the header" in caught.value.message
    assert find_complete(tmp_path) == [(1, older)]
    assert [*(tmp_path / "step-2").iterdir()] == []


def test_a_limit_on_files_in_the_middle_of_a_tensor_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    """What the kernel does when a quota is met: a part of a block is written, then no more."""
    older = _write(tmp_path, 1)
    script = textwrap.dedent("""
        import resource, signal, sys
        from pathlib import Path
        from colossal_core.errors import CheckpointError
        from colossal_testkit.checkpoints import SampleTensor, write_checkpoint

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        tensors = {"first": SampleTensor.make((1000,)), "second": SampleTensor.make((100_000,))}
        try:
            write_checkpoint(Path(sys.argv[1]), {"model": tensors}, step=2)
        except CheckpointError as err:
            print(err)
    """)

    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )

    assert "cannot write 'second[0]' to " in done.stdout
    assert "which has 40" in done.stdout
    assert "File too large" in done.stdout
    assert "earlier checkpoints are as they were" in done.stdout
    assert [*(tmp_path / "step-2").iterdir()] == []
    assert verify(older) == ()


_FULL = """
import sys
from pathlib import Path
from colossal_core.checkpoint import find_complete
from colossal_core.checkpoint.verifying import verify
from colossal_core.errors import CheckpointError
from colossal_testkit.checkpoints import SampleTensor, write_checkpoint

root = Path(sys.argv[1])
older = write_checkpoint(root, {"model": {"w": SampleTensor.make((1000,))}}, step=1)
for step in (2, 3):
    try:
        write_checkpoint(root, {"model": {"w": SampleTensor.make((100_000,))}}, step=step)
    except CheckpointError as err:
        print(err)
print(find_complete(root) == [(1, older)], verify(older), [*(root / "step-3").iterdir()])
write_checkpoint(root, {"model": {"w": SampleTensor.make((2000,))}}, step=4)
print(len(find_complete(root)))
"""


def test_a_disk_that_is_full_says_so_and_the_next_save_works(tmp_path: Path) -> None:
    """A real one of 200 kB, in a name space of its own where the system allows it."""
    unshare, mount = shutil.which("unshare"), 'mount -t tmpfs -o size=200k none "$1"'

    def run_inside(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(unshare), "-Urm", "sh", "-c", script, "sh", str(tmp_path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    if unshare is None or run_inside(mount).returncode != 0:
        pytest.skip("this system lets nobody mount a small disk")

    done = run_inside(f'{mount} && exec "$2" -c "$3" "$1"', sys.executable, _FULL)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("No space left on device") == 2
    assert done.stdout.splitlines()[-2:] == ["True () []", "2"]


def test_a_full_disk_at_the_manifest_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacing the manifest of the same step: the old one stays, whole."""
    directory = _write(tmp_path, 1)
    before = read_manifest(directory)

    def refuse(_path: Path, _target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(CheckpointError, match="No space left"):
            write_checkpoint(tmp_path, {"model": {"w": SampleTensor.make((9,))}}, mark="aaaaaaaaaaaa")

    assert read_manifest(directory) == before
    assert [path.name for path in directory.iterdir() if path.name.endswith(".tmp")] == []
    assert MANIFEST_NAME in {path.name for path in directory.iterdir()}


def _write(root: Path, step: int) -> Path:
    """Write a small checkpoint."""
    return write_checkpoint(root, {"model": {"w": SampleTensor.make((9,))}}, step=step)
