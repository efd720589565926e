"""Tells ebb where each backward pass begins and ends: Python's engine runs them, and not the one that ebb installs."""

from typing import Any

import torch
import torch.autograd.graph

from ebb import _core
from ebb._wrap_once import wrap_once


def wrap_backward() -> None:
    """Wraps the function of torch's that every backward pass goes through. Once for the process."""

    def make(run: Any) -> Any:
        def _engine_run_backward(*arguments: Any, **named: Any) -> Any:
            return _core.run_backward(run, *arguments, **named)

        return _engine_run_backward

    wrap_once(torch.autograd.graph, "_engine_run_backward", make)
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward  # imported there by name
