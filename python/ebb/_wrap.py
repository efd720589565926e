"""ebb.wrap."""

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ebb._offloader import Offloader, no_offload

HEADS = ("lm_head", "output", "head", "classifier")

_Guard = Offloader | no_offload


class _Forwards(threading.local):
    """The forwards that the thread is in, of the modules that have hooks, with the guards that end with each."""

    def __init__(self) -> None:
        self.stack: list[tuple[torch.nn.Module, list[_Guard]]] = []

    def begin(self, module: torch.nn.Module) -> None:
        self.stack.append((module, []))

    def guards_of(self, module: torch.nn.Module | None) -> list[_Guard] | None:
        """Those of the module's innermost forward; None if the thread is in none."""
        return next((guards for other, guards in reversed(self.stack) if other is module), None)

    def end(self, module: torch.nn.Module) -> None:
        """Ends the module's innermost forward, and those inside of it that were cut off."""
        if self.guards_of(module) is None:  # a forward that failed before its hook
            return
        while True:
            other, guards = self.stack.pop()
            while guards:
                guards.pop().__exit__(None, None, None)
            if other is module:
                return


class _Hook:
    """A module hook. torch.compile breaks its graph there, and so knows that saves before and after go different ways.

    What copy.deepcopy makes of a wrapped model has the same hooks, and so the same offloader. What pickle makes of a
    wrapped model is not wrapped.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = torch.compiler.disable(function)

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return self

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*arguments: Any) -> None:
    pass


def _enter(guard: _Guard, guards: list[_Guard]) -> None:
    guard.__enter__()
    guards.append(guard)


def wrap(model: torch.nn.Module, keep: Sequence[str] | None = None, **options: Any) -> Offloader:
    """Has every forward pass of `model` guarded by an Offloader, which is returned. The loop stays as it is.

        offloader = ebb.wrap(model, device_budget="24GB")

    keep: names of modules whose saves stay, and so do those of whatever the module around them computes after them:
    the loss, where that is computed by the model. (Only the module's own, if the one around it is a list or a dict.)
    None: those that are named lm_head, output, head or classifier, and are not among repeated blocks; a UserWarning if
    there are none. []: nothing is kept. ValueError for a name that the model does not have.
    options: as Offloader's.

    Module hooks do it, in a forward that raises, too. A deep copy of the model has the same hooks, and so this
    offloader; a pickled copy has none. Inside of a compiled model the hooks are graph breaks: keep=[] is without them,
    for ebb.wrap(torch.compile(model), keep=[]).
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"ebb: wrap() got {type(model).__name__}, and needs a torch.nn.Module")
    if isinstance(keep, Offloader):
        raise TypeError("ebb: wrap() makes the Offloader, and takes its options: wrap(model, device_budget=\"24GB\")")
    modules = dict(model.named_modules(remove_duplicate=False))
    names = _usual_heads(modules) if keep is None else _named(modules, keep)
    offloader = Offloader(**options)
    forwards = _Forwards()

    def begin_model(module: torch.nn.Module, inputs: Any) -> None:
        while forwards.stack:  # of a forward that KeyboardInterrupt has cut off
            forwards.end(forwards.stack[-1][0])
        forwards.begin(module)
        _enter(offloader, forwards.stack[-1][1])

    def begin(module: torch.nn.Module, inputs: Any) -> None:
        forwards.begin(module)

    def end(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        forwards.end(module)

    def add_hooks(module: torch.nn.Module, begins: Callable[..., None]) -> None:
        module.register_forward_pre_hook(_Hook(begins), prepend=True)
        module.register_forward_hook(_Hook(end), always_call=True)

    add_hooks(model, begin_model)
    with_hooks = {model}
    for name in names:
        parent = modules[name.rpartition(".")[0]]
        if isinstance(parent, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            parent = None
        elif parent not in with_hooks:
            with_hooks.add(parent)
            add_hooks(parent, begin)

        def begin_kept(module: torch.nn.Module, inputs: Any, parent: torch.nn.Module | None = parent) -> None:
            forwards.begin(module)
            around = forwards.guards_of(parent)
            guards = forwards.stack[-1][1] if around is None else around
            if not any(isinstance(guard, no_offload) for guard in guards):
                _enter(no_offload(), guards)

        add_hooks(modules[name], begin_kept)
    return offloader


def _usual_heads(modules: dict[str, torch.nn.Module]) -> list[str]:
    heads = [
        name
        for name in modules
        if name.rpartition(".")[2] in HEADS and not any(part.isdigit() for part in name.split("."))
    ]
    heads = [name for name in heads if not any(name.startswith(other + ".") for other in heads)]
    if not heads:
        warnings.warn(
            f"ebb.wrap: the model has no module named {', '.join(HEADS[:-1])} or {HEADS[-1]}. What its head and its loss "
            "save is moved right before backward wants it, and backward waits for these copies from end to end. Name "
            "the head: keep=['...'], or keep=[] if there is none.",
            stacklevel=3,
        )
    return heads


def _named(modules: dict[str, torch.nn.Module], keep: Sequence[str]) -> list[str]:
    if isinstance(keep, str):
        raise TypeError(f"ebb: keep is {keep!r}, and must be a list of names")
    if "_orig_mod" in modules:  # of torch.compile, around what the names are of
        keep = [name if name in modules else f"_orig_mod.{name}" for name in keep]
    for name in keep:
        if not name or name not in modules:
            raise ValueError(f"ebb: the model has no module {name!r} to keep; its parts are {sorted(modules)[1:20]}")
    return list(dict.fromkeys(keep))
