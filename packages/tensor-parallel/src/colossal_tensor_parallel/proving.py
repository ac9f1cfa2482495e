"""The proof that a group of layers divides among ranks: it is carried out, rank by rank, on random numbers.

The one idea: a plan is right when the summands of the ranks add up to the serial output, for values and for
gradients. A copy of the module around the group runs once as it is, and once for each rank with that rank's
weights; in place of the sum, which needs all ranks, each gets the serial one. So nothing about the module's
code has to be known. Which fused parts a layer has, and which integers of the module count heads, is found by
trying; a wrong guess changes the numbers. So does a parameter between the cut layers whose gradient is only
a share on each rank, and it is found in the same way.

# Note [What a run compares]
Inputs of column layers are cut off from the graph, so the gradient that arrives there is the rank's
share, and what lies before them sees no share at all. For each rank: gradients of cut weights are slices of
the serial ones. Over all ranks: outputs of the row layer, and gradients of the columns' inputs, add up.
Everything else, other parameters, other inputs, outputs, is the serial one on each rank; a parameter whose
gradients add up instead has to be summed in training. Where gradients are but rounding, as that of the bias
of a norm of keys, and either would hold, the graph decides: what a summand depends on has a share.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from attrs import frozen
from torch import nn
from torch.utils import _pytree as pytree

from colossal_tensor_parallel.candidates import Candidate, Proof
from colossal_tensor_parallel.draws import WatchDraws
from colossal_tensor_parallel.groups import Group, Layer
from colossal_tensor_parallel.members import Member, pick
from colossal_tensor_parallel.tracing import Recorded, copy_module, make_values, own_parameters

__all__ = ["Bench"]

_logger = logging.getLogger(__name__)

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Largest difference, relative to the largest element. Modules that compute norms in fp32 differ by 1e-7 when
features are cut, wrong guesses by the values themselves."""

NOISE = 1e-2
"""Gradients below this part of the largest one are compared as if they were as large: that of a bias of keys
is zero but for rounding."""

LARGEST_WIDE = 20_000_000
"""Parameters of a module up to which it is run in fp64, in 160 MB."""


@frozen(kw_only=True, eq=False)
class _Run:
    """Numbers of one run; see Note [What a run compares].

    Attributes:
        sums: Outputs of the row layer before its bias.
        entered: Gradients of the columns' inputs.
        columns: Gradients of weight and bias of each column.
        row: Gradient of the row's weight.
        others: Gradients of everything else.
        outputs: Outputs that the model depends on.
    """

    sums: list[torch.Tensor]
    entered: list[torch.Tensor]
    columns: list[tuple[torch.Tensor, torch.Tensor | None]]
    row: torch.Tensor
    others: list[torch.Tensor | None]
    outputs: list[torch.Tensor]


