"""Attention modules of torch are cut by heads, whatever they are called with, and so are its encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn

from colossal_core import Booster, Recompute
from colossal_core.errors import CapabilityError, UsageError
from colossal_tensor_parallel import TensorParallel, explain
from colossal_testkit.models import Workload, build_workload, randomise
from colossal_testkit.parity import Recipe, boost_workload, check_parity, share_of, train_serial
from colossal_testkit.ranks import run_ranks

from .registries import make_registry

WIDTH, HEADS, BATCH, TIME = 24, 12, 12, 6


class Uses(nn.Module):
    """Every way to make and to call an attention module."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.bare = nn.MultiheadAttention(WIDTH, HEADS, bias=False)
        self.wide = nn.MultiheadAttention(WIDTH, HEADS, kdim=10, vdim=14, batch_first=True)
        self.longer = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, add_zero_attn=True)
        self.slopes = nn.Parameter(torch.zeros(TIME, TIME))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 6, 24]`` to ``[batch, something]``, or fewer tokens to the same."""
        batch, time, _ = hidden.shape
        shifted, turned = hidden + 1, hidden.transpose(0, 1)
        later = torch.ones(time, time).triu(1).bool()
        padding = torch.arange(time) >= time - torch.arange(batch)[:, None] % 2
        floats = torch.zeros(padding.shape, dtype=hidden.dtype).masked_fill(padding, float("-inf"))
        by_head = torch.arange(batch * HEADS)[:, None, None] % 3 == torch.arange(1, time + 1)
        few, many = hidden[:, :2, :10], hidden[:, :2, :14]
        slopes = self.slopes[:time, :time]
        found = [
            self.plain(hidden, hidden, hidden, need_weights=False),
            self.plain(hidden, hidden, shifted, attn_mask=later, need_weights=False, is_causal=True),
            self.plain(hidden, shifted, shifted, key_padding_mask=padding),
            self.plain(hidden, hidden, hidden, attn_mask=by_head.expand(-1, time, -1), need_weights=False),
            self.plain(hidden[0], hidden[0], shifted[0], key_padding_mask=padding[1]),
            self.bare(turned, turned, turned, attn_mask=slopes, average_attn_weights=False),
            self.bare(turned, turned, turned, attn_mask=slopes, key_padding_mask=floats, need_weights=False),
            self.wide(shifted, few, many, key_padding_mask=padding[:, :2]),
            self.longer(turned, turned + 1, turned, attn_mask=slopes, key_padding_mask=floats),
            self.longer(turned, turned, turned, attn_mask=later, need_weights=False),
        ]
        leaves = [leaf for pair in found for leaf in pair if leaf is not None]
        widths = [
            leaf.movedim(leaf.shape.index(batch), 0) if batch in leaf.shape else leaf for leaf in leaves
        ]
        return torch.cat([leaf.expand(batch, *leaf.shape[-2:]).flatten(1) for leaf in map(_flat, widths)], 1)


def _flat(leaf: torch.Tensor) -> torch.Tensor:
    """Return ``[batch or 1, something, features]``."""
    return leaf.flatten(1, -2) if leaf.dim() > 2 else leaf.unsqueeze(0)


class Translator(nn.Module):
    """Encoder and decoder of torch, with masks; tokens are looked up."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(41, WIDTH)
        self.is_turned = not options.get("batch_first", False)
        self.both = nn.Transformer(WIDTH, HEADS, 2, 2, 18, 0.0, **options)
        self.head = nn.Linear(WIDTH, 41)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids to logits of all but the last tokens."""
        source, target = self.tokens(ids), self.tokens(ids[:, :4])
        padding = ids == ids[:, -1:]
        padding[:, :2] = False
        if self.is_turned:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        later = nn.Transformer.generate_square_subsequent_mask(4, dtype=source.dtype)
        hidden = self.both(
            source,
            target,
            tgt_mask=later,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        logits: torch.Tensor = self.head(hidden.transpose(0, 1) if self.is_turned else hidden)
        return logits


def build(model: nn.Module, *, steps: int = 3, time: int = 6, cut: int = 4) -> Workload:
    """Return a run of a model on batches of the reference GPT."""
    work = build_workload("gpt", num_steps=steps)
    randomise(model.double(), seed=4)
    batches = [(ids[:, :time], target[:, :cut]) for ids, target in work.batches]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return evolve(work, model=model, optimizer=optimizer, batches=batches)


def build_translator(**options: Any) -> Workload:
    """Return a run of encoder and decoder."""
    torch.manual_seed(0)
    return build(Translator(**options))


def build_uses() -> Workload:
    """Return a run of all uses, whose outputs shall be zero."""
    source = torch.Generator().manual_seed(3)
    work = build(Uses())
    batches: list[tuple[Any, torch.Tensor]] = [
        (torch.randn(BATCH, TIME, WIDTH, generator=source).double(), torch.zeros(BATCH).double())
        for _ in range(3)
    ]
    return evolve(work, batches=batches, criterion=_energy)


def _energy(outputs: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    """Return a loss in which each output counts in another way."""
    places = torch.arange(outputs.shape[1], dtype=outputs.dtype)
    return (outputs * (places % 7 - 3) + outputs.square() * (places % 5)).mean()


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_every_use_of_attention_has_the_numbers_of_one_process(nproc: int) -> None:
    """Masks of all kinds, weights that are returned, other widths, and tokens that the module adds."""
    check_parity(
        Recipe(builder=build_uses),
        nproc=nproc,
        pieces=[TensorParallel(degree=nproc)],
        registry=make_registry,
    )


NEW: dict[str, Any] = {"batch_first": True, "norm_first": True, "activation": "gelu"}
UNBIASED = {**NEW, "bias": False}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(
    ("nproc", "options", "pieces", "sequence"),
    [
        (2, {"batch_first": True}, (), False),
        (3, {}, (), True),
        (4, NEW, (Recompute(blocks=("both.*coder.layers.*",)),), True),
        pytest.param(2, UNBIASED, (), True, marks=pytest.mark.slow),
        pytest.param(3, NEW, (), False, marks=pytest.mark.slow),
        pytest.param(4, {}, (), False, marks=pytest.mark.slow),
    ],
)
def test_encoders_and_decoders_have_the_numbers_of_one_process(
    nproc: int, options: dict[str, Any], pieces: tuple[object, ...], *, sequence: bool
) -> None:
    """Both orders of batch and tokens, both places of norms, causal and padding masks, cross-attention."""
    recipe = Recipe(builder=build_translator, arguments=options, max_grad_norm=0.5)
    pieces = (TensorParallel(degree=nproc, sequence=sequence), *pieces)

    check_parity(recipe, nproc=nproc, pieces=pieces, registry=make_registry)


def test_encoders_and_decoders_are_cut_but_for_norms_and_biases_of_sums() -> None:
    """Attention of its own, attention across, and feed-forward layers: each rank holds half of them."""
    found = explain(Translator(batch_first=True), 2)

    decisions = {row.module.rpartition("layers.")[2]: row.decision for row in found.rows}
    assert decisions["1.multihead_attn"] == decisions["0.self_attn"] == "attention"
    assert (decisions["0.linear1"], decisions["0.linear2"]) == ("column", "row")
    assert "whole" not in decisions.values()
    assert 0.5 <= found.rank_bytes / found.whole_bytes < 0.55


def run_encoder(degree: int) -> list[torch.Tensor]:
    """Return outputs of an encoder in evaluation, where one process takes fast paths, and in training."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 15, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8)).double()
    pieces = [TensorParallel(degree=degree)] if degree > 1 else []
    booster = Booster(*pieces, precision="fp64", registry=make_registry())
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.linspace(-1, 1, 2 * 5 * 8, dtype=torch.float64).reshape(2, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    later = torch.ones(5, 5).triu(1).bool()
    found = [model(batch, src_key_padding_mask=padding)]
    with torch.no_grad():
        model.eval()
        found += [model(batch), model(batch, mask=later), model(batch, src_key_padding_mask=padding)]
    attention = model.layers[0].self_attn
    assert isinstance(attention, nn.MultiheadAttention)
    assert attention.num_heads == 2
    assert degree == 1 or attention.in_proj_weight.shape == (12, 8)
    for outputs in (found[0], found[-1]):
        outputs[1, 3:] = 0  # excluded places: zeros of the fast path, or what training has there
    return [outputs.detach() for outputs in found]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoders_in_evaluation_have_the_numbers_of_the_fast_path() -> None:
    """Nothing reads cut weights in one piece, and nobody removes padding for layers that do not expect it."""
    expected = run_ranks(run_encoder, 1, 1)[0]

    for found in run_ranks(run_encoder, 2, 2):
        for mine, whole in zip(found, expected, strict=True):
            assert torch.allclose(mine, whole, rtol=1e-10, atol=1e-10)


STATE = Recipe(builder=build_translator, arguments={"batch_first": True, "bias": False})


def train_half(degree: int, root: str, steps: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Take some steps, from what is saved or to what is; return the weights of the model, whole again."""
    pieces = [TensorParallel(degree=degree, sequence=degree == 3)] if degree > 1 else []
    booster, work = boost_workload(STATE, pieces, {}, make_registry)
    booster.load(root, missing_ok=True)
    for step in range(*steps):
        inputs, target = share_of(work.batches[step], booster.data_rank, booster.data_degree, equal=True)
        work.criterion(work.model(inputs), target).backward()
        work.optimizer.step()
        work.optimizer.zero_grad()
    booster.save(root)
    booster.release(work.model)
    return {name: parameter.detach().clone() for name, parameter in work.model.named_parameters()}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1)])
def test_attention_goes_on_under_another_degree(before: int, after: int, tmp_path: Path) -> None:
    """Fused projections that were saved by heads of two and of four ranks."""
    expected = {name: slab.values for name, (slab,) in train_serial(STATE).slabs.items()}

    run_ranks(train_half, before, before, str(tmp_path), (0, 1))
    (found, *_) = run_ranks(train_half, after, after, str(tmp_path), (1, 3))

    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-11) for name in found)


class Dropping(nn.Module):
    """Attention over ones that drops half of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 4, dropout=0.5, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the weights of all heads."""
        weights: torch.Tensor = self.inner(hidden, hidden, hidden, average_attn_weights=False)[1]
        return weights


def drop_weights() -> tuple[torch.Tensor, float]:
    """Return attention weights in training, and a random number that is drawn behind."""
    torch.manual_seed(1)
    booster = Booster(TensorParallel(degree=2), registry=make_registry())
    model = nn.Sequential(Dropping())
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model(torch.ones(8, 16, 8)).detach(), float(torch.rand(()))


def test_heads_of_different_ranks_drop_different_weights() -> None:
    """The masks of heads 0 and 2 are independent, and generators go on alike."""
    (weights, number), (other, other_number) = run_ranks(drop_weights, 2)

    assert torch.equal(weights, other)
    assert number == other_number
    assert weights.shape == (8, 4, 16, 16)
    assert 0.4 < float(((weights[:, 0] != 0) == (weights[:, 2] != 0)).float().mean()) < 0.6


def test_heads_of_torch_that_do_not_divide_are_refused_with_legal_degrees() -> None:
    """The pattern that the hint names leaves them whole."""
    model = nn.TransformerEncoderLayer(12, 6, 8)

    with pytest.raises(UsageError, match=r"6 heads \(self_attn.num_heads\) .* are 1, 2, 3, 6") as caught:
        explain(model, 4)
    found = explain(model, 4, plan={"self_attn.out_proj": "whole"})

    assert "'self_attn.out_proj': 'whole'" in caught.value.hint
    assert [row.decision for row in found.rows] == ["whole", "column", "row"]


class Shaped(nn.MultiheadAttention):
    """Attention with a forward of its own."""

    def forward(self, query: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Attend to itself."""
        outputs: torch.Tensor = super().forward(query, query, query)[0]
        return outputs


def test_attention_that_is_no_unit_stays_whole() -> None:
    """A forward of its own, one head, weights that two modules have: each with its reason."""
    shared = nn.TransformerEncoderLayer(8, 2, 6, batch_first=True)
    other = nn.TransformerEncoderLayer(8, 2, 6, batch_first=True)
    other.self_attn.in_proj_weight = shared.self_attn.in_proj_weight
    single = nn.TransformerEncoderLayer(8, 1, 6, batch_first=True)
    rows = explain(nn.Sequential(Shaped(8, 2), shared, other, single), 2, batch=torch.ones(2, 3, 8)).rows

    reasons = {row.module: row.reason for row in rows if row.decision == "whole"}
    assert "attention" not in {row.decision for row in rows}
    assert reasons["1.self_attn.out_proj"] == reasons["2.self_attn.out_proj"]
    assert reasons["1.self_attn.out_proj"] == "another module has its weights, too"
    assert reasons["3.self_attn.out_proj"] == "it has one head"
    assert "0.out_proj" in reasons


def call_wrongly() -> list[str]:
    """Return what is said about calls that cannot be right."""
    booster = Booster(TensorParallel(degree=2), registry=make_registry())
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 6, batch_first=True))
    model, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    attention, hidden = model[0].self_attn, torch.ones(2, 3, 8)
    told = []
    for mask, others in ((torch.ones(3, 4), {}), (None, {"is_causal": True})):
        with pytest.raises(UsageError) as caught:
            attention(hidden, hidden, hidden, attn_mask=mask, **others)
        told.append(str(caught.value))
    with pytest.raises(CapabilityError) as refused:
        attention(*[torch.nested.nested_tensor(list(hidden))] * 3)
    return [*told, str(refused.value)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_masks_that_do_not_fit_are_refused_with_their_shape() -> None:
    """On every rank, before anything is summed."""
    for told in run_ranks(call_wrongly, 2):
        assert "attn_mask has shape (3, 4), expected (3, 3) or (4, 3, 3)" in told[0]
        assert "is_causal=True comes without attn_mask" in told[1]
        assert "nested tensor" in told[2]
