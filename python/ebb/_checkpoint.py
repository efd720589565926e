"""ebb.checkpoint and ebb.recomputable."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from ebb import _core

Result = TypeVar("Result")


@torch._disable_dynamo  # which would compile the function in the first run, and not in backward
def checkpoint(function: Callable[..., Result], *inputs: Any, early_stop: bool = False, **named: Any) -> Result:
    """Returns function(*inputs, **named), of which autograd saves the tensors among the inputs only.

    Backward runs the function once more, just before it first needs what that saved. The inputs are saved as any tensor
    is, so under an Offloader's guard they move. Under one with a budget, the plan keeps, moves or drops each tensor that
    the function saves, and the function is run again where one was dropped. Without a budget,
    stats().saved_on_device does not count what the second run saves. Gradients are those of plain autograd, bit for bit.

    With early_stop, the second run is left at the last save that backward can ask for, by ebb.EndOfRegion, which is no
    Exception: what comes behind, such as a block's last matrix product, does not run again. That is for functions that
    may be left at any operation: what they change for a while (a module's mode, a lock, frozen weights) must be put back
    by `finally` or `with`. torch.utils.checkpoint does so by default.

    Inputs and result may be nested in lists, tuples and dicts. The second run has the first one's autocast and, if it
    drew random numbers from torch, its random state, but not its dispatch modes; it must compute the same. It may be on
    a thread of autograd's.
    What the function captures must not be changed in between, and lives as long as the graph.

    Raises what the function raises, and in backward RuntimeError if the second run saves other tensors than the first.
    """
    return _run(function, inputs, named, (), lambda run, tensors: _core.checkpoint(run, tensors, early_stop))


@torch._disable_dynamo
def recomputable(
    function: Callable[..., Result], *inputs: Any, writes: Iterable[torch.Tensor] = (), **named: Any
) -> Result:
    """Returns function(*inputs, **named), and lets a plan drop what that saves, to run the function again in backward.

    It is for what the plan of an Offloader with a budget does not see into: Triton kernels, custom functions, compiled
    modules. (ebb.wrap does so for compiled blocks by itself.) The plan keeps or moves each saved tensor, or drops all or
    some of them. Nothing is dropped before a second run in an earlier step has saved the same bytes, nor if the function
    itself has written to one of the inputs or of the tensors in `writes` (buffers, say). A later write raises RuntimeError
    in backward. Without a plan, inside of ebb.checkpoint and without gradients this is only a call.

    Otherwise as ebb.checkpoint. A second run may see side effects twice.
    """
    return _run(function, inputs, named, tuple(writes), _core.recomputable)


def _run(
    function: Callable[..., Result],
    inputs: tuple[Any, ...],
    named: dict[str, Any],
    more: tuple[torch.Tensor, ...],
    region: Callable[[Callable[[list[torch.Tensor]], list[torch.Tensor]], list[torch.Tensor]], Any],
) -> Result:
    """The function's result, run as a region. `more`: what counts as an input, and the function does not take."""
    leaves, spec = pytree.tree_flatten((inputs, named))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[place] for place in places]
    rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    as_given = [(inputs, named)]  # of the first run, which may write to lists; `run` lives as long as the graph
    result: list[tuple[list[Any], pytree.TreeSpec]] = []

    def run(given: list[torch.Tensor]) -> list[torch.Tensor]:
        first = bool(as_given)
        if first:
            arguments, keywords = as_given.pop()
        else:
            again = list(rest)
            for place, tensor in zip(places, given):  # without `more`
                again[place] = tensor
            arguments, keywords = pytree.tree_unflatten(again, spec)
        outputs, output_spec = pytree.tree_flatten(function(*arguments, **keywords))
        if first:
            result.append((outputs, output_spec))
        return [output for output in outputs if isinstance(output, torch.Tensor)]

    del inputs, named, leaves
    try:
        region(run, [*tensors, *more])
        outputs, output_spec = result[0]
    finally:
        result.clear()  # which the outputs own
    del tensors, more
    return pytree.tree_unflatten(outputs, output_spec)
