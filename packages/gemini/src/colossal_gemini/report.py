"""Whether training fits, what will live where, and what that costs. No torch here.

The one idea: all of it follows from a trace, budgets and rates, so a report is worked out again from these
wherever it is read, and a saved one needs nothing but the standard library.

# Note [Estimated time]
While a moment computes, what comes early, and the gradients that leave, travel; what it waits for comes
before it. The update computes and moves its chunks side by side. So a moment lasts as long as the longer of
the two, and waits are added. The slow-down is against a device that holds everything, with the same ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, final

import attrs

from colossal_core.errors import CapabilityError, UsageError
from colossal_gemini.budgets import show_bytes
from colossal_gemini.costs import TIERS, Arrangement, Budgets, Prices, Rates, Tier, update_moves
from colossal_gemini.eviction import Plan, describe_load, find_peak, simulate
from colossal_gemini.placement import Placement, least_device_budget, place
from colossal_gemini.trace import Trace

__all__ = ["FitReport", "judge"]

FORMAT = 1
"""Of saved reports."""

_NEAR = Arrangement(value="device", gradient="device", state="device", update="device")


@final
@attrs.frozen(kw_only=True)
class FitReport:
    """Says whether a model trains within budgets; printed, it is a table.

    Attributes:
        title: Model, precision and ranks, for people.
        trace: The step.
        budgets: Of this rank.
        ranks: Among how many ranks chunks are divided.
        optimizer_states: Moments that the optimizer keeps for each element.
        policy: The option ``placement``.
        rates: That times were estimated with.
        prefetch: Whether chunks come early.
        fits: Whether it trains.
        least_budget: Least bytes of the device with which it does, the other budgets being as they are; one
            byte less is refused before training. None when no device is large enough.
        refusal: When it does not fit: by how much, and in which moment.
        hint: When it does not fit: settings with which it would.
        placement: What lives where; None when it does not fit.
        plan: What a step does; None when it does not fit.
        moved_bytes: Bytes that this rank moves in a step, by link: ``"host to device"``, ``"gathers"``.
        seconds: Estimate of a step; 0 when it does not fit.
        slow_down: Of that against a device that holds everything; 0 when it does not fit.
    """

    title: str
    trace: Trace
    budgets: Budgets
    ranks: int
    optimizer_states: int
    policy: Literal["auto", "static"]
    rates: Rates
    prefetch: bool
    fits: bool
    least_budget: int | None
    refusal: str = ""
    hint: str = ""
    placement: Placement | None = None
    plan: Plan | None = None
    moved_bytes: dict[str, int] = attrs.field(factory=dict, hash=False)
    seconds: float = 0.0
    slow_down: float = 0.0

    @property
    def waste(self) -> float:
        """Padding of chunks, as a fraction of what their parameters take."""
        used = sum(chunk.used * chunk.value_bytes for chunk in self.trace.chunks)
        return sum(chunk.whole_bytes for chunk in self.trace.chunks) / used - 1 if used else 0.0

    def save(self, path: str | Path) -> None:
        """Write the report as JSON: its trace, and what it was judged by."""
        kept = {
            "format": FORMAT,
            "title": self.title,
            "trace": self.trace.to_dict(),
            "budgets": attrs.asdict(self.budgets),
            "ranks": self.ranks,
            "optimizer_states": self.optimizer_states,
            "policy": self.policy,
            "rates": attrs.asdict(self.rates),
            "prefetch": self.prefetch,
        }
        Path(path).write_text(json.dumps(kept, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> FitReport:
        """Return a report that was saved.

        Raises:
            UsageError: The file is none.
        """
        try:
            kept: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
            trace, budgets = Trace.from_dict(kept.pop("trace")), Budgets(**kept.pop("budgets"))
            rates, known = Rates(**kept.pop("rates")), kept.pop("format") == FORMAT
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
            raise UsageError(
                f"{str(path)!r} is no saved report: {type(err).__name__}: {err}",
                hint="write one with Gemini(...).fit(model, batch).save(path)",
            ) from err
        if not known:
            raise UsageError(
                f"{str(path)!r} is a report in another format than {FORMAT}", hint="write it anew"
            )
        return judge(trace, budgets, rates=rates, **kept)

    def __str__(self) -> str:
        """Return the table."""
        lines = [f"{self.title}: {'fits' if self.fits else 'does not fit'}", ""]
        lines += self._show_places() if self.placement is not None else [self.refusal, f"  next: {self.hint}"]
        lines.append("")
        lines += self._show_needs()
        if self.fits:
            lines += self._show_costs()
        return "\n".join(lines)

    def _show_places(self) -> list[str]:
        """Return the lines of what lives where."""
        assert self.placement is not None
        found = {tier: self.placement.bytes_in(tier) for tier in TIERS}
        rows = [["", *TIERS]]
        rows += [
            [category, *(show_bytes(found[tier][category]) for tier in TIERS)] for category in found["device"]
        ]
        rows.append(["in all", *(show_bytes(sum(found[tier].values())) for tier in TIERS)])
        limits = {"device": self.budgets.device, "host": self.budgets.host, "disk": self.budgets.disk}
        shown = {None: "no limit", 0: "none"}
        rows.append(["budget", *(shown.get(limit) or show_bytes(limit or 0) for limit in limits.values())])
        updates = sum(
            states.moments
            for where, states in zip(self.placement.chunks, self.placement.states, strict=True)
            if where.update == "device"
        )
        every = sum(states.moments for states in self.placement.states)
        share = f"{updates / every:.0%}" if every else "nothing"
        return [
            *(f"{row[0]:<10}" + "".join(f"{cell:>13}" for cell in row[1:]) for row in rows),
            f"updated on the device: {share}; staging on the host: {show_bytes(self.placement.host_staging)}",
        ]

    def _show_needs(self) -> list[str]:
        """Return the lines of what the device needs."""
        least = "no budget does" if self.least_budget is None else f"{self.least_budget} bytes"
        if self.least_budget is not None and self.least_budget >= 1024:
            least += f" ({show_bytes(self.least_budget)})"
        largest = show_bytes(max(chunk.whole_bytes for chunk in self.trace.chunks))
        lines = [f"least device budget: {least}"]
        if self.placement is not None:
            peak = describe_load(find_peak(self.trace, self.placement.room), self.trace)
            lines.append(f"most is needed when {peak}")
        return [*lines, f"chunks: {len(self.trace.chunks)}, of {largest} at most; padding {self.waste:.2%}"]

    def _show_costs(self) -> list[str]:
        """Return the lines of what a step moves and takes."""
        assert self.plan is not None
        moved = ", ".join(f"{link} {show_bytes(size)}" for link, size in self.moved_bytes.items() if size)
        return [
            f"each step gathers {self.plan.num_gathers} chunks and moves: {moved or 'nothing'}",
            f"estimated {self.seconds:.3g} s a step, {self.slow_down:.2f} times one with everything there",
        ]


def judge(
    trace: Trace,
    budgets: Budgets,
    *,
    title: str = "model",
    ranks: int = 1,
    optimizer_states: int = 2,
    policy: Literal["auto", "static"] = "auto",
    rates: Rates | None = None,
    prefetch: bool = True,
) -> FitReport:
    """Return what follows from a trace and budgets.

    Args:
        trace: One step.
        budgets: Of one rank.
        title: For people.
        ranks: Among how many ranks chunks are divided.
        optimizer_states: Moments that the optimizer keeps for each element.
        policy: The option ``placement``.
        rates: Of links and updates.
        prefetch: Whether chunks come early.
    """
    rates = Rates() if rates is None else rates
    least = least_device_budget(
        trace, budgets, ranks=ranks, optimizer_states=optimizer_states, rates=rates, policy=policy
    )
    report = FitReport(
        title=title,
        trace=trace,
        budgets=budgets,
        ranks=ranks,
        optimizer_states=optimizer_states,
        policy=policy,
        rates=rates,
        prefetch=prefetch,
        fits=False,
        least_budget=least,
    )
    try:
        placement = place(
            trace, budgets, ranks=ranks, optimizer_states=optimizer_states, rates=rates, policy=policy
        )
    except CapabilityError as err:
        return attrs.evolve(report, refusal=err.message, hint=err.hint)
    plan = simulate(trace, placement.room, prefetch=prefetch)
    prices = Prices(rates, ranks, budgets.host != 0, streams=True)
    seconds, baseline = _estimate(trace, placement, plan, prices)
    return attrs.evolve(
        report,
        fits=True,
        placement=placement,
        plan=plan,
        moved_bytes=_count_moves(trace, placement, plan, has_host=budgets.host != 0),
        seconds=seconds,
        slow_down=seconds / baseline if baseline else 1.0,
    )


def _count_moves(trace: Trace, placement: Placement, plan: Plan, *, has_host: bool) -> dict[str, int]:
    """Return the bytes that a step moves, by link and direction."""
    moved = dict.fromkeys(
        ("host to device", "device to host", "disk to host", "host to disk", "gathers", "reductions"), 0
    )
    if not has_host:  # files lie right below the device
        moved = {name.replace("host", "device"): 0 for name in moved if "device" not in name} | {
            "gathers": 0,
            "reductions": 0,
        }

    def count(num_bytes: int, start: Tier, end: Tier) -> None:
        path = [tier for tier in TIERS if has_host or tier != "host"]
        first, last = path.index(start), path.index(end)
        step = 1 if last > first else -1
        for place_ in range(first, last, step):
            moved[f"{path[place_]} to {path[place_ + step]}"] += num_bytes

    ranks = placement.ranks
    for chunk, states, where in zip(trace.chunks, placement.states, placement.chunks, strict=True):
        gathers = plan.gathers_of(chunk.index)
        remote = chunk.whole_bytes * (ranks - 1) // ranks
        count(gathers * states.value, where.value, "device")
        moved["gathers"] += gathers * remote
        if chunk.is_trainable:
            moved["reductions"] += remote
            count(states.gradient, "device", where.gradient)
            for row in update_moves(states, where):
                count(*row)
    return moved


def _estimate(trace: Trace, placement: Placement, plan: Plan, prices: Prices) -> tuple[float, float]:
    """Return the seconds of a step, and of one with everything on the device; see Note [Estimated time]."""

    def gather(chunk: int) -> float:
        where = placement.chunks[chunk]
        found = prices.move(placement.states[chunk].value, where.value, "device")
        return found + prices.gather(trace.chunks[chunk])

    def reduce(chunk: int) -> float:
        leaves = prices.move(placement.states[chunk].gradient, "device", placement.chunks[chunk].gradient)
        return leaves + prices.gather(trace.chunks[chunk])

    seconds, held = 0.0, frozenset[int]()
    for moment, stay in zip(trace.moments, plan.moments, strict=True):
        seconds += sum(gather(chunk) for chunk in stay.gathers)
        moving = sum(gather(chunk) for chunk in stay.prefetches)
        moving += sum(reduce(chunk) for chunk in held - frozenset(moment.gradients))
        held = frozenset(moment.gradients)
        seconds += max(moment.flop / prices.rates.compute, moving)
    updating: dict[Tier, float] = dict.fromkeys(TIERS, 0.0)
    travelling = near = 0.0
    for chunk, states, where in zip(trace.chunks, placement.states, placement.chunks, strict=True):
        if chunk.is_trainable:
            updating[where.update] += prices.update(states, where)
            travelling += sum(prices.move(*row) for row in update_moves(states, where))
            near += prices.update(states, _NEAR) + 2 * prices.gather(chunk)
    near += sum(moment.flop for moment in trace.moments) / prices.rates.compute
    return seconds + max(*updating.values(), travelling), near
