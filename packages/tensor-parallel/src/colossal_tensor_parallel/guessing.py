"""Guesses about a group of layers: how many units lie between them, which parts are fused, what counts heads.

The one idea: numbers say most of it. The input of the row layer is a number of units of some width; a column
layer has as many outputs for each unit, or twice or three times as many when parts are fused, or fewer where
several queries share a key-value head. Integers that a module keeps and that equal one of these counts or
widths may have to change with them. What is right is for the proof to say, so guesses may be generous; their
order is by what is most common.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import final

from attrs import frozen

from colossal_tensor_parallel.candidates import Attribute, Candidate
from colossal_tensor_parallel.groups import Group, Layer
from colossal_tensor_parallel.proving import Bench
from colossal_tensor_parallel.roles import Role
from colossal_tensor_parallel.spans import Split

__all__ = ["Guesses", "Heads", "read_heads"]

_HEADS = re.compile(r"^(n|num|number_of)?_?(attention|attn|encoder|decoder|query|q)?_?n?heads?$|^n_?heads?$")
_KV_HEADS = re.compile(r"(kv|key_value|group).*(head|group)|n(um)?_(kv|groups)|multi_query")
_HEAD_WIDTH = re.compile(
    r"head_?(dim|size|width|features)$|^d_(kv|head|k)$|key_value_proj_dim|dim_head|channels_per_head"
)
_REPEATS = re.compile(r"rep|groups|quer")
MOST_CANDIDATES = 96


@final
@frozen(kw_only=True)
class Heads:
    """What integers around a group say about heads.

    Attributes:
        counts: Number of heads, and where it is written; most trusted first.
        kv_counts: Numbers of key-value heads.
    """

    counts: Mapping[int, str]
    kv_counts: tuple[int, ...]


def read_heads(bench: Bench, width: int) -> Heads:
    """Collect numbers of heads from attributes of modules, and from their configurations.

    Args:
        bench: The module.
        width: Input features of the row layer, which heads divide.
    """
    counts: dict[int, str] = {}
    kv: list[int] = []
    widths: dict[int, str] = {}
    sources = [
        *((f"{module or 'the model'}.{name}", name, value) for module, name, value in bench.integers()),
        *((f"config.{name}", name, value) for name, value in bench.configured()),
    ]
    for place, name, value in sources:
        if _HEAD_WIDTH.search(name):
            widths.setdefault(value, place)
        elif _KV_HEADS.search(name):
            kv.append(value)
        elif _HEADS.match(name) and width % value == 0:
            counts.setdefault(value, place)
    for value, place in widths.items():
        if width % value == 0 and width // value > 1:
            counts.setdefault(width // value, f"features per {place.rpartition('.')[2]}")
    return Heads(counts=counts, kv_counts=tuple(dict.fromkeys(kv)))


@final
class Guesses:
    """All guesses about one group for one number of ranks."""

    def __init__(
        self,
        bench: Bench,
        group: Group,
        layers: Mapping[str, Layer],
        *,
        roles: Mapping[str, Role],
        degree: int,
    ) -> None:
        """Read what numbers say.

        Args:
            bench: The module around the group.
            group: Its layers.
            layers: All layers by name.
            roles: What the user's plan says about layers.
            degree: Number of ranks.
        """
        self._bench = bench
        self._group = group
        self._sizes = {name: layers[name].num_out for name in group.columns}
        self._width = layers[group.row].num_in
        self._asked = {name: roles[name].num_parts if name in roles else None for name in group.columns}
        self._degree = degree
        self._heads = read_heads(bench, self._width)

    def __iter__(self) -> Iterator[Candidate]:
        """Yield guesses, likely ones first."""
        units = [count for count in self._heads.counts if count % self._degree == 0]
        if self._width >= self._degree:
            units.append(self._width)
        candidates = itertools.chain.from_iterable(map(self._with_units, dict.fromkeys(units)))
        yield from itertools.islice(candidates, MOST_CANDIDATES)

    def _with_units(self, num_units: int) -> Iterator[Candidate]:
        """Yield guesses with a given number of units."""
        row = Split.whole(self._width, num_units)
        kv_counts = self._kv_counts(num_units)
        keys = {name: (self._sizes[name], self._asked[name]) for name in self._group.columns}
        options = {key: list(self._splits(*key, num_units, kv_counts)) for key in keys.values()}
        for chosen in itertools.product(*options.values()):
            by_key = dict(zip(options, chosen, strict=True))
            columns = {name: by_key[key] for name, key in keys.items()}
            for attributes in self._attribute_sets([row, *columns.values()], num_units, kv_counts):
                yield Candidate(columns=columns, row=row, attributes=attributes)

    def _kv_counts(self, num_units: int) -> tuple[int, ...]:
        """Return numbers of key-value heads that are possible and can be divided or shared."""
        if num_units == self._width:
            return ()
        each = self._width // num_units
        seen = [size // each for size in self._sizes.values() if size % each == 0]
        return tuple(
            count
            for count in dict.fromkeys([*self._heads.kv_counts, *seen, 1])
            if 0 < count < num_units
            and num_units % count == 0
            and max(count, self._degree) % min(count, self._degree) == 0
        )

    def _splits(
        self, size: int, asked: int | None, num_units: int, kv_counts: tuple[int, ...]
    ) -> Iterator[Split]:
        """Yield ways in which the outputs of a column layer may divide."""
        width, each = self._width, self._width // num_units
        if asked is not None:
            if size % (asked * num_units) == 0:
                yield Split.whole(size, num_units, asked)
            return
        fused = [count for count in (3, 2, 4) if size == count * width]
        fused += [count for count in (2, 3, 4) if size % (count * num_units) == 0 and size != count * width]
        one = [1] if size % num_units == 0 else []
        for count in [*one, *fused] if size == width else [*fused, *one]:
            yield Split.whole(size, num_units, count)
        for kv in kv_counts:
            for count in (1, 2):
                if size == kv * each * count:
                    yield Split.whole(size, kv, count)
            if size == (num_units + 2 * kv) * each:
                first = num_units * each
                yield Split(parts=((0, each, num_units), (first, each, kv), (first + kv * each, each, kv)))
                if kv % self._degree == 0:
                    yield Split.whole(size, kv)

    def _attribute_sets(
        self, splits: Sequence[Split], num_units: int, kv_counts: tuple[int, ...]
    ) -> Iterator[tuple[Attribute, ...]]:
        """Yield sets of integers that may have to change, from none to many."""
        shares = {count: self._shares(Split.whole(count, count)) for count in (num_units, *kv_counts)}
        widths: dict[int, tuple[int, ...]] = {}
        for split in splits:
            _, each, count = split.parts[0]
            for part in (split, Split(parts=((0, each, count),))):
                widths.setdefault(part.size, self._shares(part))
        counting, measuring, repeating = [], [], []
        for module, name, value in self._bench.integers():
            says_heads = "head" in name or "kv" in name or "group" in name
            if says_heads and not _HEAD_WIDTH.search(name) and value in shares:
                counting.append(Attribute(module, name, shares[value]))
            elif value in widths:
                measuring.append(Attribute(module, name, widths[value]))
            for kv in kv_counts:
                if value == num_units // kv and _REPEATS.search(name) and kv < self._degree:
                    ratios = tuple(q // k for q, k in zip(shares[num_units], shares[kv], strict=True))
                    repeating.append(Attribute(module, name, ratios))
        known: set[tuple[Attribute, ...]] = set()
        for chosen in ([], counting, [*counting, *measuring], measuring):
            for extra in ([], repeating):
                attributes = tuple({(a.module, a.name): a for a in (*chosen, *extra)}.values())
                if attributes not in known:
                    known.add(attributes)
                    yield attributes

    def _shares(self, split: Split) -> tuple[int, ...]:
        """Return how many elements each rank has."""
        return tuple(split.local_size(rank, self._degree) for rank in range(self._degree))
