"""Tells ebb where each backward pass begins and ends: Python's engine runs them, and not the one that ebb installs."""

import functools
from typing import Any

import torch
import torch.autograd.graph

from ebb import _core

_MARK = "_ebb_wrapped"


def wrap_backward() -> None:
    """Wraps the function of torch's that every backward pass goes through. Once for the process."""
    run = torch.autograd.graph._engine_run_backward
    if hasattr(run, _MARK):
        return

    @functools.wraps(run)
    def _engine_run_backward(*arguments: Any, **named: Any) -> Any:
        return _core.run_backward(run, *arguments, **named)

    setattr(_engine_run_backward, _MARK, True)
    torch.autograd.graph._engine_run_backward = _engine_run_backward
    torch.autograd._engine_run_backward = _engine_run_backward  # imported there by name
