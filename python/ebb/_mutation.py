"""Has torch.autograd.graph.allow_mutation_on_saved_tensors refuse managed tensors: it knows tensors by their addresses."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.graph

_MARK = "_ebb_wrapped"


def _wrapped(name_of: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    @functools.wraps(name_of)
    def name(tensor: torch.Tensor) -> Any:
        if torch._C._dispatch_keys(tensor).has("TESTING_ONLY_GenericMode"):
            raise RuntimeError(
                "ebb: torch.autograd.graph.allow_mutation_on_saved_tensors knows tensors by their addresses, and a managed "
                "tensor's memory comes and goes: manage other tensors, or run this part without that context"
            )
        return name_of(tensor)

    setattr(name, _MARK, True)
    return name


def wrap_mutation() -> None:
    """Wraps what that context names tensors by. Once for the process."""
    graph = torch.autograd.graph
    for name in ("_get_tid", "_get_sid"):
        name_of = getattr(graph, name)
        if not hasattr(name_of, _MARK):
            setattr(graph, name, _wrapped(name_of))
