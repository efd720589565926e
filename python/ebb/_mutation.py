"""Has torch.autograd.graph.allow_mutation_on_saved_tensors refuse managed tensors: it knows tensors by their addresses."""

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.graph

from ebb._wrap_once import wrap_once


def _refusing(name_of: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def name(tensor: torch.Tensor) -> Any:
        if torch._C._dispatch_keys(tensor).has("TESTING_ONLY_GenericMode"):
            raise RuntimeError(
                "ebb: torch.autograd.graph.allow_mutation_on_saved_tensors knows tensors by their addresses, and a managed "
                "tensor's memory comes and goes: manage other tensors, or run this part without that context"
            )
        return name_of(tensor)

    return name


def wrap_mutation() -> None:
    """Wraps what that context names tensors by. Once for the process."""
    for name in ("_get_tid", "_get_sid"):
        wrap_once(torch.autograd.graph, name, _refusing)
