"""What saving and loading cost: every byte is written once and by whoever has time; few are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossal_core import Booster
from colossal_core.boxes import Box
from colossal_core.checkpoint import Manifest, read_manifest
from colossal_core.checkpoint.manifest import BLOCK_BYTES
from colossal_core.checkpoint.reading import find_blocks
from colossal_testkit import run_ranks
from colossal_testkit.engine import engine_of

from .strategy_cases import make_registry
from .third_party_stages import TiedChain

WIDTH = 512


class Wide(nn.Module):
    """Layers of very different sizes, one of which is more than half of all."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, 300)
        self.norm = nn.LayerNorm(300)
        self.enter = nn.Linear(300, WIDTH)
        self.leave = nn.Linear(WIDTH, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map token numbers ``[batch]`` to ``[batch, 7]``."""
        outputs: torch.Tensor = self.leave(torch.relu(self.enter(self.norm(self.tokens(ids)))))
        return outputs


def save_wide(root: Path, precision: str) -> int:
    """Take a step and save; return the bytes of the state that a rank holds, masters for 16-bit values."""
    torch.manual_seed(0)
    model = Wide()
    booster = Booster(precision=precision)
    model, optimizer = booster.boost(model, torch.optim.AdamW(model.parameters()))
    booster.backward(model(torch.arange(5)).float().sum())
    optimizer.step()
    booster.save(root)
    numel: int = sum(parameter.numel() for parameter in model.parameters())
    return 3 * 4 * numel


def test_bytes_written_equal_the_state_once_and_ranks_are_balanced(tmp_path: Path) -> None:
    """On three ranks, in fp32 and bf16: tensors count once; what is around them is below a hundredth."""
    for precision in ("fp32", "bf16"):
        state_bytes = run_ranks(save_wide, 3, tmp_path / precision, precision)[0]
        files = list((tmp_path / precision / "step-1").glob("*.safetensors"))
        by_rank = [
            sum(file.stat().st_size for file in files if f"-{rank:05}-" in file.name) for rank in range(3)
        ]

        assert state_bytes <= sum(file.stat().st_size for file in files) <= 1.01 * state_bytes
        assert max(by_rank) <= 1.1 * min(by_rank)


def boost_chain(pieces: dict[str, dict[str, int]]) -> tuple[Booster, Any, Any]:
    """Return a Booster with a chain that is several blocks large."""
    torch.manual_seed(0)
    model = TiedChain(60_000, 64, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    booster = Booster(plan={"pieces": pieces}, registry=make_registry())
    return (booster, *booster.boost(model, optimizer))


def save_chain(root: Path) -> None:
    """Take a step and save, uncut."""
    booster, model, optimizer = boost_chain({})
    model(torch.arange(6)[None]).sum().backward()
    optimizer.step()
    booster.save(root)


def load_chain(root: Path, pieces: dict[str, dict[str, int]]) -> tuple[int, int]:
    """Load cut; return the bytes read, and the bytes of the blocks that this rank's boxes need."""
    booster, *_ = boost_chain(pieces)
    loaded = booster.load(root)
    assert loaded is not None
    manifest = read_manifest(loaded.path)
    parts = {entry.name: [part.box for part in entry.parts] for entry in engine_of(booster).context.table}
    needed = sum(
        block_bytes(manifest, owner, name, parts[name if owner == "model" else name.rpartition(".")[0]])
        for owner, record in manifest.objects.items()
        for name in record.tensors
    )
    return loaded.report.bytes_read, needed


def block_bytes(manifest: Manifest, owner: str, name: str, boxes: list[Box]) -> int:
    """Return the bytes of the blocks of a tensor that hold elements of some boxes."""
    tensor = manifest.objects[owner].tensors[name]
    total = 0
    for piece in tensor.pieces:
        common = [found for box in boxes if (found := piece.box.intersect(box)) is not None]
        inside = [box.shifted([-start for start in piece.box.offset]) for box in common]
        blocks = {n for box in inside for n in find_blocks(piece.box.size, box, tensor.item_bytes)}
        whole = piece.box.volume * tensor.item_bytes
        total += sum(min(BLOCK_BYTES, whole - n * BLOCK_BYTES) for n in blocks)
    return total


def test_each_rank_reads_only_the_blocks_that_it_needs(tmp_path: Path) -> None:
    """Four ranks of a cut vocabulary read no block twice, and far from everything."""
    run_ranks(save_chain, 1, tmp_path)
    whole = sum(file.stat().st_size for file in (tmp_path / "step-1").glob("*.safetensors"))

    costs = run_ranks(load_chain, 4, tmp_path, {"vocabulary": {"degree": 4}})

    for read, needed in costs:
        assert read <= 1.05 * needed
        assert read <= 0.6 * whole
