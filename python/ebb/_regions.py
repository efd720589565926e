"""The modules of a wrapped model that a plan may run again as a whole."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ebb._checkpoint import recomputable

_CALL = "_compiled_call_impl"  # what a module's __call__ calls in place of _call_impl; neither pickled nor deep-copied

# A call with anything else among its arguments is a plain call: a cache, say, that each run would add to.
_PLAIN = (torch.Tensor, type(None), bool, int, float, complex, str, torch.dtype, torch.device)


class _Region:
    """A module's call, as a region that may be run again."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.compiled: Callable[..., Any] | None = getattr(module, _CALL)
        self._call = self.compiled or module._call_impl

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        leaves = pytree.tree_leaves((inputs, named))
        if not torch.is_grad_enabled() or not all(isinstance(leaf, _PLAIN) for leaf in leaves):
            return self._call(*inputs, **named)
        return recomputable(self._call, *inputs, writes=self._module.buffers(), **named)


def _is_compiled(module: torch.nn.Module) -> bool:
    return getattr(module, _CALL) is not None or isinstance(module, torch._dynamo.OptimizedModule)


def _of_parts(modules: dict[str, torch.nn.Module], names: Iterator[str]) -> list[str]:
    """The names, without those of modules inside of other named ones."""
    found: list[str] = []
    for name in names:
        if not any(name.startswith(f"{other}.") for other in found):
            found.append(name)
    return found


def compiled_blocks(modules: dict[str, torch.nn.Module]) -> list[str]:
    """The names of the compiled modules of which the model has several of one class. modules: as named_modules()."""
    if _is_compiled(modules[""]):
        return []
    names = _of_parts(modules, (name for name, module in modules.items() if _is_compiled(module)))
    kind = {name: type(getattr(modules[name], "_orig_mod", modules[name])) for name in names}
    count = Counter(kind.values())
    return [
        name
        for name in names
        if count[kind[name]] > 1
        and not any(hasattr(each, "device_mesh") for each in modules[name].parameters())  # FSDP2's are away meanwhile
    ]


def add_region(module: torch.nn.Module) -> None:
    if not isinstance(getattr(module, _CALL), _Region):
        setattr(module, _CALL, _Region(module))


def take_region(module: torch.nn.Module) -> None:
    region = getattr(module, _CALL)
    if isinstance(region, _Region):
        setattr(module, _CALL, region.compiled)
