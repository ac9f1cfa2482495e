"""The optimizer that ``boost`` returns.

The one idea: it is a ``torch.optim.Optimizer`` over the user's parameter groups, the same list of the same
dicts, so schedulers and user code read and change the real settings; only the arithmetic happens elsewhere,
in the memory manager, after the gradients were reduced, measured and clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, final

import torch

from colossal_core.errors import UsageError
from colossal_core.runtime.accumulation import AccumulationWindow
from colossal_core.runtime.norm import clip_factor

if TYPE_CHECKING:
    from colossal_core.runtime.engine import Engine

__all__ = ["BoostedOptimizer"]


def refuse_step(*_args: Any, **_kwargs: Any) -> None:
    """Stand in for ``step`` of the user's old object, which no longer holds what would be updated.

    Raises:
        UsageError: Always.
    """
    raise UsageError(
        "this is the optimizer that was given to boost(), which no longer updates anything",
        hint="call step() of the optimizer that boost() returned",
    )


# Schedulers look for this mark to see whether they are the ones who watch ``step``.
refuse_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001 - torch's own mark


@final
class BoostedOptimizer(torch.optim.Optimizer):
    """Steps the user's optimizer on reduced gradients; made by ``Booster.boost``.

    Attributes:
        param_groups: The user's own list.
        max_grad_norm: Bound of the gradient norm, or None; may be set at any time, equally on all ranks.
        grad_norm: Norm of all gradients before clipping, of the last real step: 0-d fp64, equal on all ranks.
            NaN before the first.
        stepped: Whether the last call of :meth:`step` updated anything.
        skipped_steps: How many windows did not, because gradients were not finite.
    """

    def __init__(self, user: torch.optim.Optimizer, engine: Engine, index: int) -> None:
        """Wrap the user's optimizer; its state has moved to the memory manager.

        Args:
            user: The user's optimizer.
            engine: The Booster's engine.
            index: Position of this optimizer in the ``boost`` call.
        """
        super().__init__(user.param_groups, user.defaults)
        self.param_groups = user.param_groups
        self.user = user
        self.max_grad_norm: float | None = engine.context.plan.max_grad_norm
        self.grad_norm = torch.full((), math.nan, dtype=torch.float64)
        self.stepped = False
        self.skipped_steps = 0
        self._engine = engine
        self._index = index
        self._is_released = False
        self._clip: float | None = None
        self._window = AccumulationWindow(engine.context.plan.accumulate)
        self._users_step = user.__dict__.get("step")  # a scheduler or profiler may have patched it
        user.__dict__["step"] = refuse_step
        self._optimizer_step_pre_hooks.update(user._optimizer_step_pre_hooks)  # noqa: SLF001 - torch has no getter
        self._optimizer_step_post_hooks.update(user._optimizer_step_post_hooks)  # noqa: SLF001 - torch has no getter

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce, measure, clip and update; collective over all ranks.

        With ``accumulate=k`` only every k-th call does so, with the mean over the micro-batches in between,
        weighted as they were; the others, with their ``zero_grad()`` and ``scheduler.step()``, do nothing.
        The last batch of a boosted loader closes the window, full or not.

        Args:
            closure: Evaluates the loss and runs backward, as in torch; called once.

        Returns:
            What the closure returned.

        Raises:
            NonFiniteError: A gradient on any rank is not finite and the plan does not say to skip; on every
                rank, naming the parameter, before anything is updated.
        """
        self._check_alive()
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.stepped = False
        self._window.add(self._engine.context.weights.take(self._index))
        if self._window.is_full or self._engine.shares.closes_windows:
            with self._engine.reporting():
                self._take_step()
        return result

    @torch.no_grad()
    def flush(self) -> None:
        """Close an accumulation window that is not full, with the micro-batches that it has; collective.

        Does nothing when no micro-batch is waiting.
        """
        self.stepped = False
        if self._window.num_batches:
            with self._engine.reporting():
                self._take_step()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Clear the gradients as torch does; does nothing inside an accumulation window.

        After ``clip_grad_norm_`` or ``full_gradients``, before ``step``, it leaves the step out; collective.
        """
        if self._window.num_batches:
            return
        super().zero_grad(set_to_none=set_to_none)
        self._clip = None
        if not self._is_released:
            self._engine.manager.clear(self._index)

    def _take_step(self) -> None:
        """Reduce, measure, clip and update, or skip."""
        self._engine.before_step()
        if self._index == 0:
            self._engine.shares.note_step()
        # Schedulers that were made over the user's object look there for the order of calls.
        self.user.__dict__["_opt_called"] = True
        manager = self._engine.manager
        share = self._window.close()
        clip, self._clip = self._clip, None  # also when finish() raises: the next step clips anew
        norm = manager.finish(self._index) * share
        if not math.isfinite(norm):
            names = self._engine.collect_non_finite(self._index)
            manager.skip(self._index)
            self.skipped_steps += 1
            self._engine.handle_non_finite(names)
            return
        factor = clip_factor(norm, self.max_grad_norm) if clip is None else clip
        manager.step(self._index, scale=factor * share)
        self.stepped = True
        self.grad_norm = torch.tensor(norm, dtype=torch.float64)
        self._engine.after_step(self._index, {"grad_norm": norm})

    @property
    def _closes_next(self) -> bool:
        """Whether the next call of :meth:`step` is a real one."""
        is_full = self._window.num_batches + 1 >= self._window.size
        return is_full or self._engine.shares.closes_windows

    @property
    def is_in_window(self) -> bool:
        """Whether micro-batches of an accumulation window wait for the step that closes it."""
        return self._window.num_batches > 0

    def check_window(self, call: str) -> None:
        """Refuse a call that needs complete gradients inside an accumulation window.

        Raises:
            UsageError: The next ``step()`` is not a real one.
        """
        waiting = self._window.num_batches + 1
        if not self._closes_next:
            raise UsageError(
                f"{call} in micro-batch {waiting} of {self._window.size}: gradients are not complete",
                hint="call it before the step() that closes the accumulation window",
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Reduce the gradients now and clip them in the coming :meth:`step`; collective over all ranks.

        Args:
            max_norm: Bound of the norm.
            norm_type: Order of the norm; ``math.inf`` for the largest element.

        Returns:
            The norm before clipping: 0-d fp64, the same on all ranks; NaN inside an accumulation window,
            where nothing is reduced yet and nothing is done.

        Raises:
            UsageError: ``max_grad_norm`` is set, so the step clips by itself.
        """
        self._check_alive()
        if self.max_grad_norm is not None:
            raise UsageError(
                f"max_grad_norm is {self.max_grad_norm}, so step() clips by itself",
                hint="set optimizer.max_grad_norm = None to clip by hand, or drop this call",
            )
        if not self._closes_next:
            return torch.full((), math.nan, dtype=torch.float64)
        share = self._window.share(self._engine.context.weights.peek(self._index))
        norm = self._engine.manager.finish(self._index, norm_type=norm_type) * share
        self._clip = clip_factor(norm, max_norm) if math.isfinite(norm) else 1.0
        return torch.tensor(norm, dtype=torch.float64)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Answer torch's GradScaler, which asks before it steps, and unscales gradients in place.

        Raises:
            UsageError: Gradients are not there to be unscaled.
        """
        if not self._engine.manager.shows_gradients:
            raise UsageError(
                "torch's GradScaler cannot unscale gradients that are reduced in optimizer.step()",
                hint="drop it for Booster(precision='fp16'), which scales by itself, or keep it with "
                "Replicated(reduce='backward') in fp32",
            )
        return False

    @property
    def loss_scale(self) -> float:
        """Factor of losses before backward under fp16; 1.0 without it."""
        return self._engine.context.arrivals.scale

    @property
    def state(self) -> Any:
        """State by parameter in full shapes, as torch shows it; collected anew at each access.

        Raises:
            UsageError: Some rank does not hold all of a parameter.
        """
        self._check_alive()
        self._check_whole("optimizer.state")
        return self._engine.manager.state(self._index)

    @state.setter
    def state(self, value: Any) -> None:
        """Ignore the empty state that torch's constructor assigns; see :meth:`load_state_dict`."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned, also of a plain torch optimizer; moments keep their precision.

        Raises:
            UsageError: The parameter groups do not fit.
        """
        self._check_alive()
        self._check_whole("load_state_dict()")
        saved = state_dict["param_groups"]
        mine = [len(group["params"]) for group in self.param_groups]
        theirs = [len(group["params"]) for group in saved]
        if mine != theirs:
            raise UsageError(
                f"the state was saved for groups of {theirs} parameters, this optimizer has groups of {mine}",
                hint="build the optimizer over the same parameters in the same groups",
            )
        by_index = state_dict["state"]
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for group, other in zip(self.param_groups, saved, strict=True):
            for parameter, position in zip(group["params"], other["params"], strict=True):
                if position in by_index:
                    state[parameter] = dict(by_index[position])
            group.update({key: deepcopy(value) for key, value in other.items() if key != "params"})
        self._engine.manager.load_state(self._index, state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the user's optimizer, on every rank; its parameters are of the boosted models.

        Raises:
            UsageError: A parameter is not.
        """
        if "_engine" not in self.__dict__:  # torch's constructor comes through here once per existing group
            super().add_param_group(param_group)
            return
        self._check_alive()
        self.user.add_param_group(param_group)
        try:
            self._engine.check_optimizer(self.user)
        except UsageError:
            self.user.param_groups.pop()
            raise
        self._engine.manager.regroup(self._index)

    def release(self) -> None:
        """Let the user's own optimizer step again, and this one never."""
        self._is_released = True
        self.user.__dict__.pop("step", None)
        if self._users_step is not None:
            self.user.__dict__["step"] = self._users_step

    def _check_whole(self, what: str) -> None:
        """Refuse what would show or take a part of a state for all of it."""
        table = self._engine.context.table
        partial = {table.tensor(entry) for entry in self._engine.partial_entries()}
        if any(parameter in partial for group in self.param_groups for parameter in group["params"]):
            raise UsageError(
                f"{what} would be incomplete: ranks hold parts of parameters, and of their states",
                hint="booster.save() and booster.load() keep a run under any plan",
            )

    def _check_alive(self) -> None:
        """Refuse whatever needs the memory manager after release."""
        if self._is_released:
            raise UsageError(
                "this optimizer was released with its model",
                hint="use the optimizer that was given to boost(), which goes on with its state",
            )

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be pickled or copied: it is bound to this process."""
        raise UsageError(
            "a boosted optimizer cannot be pickled or copied",
            hint="use optimizer.state_dict() and load_state_dict()",
        )
