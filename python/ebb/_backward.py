"""Tells ebb where each backward pass begins and ends: Python's engine runs them, and not the one that ebb installs."""

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.graph

from ebb import _core
from ebb._wrap_once import wrap_once

_watches: dict[weakref.ref[Any], Callable[[Any], bool]] = {}
os.register_at_fork(after_in_child=_watches.clear)


def watch_backward(owner: Any, watch: Callable[[Any], bool]) -> None:
    """Calls watch(owner) after each backward pass that did not raise, on its thread, until that returns False or the
    owner is gone. A forked child does not."""
    _watches[weakref.ref(owner, lambda gone: _watches.pop(gone, None))] = watch


def wrap_backward() -> None:
    """Wraps the function of torch's that every backward pass goes through. Once for the process."""

    def make(run: Any) -> Any:
        def _engine_run_backward(*arguments: Any, **named: Any) -> Any:
            result = _core.run_backward(run, *arguments, **named)
            for owner_of in list(_watches):
                owner, watch = owner_of(), _watches.pop(owner_of, None)  # one that raises does not come back
                if owner is not None and watch is not None and watch(owner):
                    _watches[owner_of] = watch
            return result

        return _engine_run_backward

    wrap_once(torch.autograd.graph, "_engine_run_backward", make)
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward  # imported there by name
