"""What becomes of every layer of a model, and why.

The one idea: sources are asked in order of trust. The user's patterns decide first, then policies of plugins.
Groups of layers that a forward showed are cut in pairs where a proof goes through. Tables and heads of a
vocabulary are cut by rows.
Any other linear layer that is called as a module is cut by output features, which are gathered: that is right
whatever the model does with them. The rest stays whole, and each layer has its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
from attrs import evolve
from torch import nn

from colossal_core.errors import CapabilityError, UsageError
from colossal_tensor_parallel.attention import choose_attentions, last_layer
from colossal_tensor_parallel.candidates import Attribute, Proof, UnitCut
from colossal_tensor_parallel.decisions import Decision, ModelPlan
from colossal_tensor_parallel.examples import Example
from colossal_tensor_parallel.experts import find_experts
from colossal_tensor_parallel.groups import Group, Layer, find_groups, list_layers
from colossal_tensor_parallel.guessing import Guesses, read_heads
from colossal_tensor_parallel.patterns import match_policies, match_roles, read_library_plan
from colossal_tensor_parallel.proving import Bench
from colossal_tensor_parallel.regions import find_regions, with_shares
from colossal_tensor_parallel.roles import Role
from colossal_tensor_parallel.spans import Split, legal_degrees
from colossal_tensor_parallel.tables import rows_are_additive
from colossal_tensor_parallel.tracing import Trace, trace_model

if TYPE_CHECKING:
    from colossal_core.plugins import Registered

__all__ = ["plan_model"]

SMALL_TABLE = 0.05
"""Embeddings with a smaller part of all matrix elements stay whole: positions, token types."""


def plan_model(
    model: nn.Module,
    degree: int,
    patterns: Mapping[str, str] | None = None,
    example: Example | None = None,
    *,
    sequence: bool = False,
    policies: Sequence[Registered] = (),
) -> ModelPlan:
    """Decide about every layer; pure.

    Args:
        model: The serial model.
        degree: Number of ranks.
        patterns: Roles by patterns of module names.
        example: Arguments of one forward; guessed when None.
        sequence: Whether activations between the cut layers are divided along the tokens.
        policies: Records of sharding policies, which go before everything but the patterns.

    Raises:
        UsageError: A pattern matches nothing, asks for what is wrong, or heads do not divide.
        CapabilityError: Nothing of the model can be cut, or nothing divided along the tokens.
    """
    layers = list_layers(model)
    roles = {**match_policies(model, layers, policies), **match_roles(patterns or {}, layers, model)}
    if degree == 1:
        stay = tuple(
            Decision(name=name, cut="whole", form=layer.form, reason="degree is 1")
            for name, layer in layers.items()
        )
        return ModelPlan(decisions=stay, attributes=(), shared=())
    trace = trace_model(model, example)
    made = _Planner(model, degree, layers, roles, trace).plan()
    return _with_regions(made, model, trace) if sequence else made


def _with_regions(made: ModelPlan, model: nn.Module, trace: Trace | str) -> ModelPlan:
    """Add what is divided along the tokens.

    Raises:
        CapabilityError: Nothing can be.
    """
    found = trace if isinstance(trace, str) else find_regions(model, made, trace)
    if isinstance(found, str):
        raise CapabilityError(
            f"activations of this {type(model).__name__} cannot be divided along the sequence: {found}",
            hint="leave sequence=True out: layers are cut all the same",
        )
    regions = with_shares(found, made.decisions, model)
    twice = [name for name in regions.shares if name in made.shared]
    if twice:
        raise CapabilityError(
            f"{', '.join(twice)} of this {type(model).__name__} are used between cut layers and on divided "
            "sequences, and their gradients would be shares of two kinds",
            hint="leave sequence=True out: layers are cut all the same",
        )
    return evolve(made, shared=(*made.shared, *regions.shares), regions=regions)


@final
class _Planner:
    """Decisions about one model, made in order of trust."""

    def __init__(
        self,
        model: nn.Module,
        degree: int,
        layers: Mapping[str, Layer],
        roles: Mapping[str, Role],
        trace: Trace | str,
    ) -> None:
        """Collect what is known; of a forward that did not run that is why."""
        self._model = model
        self._degree = degree
        self._layers = layers
        self._roles = roles
        self._trace = trace if isinstance(trace, Trace) else None
        self._failure = trace if isinstance(trace, str) else ""
        self._found: dict[str, Decision] = {}
        self._attributes: list[Attribute] = []
        self._shared: list[str] = []
        self._units: list[UnitCut] = []
        self._proofs: dict[object, Proof | None] = {}
        self._library = read_library_plan(model, layers)
        self._called_places = {
            self._place(name)
            for name, use in ({} if self._trace is None else self._trace.layers).items()
            if use.num_calls and not use.is_read_outside
        }
        self._ties: dict[torch.Tensor, list[str]] = {}
        for name, layer in layers.items():
            self._ties.setdefault(layer.weight, []).append(name)

    def plan(self) -> ModelPlan:
        """Decide about everything.

        Raises:
            UsageError: See :func:`plan_model`.
            CapabilityError: See :func:`plan_model`.
        """
        self._decide_attentions()
        self._decide_wholes()
        self._decide_groups()
        self._decide_tables()
        for name in self._layers:
            if name not in self._found:
                self._decide_alone(name)
        self._check_roles()
        decisions = tuple(self._found[name] for name in self._layers)
        if self._trace is not None:
            self._units += find_experts(self._model, self._trace, self._degree)
        for unit in self._units:
            self._attributes.extend(unit.attributes)
        if not self._units and all(decision.cut == "whole" for decision in decisions):
            reasons = dict.fromkeys(decision.reason for decision in decisions)
            raise CapabilityError(
                f"nothing of this {type(self._model).__name__} can be cut among {self._degree} ranks: "
                + (", ".join(reasons) or "it has no layers with matrices"),
                hint="name layers in TensorParallel(plan={pattern: 'gathered-column'}), or leave it out",
            )
        return ModelPlan(
            decisions=decisions,
            attributes=tuple(self._attributes),
            shared=tuple(dict.fromkeys(self._shared)),
            units=tuple(self._units),
        )

    # --- modules that are cut in one piece ------------------------------------------------------------------

    def _decide_attentions(self) -> None:
        """Cut the attention modules of torch, with their last layers."""
        for choice in choose_attentions(self._model, self._trace or self._failure, self._roles, self._degree):
            name = last_layer(choice.name)
            if choice.cut is None:
                self._keep(name, choice.reason)
                continue
            self._units.append(choice.cut)
            self._found[name] = Decision(
                name=name,
                cut="row",
                form="linear",
                split=choice.last,
                reason=choice.reason,
            )

    # --- what cannot be cut ---------------------------------------------------------------------------------

    def _decide_wholes(self) -> None:
        """Leave whole what the user wants so, and what cannot be cut in any way."""
        for name, layer in self._layers.items():
            reason = self._obstacle(layer)
            role = self._roles.get(name)
            if role is not None and role.cut == "whole":
                reason = f"{role.source} says so"
            if reason is not None:
                for tied in self._ties[layer.weight]:
                    self._keep(tied, reason)

    def _keep(self, name: str, reason: str) -> None:
        """Leave a layer whole."""
        form = self._layers[name].form
        self._found.setdefault(name, Decision(name=name, cut="whole", form=form, reason=reason))

    def _obstacle(self, layer: Layer) -> str | None:
        """Return why a layer cannot be cut, or None."""
        if layer.name == "":
            return "it is the whole model"
        if layer.form == "other":
            return "its forward is no product with its weight"
        if layer.num_out < self._degree:
            return f"it has {layer.num_out} output features"
        if "forward" in vars(layer.module):
            return "its forward was set on the object"
        return self._obstacle_of_use(layer)

    def _obstacle_of_use(self, layer: Layer) -> str | None:
        """Return why the way in which a layer is used does not allow a cut, or None."""
        if self._trace is None:
            is_asked = layer.name in self._roles
            return None if is_asked else f"no arguments were found with which it runs ({self._failure})"
        uses = [self._trace.layers[name] for name in self._ties[layer.weight]]
        if any(use.is_read_outside for use in uses):
            return "another module reads its weight"
        if any(use.num_calls for use in uses) or self._has_called_twin(layer):
            return None
        return "the forward did not call it"

    def _has_called_twin(self, layer: Layer) -> bool:
        """Whether the forward called the same layer of another module of the same class.

        That of cross-attention is the same class as that of attention, and is skipped without an encoder.
        """
        return self._place(layer.name) in self._called_places

    def _place(self, name: str) -> tuple[type[nn.Module], str]:
        """Return the class of the module around a layer, and the layer's name in it."""
        parent, _, own = name.rpartition(".")
        return type(self._model.get_submodule(parent)), own

    # --- pairs ----------------------------------------------------------------------------------------------

    def _decide_groups(self) -> None:
        """Cut groups of layers for which a proof is found."""
        if self._trace is None:
            return
        for group in find_groups(self._layers, self._trace):
            if not self._is_open(group):
                continue
            proof = self._prove(group)
            if proof is None:
                continue
            self._shared.extend(proof.shared)
            self._attributes.extend(proof.candidate.attributes)
            for name in group.columns:
                split = proof.candidate.columns[name]
                self._found[name] = Decision(
                    name=name,
                    cut="column",
                    form=self._layers[name].form,
                    drops=proof.drops,
                    split=split,
                    reason=self._reason(name, group, split),
                )
            self._found[group.row] = Decision(
                name=group.row,
                cut="row",
                form=self._layers[group.row].form,
                split=proof.candidate.row,
                reason=self._reason(group.row, group, proof.candidate.row),
            )

    def _is_open(self, group: Group) -> bool:
        """Whether nothing speaks against a group: ties, decisions, and what the user asked for."""
        for name in group.names:
            role = self._roles.get(name)
            wanted = "row" if name == group.row else "column"
            if name in self._found or len(self._ties[self._layers[name].weight]) > 1:
                return False
            if role is not None and role.cut != wanted:
                return False
        return True

    def _reason(self, name: str, group: Group, split: Split) -> str:
        """Say who wanted a cut, and what it divides."""
        source = "found in the forward"
        if name in self._library:
            source = f"the model's own plan says {self._library[name]!r}"
        if name in self._roles:
            source = f"{self._roles[name].source} says so"
        _, width, count = split.parts[0]
        parts = f"{len(split.parts)} parts of " if len(split.parts) > 1 else ""
        what = f"{parts}{count} features" if width == 1 else f"{parts}{count} units of {width} features"
        pair = f"{', '.join(c.rpartition('.')[2] for c in group.columns)} -> {group.row.rpartition('.')[2]}"
        return f"{source}, proved: {what} divide in {pair}"

    def _prove(self, group: Group) -> Proof | None:
        """Find a proof, or take that of an equal group in another block.

        Raises:
            UsageError: The group divides among other numbers of ranks only.
        """
        assert self._trace is not None
        container = self._model.get_submodule(group.container) if group.container else self._model
        key = _signature(container, group, self._roles)
        if key in self._proofs:
            found = self._proofs[key]
            return None if found is None else found.renamed(_inside(group))
        call = self._trace.calls[group.container]
        bench = Bench.set_up(container, group, self._layers, call, self._trace.dtype)
        proof = None if bench is None else self._try(bench, group, self._degree)
        if proof is None and bench is not None:
            self._refuse_heads(bench, group)
        self._proofs[key] = proof
        return None if proof is None else proof.renamed(_inside(group))

    def _try(self, bench: Bench, group: Group, degree: int) -> Proof | None:
        """Try guesses until one is right."""
        for candidate in Guesses(bench, group, self._layers, roles=self._roles, degree=degree):
            proof = bench.prove(candidate, degree)
            if proof is not None:
                return proof.renamed(_outside(group))
        return None

    def _refuse_heads(self, bench: Bench, group: Group) -> None:
        """Refuse a degree that does not divide heads, where another one would.

        Raises:
            UsageError: Naming the attribute, its value, and the degrees that are legal.
        """
        heads = read_heads(bench, self._layers[group.row].num_in)
        for count, place in heads.counts.items():
            for kv in (*heads.kv_counts, count):
                legal = legal_degrees(count, kv)
                if self._degree in legal or len(legal) < 2:
                    continue
                if self._try(bench, group, legal[1]) is not None:
                    shown = f"{count} heads ({place})" + (f" and {kv} KV heads" if kv != count else "")
                    raise UsageError(
                        f"{shown} of {group.container or 'the model'!r} do not divide among "
                        f"{self._degree} ranks; legal degrees are {', '.join(map(str, legal))}",
                        hint="choose one of them, or leave the heads whole with "
                        f"TensorParallel(plan={{{group.columns[0]!r}: 'gathered-column', ...}})",
                    )

    # --- vocabularies and the rest --------------------------------------------------------------------------

    def _decide_tables(self) -> None:
        """Cut embeddings by rows, with the heads that are tied to them, and heads of the same vocabulary."""
        total = sum(weight.numel() for weight in self._ties)
        vocabularies: set[int] = set()
        for weight, names in self._ties.items():
            tables = [name for name in names if self._layers[name].form == "embedding"]
            if not tables or any(name in self._found for name in names):
                continue
            vocabularies.add(int(weight.shape[0]))
            asked = any(self._roles[name].cut == "vocabulary" for name in names if name in self._roles)
            obstacle = self._table_obstacle(names)
            if obstacle is None and not asked and weight.numel() < SMALL_TABLE * total and len(names) == 1:
                obstacle = "it is a small table"
            for name in names:
                if obstacle is not None:
                    self._keep(name, obstacle)
                    continue
                tied = "" if len(names) == 1 else f", tied to {', '.join(n for n in names if n != name)}"
                self._found[name] = Decision(
                    name=name,
                    cut="vocabulary",
                    form=self._layers[name].form,
                    split=Split.whole(int(weight.shape[0]), int(weight.shape[0])),
                    reason=f"a table of {weight.shape[0]} rows{tied}",
                    is_head=name not in tables,
                )
        for name, layer in self._layers.items():
            if name not in self._found and self._is_head(layer, vocabularies):
                self._found[name] = Decision(
                    name=name,
                    cut="vocabulary",
                    form=self._layers[name].form,
                    split=Split.whole(layer.num_out, layer.num_out),
                    reason=f"a head of {layer.num_out} logits, which losses read in pieces",
                    is_head=True,
                )

    def _table_obstacle(self, names: Sequence[str]) -> str | None:
        """Return why a table and what is tied to it cannot be cut by rows."""
        for name in names:
            layer = self._layers[name]
            role = self._roles.get(name)
            if role is not None and role.cut != "vocabulary":
                return f"{role.source} asks for something else, and tables are cut by rows"
            if layer.form not in {"embedding", "linear"}:
                return "it is tied to a layer whose weight is transposed"
            if isinstance(layer.module, nn.Embedding):
                if (
                    layer.module.max_norm is not None
                    or layer.module.sparse
                    or layer.module.scale_grad_by_freq
                ):
                    return "its gradients are sparse or scaled, or its rows are rescaled when they are read"
                calls = {} if self._trace is None else self._trace.calls
                # A table that is tied to others may never be called under its own name.
                twins = [other for other in names if type(self._layers[other].module) is type(layer.module)]
                call = next((calls[twin] for twin in (name, *twins) if twin in calls), None)
                if not rows_are_additive(layer.module, call, self._degree):
                    return "its forward does more than to look up rows"
        return None

    def _is_head(self, layer: Layer, vocabularies: set[int]) -> bool:
        """Whether a layer computes logits of a vocabulary that leave the model."""
        if layer.form != "linear" or len(self._ties[layer.weight]) > 1:
            return False
        role = self._roles.get(layer.name)
        if role is not None:
            return role.cut == "vocabulary"
        use = None if self._trace is None else self._trace.layers[layer.name]
        return use is not None and use.reaches_output and not use.children and layer.num_out in vocabularies

    def _decide_alone(self, name: str) -> None:
        """Gather the outputs of a layer that is in no pair."""
        layer = self._layers[name]
        tied = self._ties[layer.weight]
        if not layer.is_linear or len({self._layers[other].form for other in tied}) > 1:
            self._keep(name, "its weight is tied to a layer of another kind")
            return
        reason = "in no pair that could be proved; right whatever reads its outputs"
        if name in self._library:
            reason = f"the model's own plan says {self._library[name]!r}; {reason}"
        self._found[name] = Decision(
            name=name,
            cut="gathered-column",
            form=layer.form,
            split=Split.whole(layer.num_out, layer.num_out),
            reason=reason,
        )

    def _check_roles(self) -> None:
        """Refuse what the user asked for and what is not done.

        Raises:
            UsageError: Naming the layer, the wish and the reason.
        """
        for name, role in self._roles.items():
            decision = self._found[name]
            if decision.cut != role.cut:
                why = (
                    decision.reason if decision.cut == "whole" else "the cut could not be proved to be right"
                )
                raise UsageError(
                    f"{role.source} wants {name!r} to be {role.cut!r}, which it cannot: {why}",
                    hint="leave it to the piece, or ask for 'gathered-column' or 'whole'; "
                    "colossal_tensor_parallel.explain(model, degree) says what it would do",
                )


def _outside(group: Group) -> Callable[[str], str]:
    """Return what makes names in the container of a group of names in the model."""
    length = len(group.container) + 1 if group.container else 0
    return lambda name: name[length:]


def _inside(group: Group) -> Callable[[str], str]:
    """Return what makes names in the model of names in the container of a group."""
    return lambda name: ".".join(filter(None, (group.container, name)))


def _signature(container: nn.Module, group: Group, roles: Mapping[str, Role]) -> object:
    """Return what equal groups in different blocks have in common."""
    prefix = f"{group.container}." if group.container else ""
    scalars = tuple(
        (name, attribute, value)
        for name, module in container.named_modules()
        for attribute, value in sorted(vars(module).items())
        if type(value) in {int, bool, float, str} and "idx" not in attribute and "index" not in attribute
    )
    return (
        type(container),
        tuple(name.removeprefix(prefix) for name in group.names),
        tuple(roles.get(name) for name in group.names),
        tuple((name, tuple(p.shape), p.requires_grad) for name, p in container.named_parameters()),
        scalars,
    )
