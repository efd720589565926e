"""Tells ebb where each backward pass begins and ends: Python's engine runs them, and not the one that ebb installs."""

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.graph

from ebb import _core
from ebb._wrap_once import wrap_once


@dataclass(slots=True, eq=False)
class Watch:
    """What is called after backward passes; setting `passes` to 0 has it called after the next one."""

    owner: weakref.ref[Any]
    look: Callable[[Any, int], bool]
    passes: int = 0


_watches: set[Watch] = set()
os.register_at_fork(after_in_child=_watches.clear)


def watch_backward(owner: Any, look: Callable[[Any, int], bool]) -> Watch:
    """Calls look(owner, passes) after the 1st, 2nd, 4th, 8th, ... backward pass that did not raise, on its thread, until
    that returns False or the owner is gone. A forked child does not. Each look costs, hence the growing distance."""
    watch = Watch(weakref.ref(owner, lambda gone: _watches.discard(watch)), look)
    _watches.add(watch)
    return watch


def wrap_backward() -> None:
    """Wraps the function of torch's that every backward pass goes through. Once for the process."""

    def make(run: Any) -> Any:
        def _engine_run_backward(*arguments: Any, **named: Any) -> Any:
            result = _core.run_backward(run, *arguments, **named)
            for watch in list(_watches):
                watch.passes += 1
                if watch.passes & (watch.passes - 1) == 0 and (owner := watch.owner()) is not None:
                    _watches.discard(watch)  # one that raises does not come back
                    if watch.look(owner, watch.passes):
                        _watches.add(watch)
            return result

        return _engine_run_backward

    wrap_once(torch.autograd.graph, "_engine_run_backward", make)
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward  # imported there by name
