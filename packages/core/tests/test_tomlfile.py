"""Files are read with errors that say where."""

from __future__ import annotations

from pathlib import Path

import pytest

from colossal_core.errors import UsageError
from colossal_core.tomlfile import index_lines, locate, read_toml, select_table

TEXT = """\
precision = "bf16"

[parallel]
data = "auto"
tensor = { degree = 2 }

[ pieces."zero:zero1" ]
bucket_bytes = 5
[[many]]
x = 1
a.b = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file with the text."""
    path = tmp_path / "plan.toml"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (("precision",), 1),
        (("parallel",), 3),
        (("parallel", "data"), 4),
        (("parallel", "tensor", "degree"), 5),
        (("pieces", "zero:zero1", "bucket_bytes"), 8),
        (("many", "a", "b"), 11),
    ],
)
def test_a_key_has_its_line(file: Path, keys: tuple[str, ...], line: int) -> None:
    """Keys of inline tables have the line of the table."""
    assert locate(file, keys) == f"{file}:{line} {'.'.join(keys)}"
    assert locate(file, keys, index_lines(file)) == locate(file, keys)


def test_a_key_that_is_not_there_has_its_path(file: Path) -> None:
    """The path of the key is exact even where the line is not known."""
    assert locate(file, ("elsewhere", "x")) == f"{file} elsewhere.x"
    assert locate(file.with_name("missing.toml"), ("x",)).endswith("missing.toml x")


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    """With the path and the reason of the system."""
    with pytest.raises(UsageError, match=r"cannot read .*no.toml'"):
        read_toml(tmp_path / "no.toml")
    with pytest.raises(UsageError, match="cannot read"):
        read_toml(tmp_path)


@pytest.mark.parametrize("content", [b"x = \n", b"\xff\xfe"])
def test_what_is_not_toml_is_a_usage_error(tmp_path: Path, content: bytes) -> None:
    """With what the parser found."""
    path = tmp_path / "bad.toml"
    path.write_bytes(content)

    with pytest.raises(UsageError, match="is not valid TOML"):
        read_toml(path)


def test_pyproject_is_read_under_tool(tmp_path: Path) -> None:
    """All other files are ours from the top."""
    document = {"tool": {"colossal": {"precision": "bf16"}}, "precision": "fp64"}

    assert select_table(tmp_path / "pyproject.toml", document) == (
        {"precision": "bf16"},
        ("tool", "colossal"),
    )
    assert select_table(tmp_path / "pyproject.toml", {}) == ({}, ("tool", "colossal"))
    assert select_table(tmp_path / "plan.toml", document) == (document, ())
