"""The modules of a wrapped model that a plan may run again as a whole."""

import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ebb import _core
from ebb._checkpoint import recomputable

_CALL = "_compiled_call_impl"  # what a module's __call__ calls in place of _call_impl; neither pickled nor deep-copied

# A call with anything else among its arguments is a plain call: with a cache or a list, say, that each run would add to.
_PLAIN = (torch.Tensor, type(None), bool, int, float, complex, str, torch.dtype, torch.device)

_LOOKS = 3  # at what the first calls of a module change: a proof may run the module twice in each


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


class _Module:
    """A module, as long as it lives, and what a second run of it has to find as the first one did."""

    def __init__(self, module: torch.nn.Module, parts: list[torch.nn.Module]) -> None:
        self._module = weakref.ref(module)  # or the graphs that a module keeps would keep the module
        self._parameters = [(weakref.ref(each), each.requires_grad) for each in _tensors(parts, "_parameters")]
        self._training = [each.training for each in parts]
        self.is_first, self.may_run_again = True, True

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        module = self._module()
        if module is None:
            raise RuntimeError("ebb: a module is to be run again in backward, and is gone")
        if self.is_first:
            self.is_first = False
            return _call(module, *inputs, **named)
        parts = list(module.modules())
        parameters = _tensors(parts, "_parameters")
        then = [known() for known, _ in self._parameters]
        if not self.may_run_again or [*map(id, then)] != [*map(id, parameters)]:
            raise RuntimeError("ebb: a module is to be run again in backward, and has other parameters or state since")
        training = [each.training for each in parts]
        requires_grad = [each.requires_grad for each in parameters]
        try:
            self._put(parts, self._training, parameters, [wanted for _, wanted in self._parameters])
            return _call(module, *inputs, **named)
        finally:
            self._put(parts, training, parameters, requires_grad)

    @staticmethod
    def _put(
        parts: list[torch.nn.Module], training: list[bool], parameters: list[torch.Tensor], wanted: list[bool]
    ) -> None:
        for part, is_training in zip(parts, training, strict=True):
            if part.training != is_training:
                part.training = is_training
        for parameter, requires_grad in zip(parameters, wanted, strict=True):
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)


def _tensors(parts: list[torch.nn.Module], kind: str) -> list[torch.Tensor]:
    return [each for part in parts for each in part.__dict__[kind].values() if each is not None]


def _state(parts: list[torch.nn.Module]) -> list[tuple[Any, ...]]:
    """What tells whether a call has changed the modules, for _is_same."""
    found: list[tuple[Any, ...]] = []
    for part in parts:
        for values in (part.__dict__, part._buffers, part._parameters):
            for name, value in values.items():
                size = len(value) if isinstance(value, (list, dict, set)) else 0
                version = value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0
                found.append((value, name, size, version))  # the value itself, or another could be at its address
    return found


def _is_same(state: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> bool:
    return len(state) == len(other) and all(
        one[0] is two[0] and one[1:] == two[1:] for one, two in zip(state, other, strict=True)
    )


class _Region:
    """A module's call. If it may be, it is a region that may be run again."""

    def __init__(self, module: torch.nn.Module, may_run_again: bool) -> None:
        self._module = weakref.ref(module)
        self.compiled: Callable[..., Any] | None = getattr(module, _CALL)
        self._looks = 0
        self._is_region = may_run_again

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        module = self._module()
        assert module is not None
        may_be = self._is_region and torch.is_grad_enabled() and _is_plain(inputs)
        if not may_be or not all(map(_is_plain, named.values())):
            return _call(module, *inputs, **named)
        parts = list(module.modules())
        if any(part._forward_hooks or part._forward_pre_hooks for part in parts):
            return _call(module, *inputs, **named)
        call = _Module(module, parts)
        writes = _tensors(parts, "_buffers") + _tensors(parts, "_parameters")
        if self._looks == _LOOKS:
            return recomputable(call, *inputs, writes=writes, **named)
        self._looks += 1
        before, drawn = _state(parts), random.getstate()
        result = recomputable(call, *inputs, writes=writes, **named)
        after = _state(list(module.modules()))
        call.may_run_again = self._is_region = _is_same(before, after) and drawn == random.getstate()
        return result


def _call(module: torch.nn.Module, *inputs: Any, **named: Any) -> Any:
    """The module's call without a region. What is compiled is compiled as without ebb's guard."""
    call = getattr(module, _CALL)
    compiled = call.compiled if isinstance(call, _Region) else call
    if not _is_compiled(module):
        return module._call_impl(*inputs, **named)
    unseen = _core.Unseen()
    try:
        return (compiled or module._call_impl)(*inputs, **named)
    finally:
        unseen.end()


def _is_compiled(module: torch.nn.Module) -> bool:
    call = getattr(module, _CALL)
    is_called = call is not None and not (isinstance(call, _Region) and call.compiled is None)
    return is_called or isinstance(module, torch._dynamo.OptimizedModule)


def outermost(names: Iterable[str]) -> list[str]:
    """The names, in the order of named_modules(), without those of modules inside of other named ones."""
    found: list[str] = []
    for name in names:
        if not any(name.startswith(f"{other}.") for other in found):
            found.append(name)
    return found


def compiled_parts(modules: dict[str, torch.nn.Module]) -> dict[str, bool]:
    """The names of the compiled modules, and whether the model has several of the class. modules: as named_modules()."""
    if _is_compiled(modules[""]):  # with ebb's guard inside
        return {}
    names = outermost(name for name, module in modules.items() if _is_compiled(module))
    kind = {name: type(getattr(modules[name], "_orig_mod", modules[name])) for name in names}
    count = Counter(kind.values())
    return {
        name: count[kind[name]] > 1
        and not any(hasattr(each, "device_mesh") for each in modules[name].parameters())  # FSDP2's are away meanwhile
        for name in names
    }


def add_region(module: torch.nn.Module, may_run_again: bool) -> None:
    if not isinstance(getattr(module, _CALL), _Region):
        setattr(module, _CALL, _Region(module, may_run_again))


def take_region(module: torch.nn.Module) -> None:
    region = getattr(module, _CALL)
    if isinstance(region, _Region):
        setattr(module, _CALL, region.compiled)
