"""Tells ebb where each backward pass begins and ends: Python's engine runs them, and not the one that ebb installs."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.graph

from ebb import _core
from ebb._wrap_once import wrap_once

_watches: dict[Callable[[], bool], None] = {}
os.register_at_fork(after_in_child=_watches.clear)


def watch_backward(watch: Callable[[], bool]) -> None:
    """Calls watch() after each backward pass of the process that did not raise, on its thread, until it returns False."""
    _watches[watch] = None


def wrap_backward() -> None:
    """Wraps the function of torch's that every backward pass goes through. Once for the process."""

    def make(run: Any) -> Any:
        def _engine_run_backward(*arguments: Any, **named: Any) -> Any:
            result = _core.run_backward(run, *arguments, **named)
            for watch in tuple(_watches):
                if not watch():
                    _watches.pop(watch, None)
            return result

        return _engine_run_backward

    wrap_once(torch.autograd.graph, "_engine_run_backward", make)
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward  # imported there by name
