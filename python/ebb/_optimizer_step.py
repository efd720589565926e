"""Tells ebb of the steps of torch's optimizers, which make states of managed parameters."""

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ebb import _core
from ebb._optimizer import Optimizer


class _Arguments(tuple[Any, ...]):
    """The arguments of one step. Only torch's wrapper of step() has them, so that they end when the step returns.

    A hook after the step would not do: torch calls none where the step raises. After such a step they live as long as
    its traceback.
    """

    step: _core.OptimizerStep


def _begin(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.compiler.is_compiling() or isinstance(optimizer, Optimizer):  # ebb's says itself what its states are
        return None
    arguments = _Arguments(args)
    arguments.step = _core.OptimizerStep([each for group in optimizer.param_groups for each in group["params"]])
    return arguments, kwargs


@functools.cache
def watch_optimizer_steps() -> None:
    """Has what torch's optimizers make by zeros_like of a managed parameter in step() be managed, too. Once for the process."""
    register_optimizer_step_pre_hook(_begin)
    _core.OptimizerStep([])  # steps are watched: ebb need not warn of states that nobody manages