@final
class Bench:
    """A copy of the module around a group, on which candidates are tried."""

    def __init__(
        self,
        container: nn.Module,
        group: Group,
        layers: Mapping[str, Layer],
        call: Recorded,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        """Copy the module and run it as it is.

        Args:
            container: The user's module, which stays as it is.
            group: Its layers.
            layers: Their forms, by name.
            call: What the module was called with.
            dtype: Of its parameters; large modules run in fp32.
        """
        source = torch.Generator().manual_seed(61)
        numel = sum(parameter.numel() for parameter in container.parameters())
        self._dtype = dtype if numel <= LARGEST_WIDE else torch.float32
        self._group = group
        self._source = source
        self.container = copy_module(container, make_values(source, self._dtype))
        prefix = f"{group.container}." if group.container else ""
        self._prefix = prefix
        self._members: dict[str, Member] = {}
        inside: set[torch.Tensor] = set()
        for name in group.names:
            module = self.container.get_submodule(name.removeprefix(prefix))
            weight, bias = module.get_parameter("weight"), own_parameters(module).get("bias")
            inside.add(weight)
            if bias is not None:
                inside.add(bias)
            matrix = weight.detach().T if layers[name].form == "transposed" else weight.detach()
            member = Member(matrix, None if bias is None else bias.detach(), matrix, None)
            vars(module)["forward"] = member.row if name == group.row else member.column
            self._members[name] = member
        named = [(name, p) for name, p in self.container.named_parameters() if p not in inside]
        self._others = {prefix + name: parameter for name, parameter in named if parameter.requires_grad}
        self._call = call
        self._inputs = self._materialise()
        self._cotangents: list[torch.Tensor] | None = None
        self._feeding: list[bool] | None = None
        self._serial = self._run(None, 0, 1)
        run = self._serial
        gradients = [*run.entered, run.row, *(weight for weight, _ in run.columns)]
        self._floor = NOISE * max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)

    @classmethod
    def set_up(
        cls,
        container: nn.Module,
        group: Group,
        layers: Mapping[str, Layer],
        call: Recorded,
        dtype: torch.dtype,
    ) -> Bench | None:
        """Return a bench; None when the module does not run by itself, or its outputs tell nothing."""
        try:
            made = cls(container, group, layers, call, dtype)
        except Exception:
            _logger.debug("%s does not run by itself", group.container, exc_info=True)
            return None
        return made if made.is_telling else None

    @property
    def is_telling(self) -> bool:
        """Whether the serial run depends on the group, so that a comparison means something."""
        run = self._serial
        found = [*run.sums, *run.entered, run.row, *(weight for weight, _ in run.columns)]
        return bool(run.sums) and all(bool(tensor.abs().max() > 0) for tensor in found)

    def integers(self) -> Iterator[tuple[str, str, int]]:
        """Yield module name, attribute and value of every integer above 1 around the group's layers."""
        members = {name.removeprefix(self._prefix) for name in self._group.names}
        for name, module in self.container.named_modules():
            if name not in members:
                for attribute, value in vars(module).items():
                    if type(value) is int and value > 1 and not attribute.startswith("_"):
                        yield (self._prefix + name).rstrip("."), attribute, value

    def configured(self) -> Iterator[tuple[str, int]]:
        """Yield names and values of integers above 1 in the configurations that modules keep."""
        seen: list[object] = []
        for module in self.container.modules():
            config = vars(module).get("config")
            if config is not None and not any(config is other for other in seen):
                seen.append(config)
                for attribute, value in getattr(config, "__dict__", {}).items():
                    if type(value) is int and value > 1:
                        yield attribute, value

    def prove(self, candidate: Candidate, degree: int) -> Proof | None:
        """Return what holds with a candidate, or None when it is wrong."""
        runs: list[_Run] = []
        try:
            for rank in range(degree):
                run = self._run(candidate, rank, degree)
                if not self._fits(run, candidate, rank, degree):
                    return None
                runs.append(run)
        except Exception:
            _logger.debug("a guess about %s does not run", self._group.row, exc_info=True)
            return None
        if not self._adds_up(runs, candidate, degree):
            return None
        shared = self._shared(runs)
        if shared is None:
            return None
        return Proof(candidate=candidate, shared=shared, drops=self._drops(candidate, degree))

    def _drops(self, candidate: Candidate, degree: int) -> bool:
        """Whether training draws random numbers between the layers, for values that are cut and no others."""
        self.container.train()
        try:
            whole = self._watch(None, degree)
            mine = self._watch(candidate, degree)
        except Exception:
            _logger.debug("%s does not run in training", self._group.container, exc_info=True)
            return False
        finally:
            self.container.eval()
        pairs = list(zip(mine, whole, strict=False))
        is_cut = all(None not in pair and pair[0] != pair[1] for pair in pairs)
        return bool(pairs) and len(mine) == len(whole) and is_cut

    def _watch(self, candidate: Candidate | None, degree: int) -> list[tuple[int, ...] | None]:
        """Return the shapes of what is dropped between the layers, on the first rank or in one process."""
        watch = WatchDraws()
        for member in self._members.values():
            member.watch = watch
        try:
            with watch:
                self._run(candidate, 0, degree)
        finally:
            for member in self._members.values():
                member.watch = None
        return watch.shapes

    def _adds_up(self, runs: Sequence[_Run], candidate: Candidate, degree: int) -> bool:
        """Whether values and gradients of all ranks are the serial ones together."""
        serial = self._serial
        pairs = [
            *zip(zip(*(run.sums for run in runs), strict=True), serial.sums, strict=True),
            *zip(zip(*(run.entered for run in runs), strict=True), serial.entered, strict=True),
        ]
        if not all(self._close(sum_of(mine), whole) for mine, whole in pairs):
            return False
        for index, name in enumerate(self._group.columns):
            weight, bias = serial.columns[index]
            total, total_bias = torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
            for rank, run in enumerate(runs):
                spans = candidate.columns[name].spans(rank, degree)
                mine, mine_bias = run.columns[index]
                _add_into(total, mine, spans)
                if total_bias is not None and mine_bias is not None:
                    _add_into(total_bias, mine_bias, spans)
            if not self._close(total, weight) or (
                total_bias is not None and bias is not None and not self._close(total_bias, bias)
            ):
                return False
        return True

    def _fits(self, run: _Run, candidate: Candidate, rank: int, degree: int) -> bool:
        """Whether the run of a rank agrees with the serial one where each rank does by itself.

        A key-value head that several ranks hold has a share of its gradient on each, which only adds up.
        """
        serial = self._serial
        if [out.shape for out in run.outputs] != [out.shape for out in serial.outputs]:
            return False
        if not all(self._close(mine, whole) for mine, whole in zip(run.outputs, serial.outputs, strict=True)):
            return False
        row_spans = candidate.row.spans(rank, degree)
        if not self._close(run.row, pick(serial.row, row_spans, 1)):
            return False
        pairs = zip(self._group.columns, run.columns, serial.columns, strict=True)
        for name, (weight, bias), (whole, whole_bias) in pairs:
            split = candidate.columns[name]
            if any(split.sharers(part, degree) for part in range(len(split.parts))):
                continue
            spans = split.spans(rank, degree)
            if not self._close(weight, pick(whole, spans, 0)):
                return False
            if (
                bias is not None
                and whole_bias is not None
                and not self._close(bias, pick(whole_bias, spans, 0))
            ):
                return False
        return True

    def _close(self, mine: torch.Tensor, whole: torch.Tensor) -> bool:
        """Whether two tensors are equal but for rounding."""
        if mine.shape != whole.shape:
            return False
        if not whole.numel():
            return True
        mine, whole = mine.double(), whole.double()
        largest = max(float(whole.abs().max()), self._floor)
        return bool((mine - whole).abs().max() <= TOLERANCES[self._dtype] * largest)

    def _shared(self, runs: Sequence[_Run]) -> tuple[str, ...] | None:
        """Return the parameters whose gradients are shares; None when something is neither whole nor so."""
        shared: list[str] = []
        names = [*self._others, *(None for _ in range(len(self._serial.others) - len(self._others)))]
        for index, (name, whole) in enumerate(zip(names, self._serial.others, strict=True)):
            mine = [run.others[index] for run in runs]
            if whole is None:
                if any(gradient is not None and bool(gradient.abs().max() > 0) for gradient in mine):
                    return None
                continue
            found = [torch.zeros_like(whole) if gradient is None else gradient for gradient in mine]
            if any(gradient.shape != whole.shape for gradient in found):
                return None
            is_common = all(self._close(gradient, whole) for gradient in found)
            is_share = name is not None and self._close(sum_of(found), whole)
            if is_common and is_share:
                is_common = not self._feeds_summand(index)
            if is_common:
                continue
            if name is None or not is_share:
                return None
            shared.append(name)
        return tuple(shared)

    def _feeds_summand(self, index: int) -> bool:
        """Whether an output of the row layer depends on one of the other parameters or inputs."""
        if self._feeding is None:
            row = self._members[self._group.row]
            for member in self._members.values():
                member.take(None, None)
            row.given = None
            args, kwargs, inputs = self._fresh_inputs()
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                self.container(*args, **kwargs)
            others = [*self._others.values(), *([] if row.own_bias is None else [row.own_bias]), *inputs]
            summands = [summand for summand in row.seen if summand.requires_grad]
            ones = [torch.ones_like(summand) for summand in summands]
            found = torch.autograd.grad(summands, others, ones, allow_unused=True)
            self._feeding = [gradient is not None for gradient in found]
        return self._feeding[index]

    def _run(self, candidate: Candidate | None, rank: int, degree: int) -> _Run:
        """Run the copy with the weights of a rank, or as it is."""
        group = self._group
        for name, member in self._members.items():
            if candidate is None:
                member.take(None, None)
            elif name == group.row:
                member.take(None, candidate.row.spans(rank, degree))
                member.given = self._serial.sums
            else:
                member.take(candidate.columns[name].spans(rank, degree), None)
        changes = () if candidate is None else candidate.attributes
        restored = []
        for change in changes:
            module = self.container.get_submodule(change.module[len(self._prefix) :])
            restored.append((module, change.name, vars(module)[change.name]))
            setattr(module, change.name, change.values[rank])
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                return self._differentiate()
        finally:
            for module, attribute, value in restored:
                setattr(module, attribute, value)
            if candidate is None:
                self._members[group.row].given = None

    def _differentiate(self) -> _Run:
        """Run forward and backward of the copy."""
        args, kwargs, inputs = self._fresh_inputs()
        leaves = pytree.tree_leaves(self.container(*args, **kwargs))
        outputs = [leaves[index] for index in self._call.alive]
        if self._cotangents is None:
            self._cotangents = [
                torch.randn(out.shape, generator=self._source, dtype=self._dtype) for out in outputs
            ]
        total = torch.stack(
            [
                (out * weight).sum().double()
                for out, weight in zip(outputs, self._cotangents, strict=True)
                if out.requires_grad
            ]
        ).sum()
        row = self._members[self._group.row]
        columns = [self._members[name] for name in self._group.columns]
        entered = [leaf for member in columns for leaf in member.seen]
        biases = [member.own_bias for member in columns if member.own_bias is not None]
        others = [*self._others.values(), *([] if row.own_bias is None else [row.own_bias]), *inputs]
        wanted = [*entered, row.own, *(member.own for member in columns), *biases, *others]
        found = list(torch.autograd.grad(total, wanted, allow_unused=True))

        def take(count: int) -> list[Any]:
            """Return the next gradients."""
            return [found.pop(0) for _ in range(count)]

        entered_gradients = [_zero_for(g, leaf) for g, leaf in zip(take(len(entered)), entered, strict=True)]
        row_gradient = _zero_for(take(1)[0], row.own)
        weights = [_zero_for(g, m.own) for g, m in zip(take(len(columns)), columns, strict=True)]
        bias_gradients = iter(take(len(biases)))
        return _Run(
            sums=[summand.detach() for summand in row.seen],
            entered=entered_gradients,
            columns=[
                (
                    weight,
                    None if member.own_bias is None else _zero_for(next(bias_gradients), member.own_bias),
                )
                for weight, member in zip(weights, columns, strict=True)
            ],
            row=row_gradient,
            others=take(len(others)),
            outputs=[out.detach() for out in outputs],
        )

    def _materialise(self) -> tuple[Any, Any]:
        """Return the recorded arguments with values; fake tensors get random ones."""

        def fill(leaf: Any) -> Any:
            """Return one leaf with values."""
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.is_floating_point():
                is_real = type(leaf) is torch.Tensor
                return (
                    leaf.to(self._dtype)
                    if is_real
                    else torch.randn(tuple(leaf.shape), generator=self._source, dtype=self._dtype)
                )
            if type(leaf) is torch.Tensor:
                return leaf
            filler = torch.ones if leaf.dtype == torch.bool else torch.zeros
            return filler(tuple(leaf.shape), dtype=leaf.dtype)

        args, kwargs = pytree.tree_map(fill, (self._call.args, self._call.kwargs))
        return args, kwargs

    def _fresh_inputs(self) -> tuple[Any, Any, list[torch.Tensor]]:
        """Return the arguments, and those among them whose gradients are compared."""
        leaves, spec = pytree.tree_flatten(self._inputs)
        needs = iter(self._call.needs_gradient)
        found: list[torch.Tensor] = []
        fresh: list[Any] = []
        for leaf in leaves:
            value = leaf
            if isinstance(leaf, torch.Tensor):
                value = leaf.detach().clone()
                if next(needs) and value.is_floating_point():
                    value.requires_grad_()
                    found.append(value)
            fresh.append(value)
        args, kwargs = pytree.tree_unflatten(fresh, spec)
        return args, kwargs, found


def sum_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors of one shape."""
    return torch.stack(list(tensors)).sum(0)


def _add_into(total: torch.Tensor, piece: torch.Tensor, spans: Sequence[tuple[int, int]]) -> None:
    """Add a piece that has some runs of dim 0."""
    row = 0
    for start, stop in spans:
        total[start:stop] += piece[row : row + stop - start]
        row += stop - start


def _zero_for(gradient: torch.Tensor | None, leaf: torch.Tensor) -> torch.Tensor:
    """Return a gradient, zero where there is none."""
    return torch.zeros_like(leaf) if gradient is None else gradient
