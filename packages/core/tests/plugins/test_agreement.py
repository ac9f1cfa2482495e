"""Lines that ranks compare, and the answer when they differ."""

from __future__ import annotations

from pathlib import Path

from colossal_core.plugins.agreement import describe_plugin, explain_disagreement, hash_sources
from colossal_core.plugins.discovery import PluginInfo

HOSTS = {0: "north", 1: "north", 2: "south", 3: "south"}


def test_ranks_that_agree_need_no_answer() -> None:
    """The order of lines does not matter."""
    lines = {rank: ["core 0.1.0", "python 3.11.7"][:: 1 - 2 * (rank % 2)] for rank in HOSTS}

    assert explain_disagreement(lines, HOSTS) is None
    assert explain_disagreement({0: ["core 0.1.0"]}, HOSTS) is None


def test_only_differing_lines_are_printed_by_host() -> None:
    """A reader sees at once which host to mend."""
    lines = {rank: ["core 0.1.0", f"plugin zero 0.{rank // 2}.0"] for rank in HOSTS}

    text = explain_disagreement(lines, HOSTS)

    assert text == (
        "ranks disagree about what they run; 1 lines agree, these do not:\n"
        "  ranks 0-1 on north:\n"
        "    plugin zero 0.0.0\n"
        "  ranks 2-3 on south:\n"
        "    plugin zero 0.1.0"
    )


def test_a_rank_that_lacks_a_line_is_told() -> None:
    """A plugin that is missing somewhere is the most common case."""
    lines = {
        0: ["core 0.1.0", "plugin zero 0.1.0"],
        1: ["core 0.1.0"],
        3: ["core 0.1.0", "plugin zero 0.1.0"],
    }

    text = explain_disagreement(lines, {0: "north", 1: "south"})

    assert text is not None
    assert "  ranks 0, 3 on north, unknown host:\n    plugin zero 0.1.0" in text
    assert "  rank 1 on south:\n    (nothing else)" in text


def test_the_hash_is_that_of_names_and_contents(tmp_path: Path) -> None:
    """Two checkouts at different places agree; another name or another line does not."""
    hashes = []
    for place, name, content in [
        ("one", "a.py", "x = 1"),
        ("two", "a.py", "x = 1"),
        ("three", "b.py", "x = 1"),
        ("four", "a.py", "x = 2"),
    ]:
        folder = tmp_path / place / "package" / "deep"
        folder.mkdir(parents=True)
        (folder / name).write_text(content, encoding="utf-8")
        (folder.parent / "__init__.py").touch()
        hashes.append(hash_sources([folder / name, folder.parent / "__init__.py"]))

    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_an_installed_release_needs_no_hash() -> None:
    """Its version tells its contents."""
    info = PluginInfo(
        name="zero", module="colossal_zero.plugin", distribution="colossal-zero", version="0.1.0"
    )

    assert describe_plugin(info, []) == "plugin zero 0.1.0"
