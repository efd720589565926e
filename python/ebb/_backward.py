"""Tells ebb where each backward pass begins and ends: Python's engine runs them, and not the one that ebb installs."""

import itertools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.graph

from ebb import _core
from ebb._wrap_once import wrap_once

_watches: dict[int, tuple[weakref.ref[Any], Callable[[Any], bool]]] = {}
_numbers = itertools.count()
os.register_at_fork(after_in_child=_watches.clear)


def watch_backward(owner: Any, watch: Callable[[Any], bool]) -> None:
    """Calls watch(owner) after each backward pass that did not raise, on its thread, until that returns False or the
    owner is gone. A forked child does not."""
    number = next(_numbers)
    _watches[number] = weakref.ref(owner, lambda gone: _watches.pop(number, None)), watch


def wrap_backward() -> None:
    """Wraps the function of torch's that every backward pass goes through. Once for the process."""

    def make(run: Any) -> Any:
        def _engine_run_backward(*arguments: Any, **named: Any) -> Any:
            result = _core.run_backward(run, *arguments, **named)
            for number in list(_watches):
                watched = _watches.pop(number, None)  # one that raises does not come back
                if watched is not None and (owner := watched[0]()) is not None and watched[1](owner):
                    _watches[number] = watched
            return result

        return _engine_run_backward

    wrap_once(torch.autograd.graph, "_engine_run_backward", make)
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward  # imported there by name
