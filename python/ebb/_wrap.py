"""ebb.wrap and ebb.unwrap."""

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ebb._backward import watch_backward
from ebb._offloader import Offloader, no_offload
from ebb._regions import add_region, compiled_parts, outermost, take_region

HEADS = ("lm_head", "output", "head", "classifier")

_FORWARDS_PER_EXCLUSION = 64  # an exclusion takes up to a tenth of the time of a forward with small tensors

_EXPORT = "export ebb.unwrap(model), or ebb.unwrap(copy.deepcopy(model)) if the model is to stay wrapped"

_BUDGETS = ("device_budget", "share_of_free", "slowdown", "least_memory")

_Guard = Offloader | no_offload

_CALL = torch.nn.Module._call_impl.__code__


def _called_modules() -> list[torch.nn.Module]:
    """The modules on the thread's call stack, once for each of their calls."""
    modules = []
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    return modules


@dataclass(slots=True)
class _Forward:
    module: torch.nn.Module
    place: int  # the same for a module and its deep copies
    guards: list[_Guard]  # that end with it


class _Forwards(threading.local):
    """The forwards that the thread is in, of the modules that have hooks."""

    def __init__(self) -> None:
        self.stack: list[_Forward] = []

    def begin(self, module: torch.nn.Module, place: int) -> _Forward:
        self.stack.append(_Forward(module, place, []))
        return self.stack[-1]

    def innermost(self, *places: int) -> _Forward | None:
        return next((each for each in reversed(self.stack) if each.place in places), None)

    def end(self, module: torch.nn.Module) -> bool:
        """Ends the module's innermost forward, and those inside of it that were cut off; False if there is none."""
        if self._begun(module) == 0:  # a forward that failed before its hook
            return False
        while True:
            forward = self.stack.pop()
            while forward.guards:
                forward.guards.pop().__exit__(None, None, None)
            if forward.module is module:
                return True

    def end_those_cut_off(self, begins: torch.nn.Module | None = None) -> None:
        """Ends the innermost forwards that are not on the call stack: KeyboardInterrupt has cut them off.

        begins: a module that is on the call stack once more than its forwards are here.
        """
        called = _called_modules() if self.stack else []
        while self.stack:
            module = self.stack[-1].module
            if self._begun(module) + (module is begins) <= sum(each is module for each in called):
                return
            self.end(module)

    def end_this(self, module: torch.nn.Module) -> None:
        """Ends the forward of the module that the thread is about to leave."""
        if len(self.stack) > 1 and self._begun(module) > 1:  # the innermost may have been cut off in this one
            self.end_those_cut_off()
        self.end(module)

    def _begun(self, module: torch.nn.Module) -> int:
        return sum(each.module is module for each in self.stack)


class _Hook:
    """A module hook. torch.compile breaks its graph there, and so knows that saves before and after go different ways.

    What copy.deepcopy makes of a wrapped model has the same hooks, and so the same offloader. What pickle makes of a
    wrapped model is not wrapped.
    """

    def __init__(self, forwards: _Forwards, function: Callable[..., None], begins_guard: bool = False) -> None:
        self.forwards = forwards
        self.begins_guard = begins_guard
        self._function = torch.compiler.disable(function, reason=f"ebb.wrap added it; {_EXPORT}")

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)

    @property
    def __name__(self) -> str:  # torch.jit.script asks
        raise AttributeError(f"ebb: TorchScript cannot compile what ebb.wrap added; {_EXPORT}")

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return self

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*arguments: Any) -> None:
    pass


def _hooks(module: torch.nn.Module) -> Iterator[tuple[dict[int, Any], int, Any]]:
    """What wrap has added to the module, and what pickle has made of that: where it is, its key, and the hook."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in tuple(hooks.items()):
            if isinstance(hook, _Hook) or hook is _do_nothing:
                yield hooks, key, hook


def wrap(
    model: torch.nn.Module, keep: Sequence[str] | None = None, regions: Sequence[str] | None = None, **options: Any
) -> Offloader:
    """Has every forward pass of `model` guarded by an Offloader, which is returned. The loop stays as it is.

        offloader = ebb.wrap(model, device_budget="24GB")

    keep: names of modules whose saves stay, and so do those of whatever the module around them, or else the model,
    computes after them: the loss, where that is computed by the model. (Only the module's own, if the one around it is
    a list or a dict.) The end of a name will do, from a dot on: "lm_head" for "module.lm_head". None: those that are
    named lm_head, output, head or classifier, and are not among repeated blocks; a UserWarning if there are none. []:
    nothing is kept. ValueError for a name that the model does not have, or that is the end of several, and for a model
    that is wrapped already: unwrap it first. A part of a wrapped model may be wrapped, too, and its own guard is on then.
    regions: with a budget, names of modules that the plan may run again as a whole, as ebb.recomputable does. The end of
    a name will do for all that have it, if they are of one class: "mlp". None: compiled modules of which the model has
    several of one class, because the plan does not see into them. []: none. A call is not such a region if an argument
    is an object (a cache), nor inside of torch.utils.checkpoint. ValueError without a budget.
    options: as Offloader's.

    The model's parameters and buffers are excluded, whether they are trained or frozen: in the first forward, and in
    every 64th, which finds what has been added or has other memory since.

    Module hooks do it, in a forward that raises, too, and in one inside of another. So only what calls the model is
    guarded: not model.forward(...), nor another method, such as training_step of Lightning. A UserWarning tells of
    backward passes into the model of which nothing was saved under the guard.

    A deep copy of the model has the same hooks, and so this offloader, but no regions; a pickled copy has neither;
    unwrap takes them off.
    Inside of a compiled model the hooks are graph breaks: keep=[] is without them, for
    ebb.wrap(torch.compile(model), keep=[]).
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"ebb: wrap() got {type(model).__name__}, and needs a torch.nn.Module")
    if isinstance(keep, Offloader):
        raise TypeError("ebb: wrap() makes the Offloader, and takes its options: wrap(model, device_budget=\"24GB\")")
    if any(isinstance(hook, _Hook) and hook.begins_guard for hook in model._forward_pre_hooks.values()):
        raise ValueError("ebb: this model is wrapped already, by another Offloader: ebb.unwrap(model), then wrap it anew")
    modules = dict(model.named_modules(remove_duplicate=False))
    names = _usual_heads(modules) if keep is None else _named(modules, keep)
    has_plan = any(options.get(each) is not None and options[each] is not False for each in _BUDGETS)
    blocks = _regions(modules, regions, has_plan)
    offloader = Offloader(**options)
    for name, may_run_again in blocks.items():
        add_region(modules[name], may_run_again)
    forwards = _Forwards()
    model_place = id(model)
    begun: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()

    def enter(forward: _Forward, guard: _Guard) -> None:
        guard.__enter__()
        forward.guards.append(guard)

    def begin_model(module: torch.nn.Module, inputs: Any) -> None:
        forwards.end_those_cut_off(module)
        count = begun.get(module, 0)
        begun[module] = count + 1
        if count % _FORWARDS_PER_EXCLUSION == 0:
            offloader.exclude(module)
        enter(forwards.begin(module, model_place), offloader)

    def end(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        forwards.end_this(module)

    def add_hooks(module: torch.nn.Module, begins: Callable[..., None]) -> None:
        module.register_forward_pre_hook(_Hook(forwards, begins, begins is begin_model), prepend=True)
        module.register_forward_hook(_Hook(forwards, end), always_call=True)

    add_hooks(model, begin_model)
    with_hooks = {model, *(modules[name] for name in names)}
    for name in names:
        parent = modules[name.rpartition(".")[0]]
        around = () if isinstance(parent, (torch.nn.ModuleList, torch.nn.ModuleDict)) else (id(parent), model_place)
        if around and parent not in with_hooks:
            with_hooks.add(parent)

            def begin(module: torch.nn.Module, inputs: Any, place: int = id(parent)) -> None:
                forwards.begin(module, place)

            add_hooks(parent, begin)

        def begin_kept(
            module: torch.nn.Module,
            inputs: Any,
            place: int = id(modules[name]),
            around: tuple[int, ...] = around,
        ) -> None:
            own = forwards.begin(module, place)
            forward = forwards.innermost(*around) or own
            if not any(isinstance(guard, no_offload) for guard in forward.guards):
                enter(forward, no_offload())

        add_hooks(modules[name], begin_kept)
    if options.get("enabled", True):
        watch_backward(offloader, _warning_of_nothing(model))
    return offloader


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Takes every wrap off the model and its parts, and returns the model.

        torch.jit.script(ebb.unwrap(copy.deepcopy(model)))    # and the model stays wrapped

    A forward that this thread is in goes on without a guard; no other thread may be in one. Nothing happens to a model
    that is not wrapped, nor to deep copies. What has been saved and what is managed stays the offloader's. Any number
    of wraps ends, whichever part of the model each was given.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"ebb: unwrap() got {type(model).__name__}, and needs a torch.nn.Module")
    for module in model.modules():
        for hooks, key, hook in _hooks(module):
            del hooks[key]
            module._forward_hooks_always_called.pop(key, None)
            while isinstance(hook, _Hook) and hook.forwards.end(module):
                pass
        take_region(module)
    return model


def _warning_of_nothing(model: torch.nn.Module) -> Callable[[Offloader, int], bool]:
    """For watch_backward: warns once where backward passes reach the model and nothing has been saved under a guard."""
    model_of = weakref.ref(model)

    def look(offloader: Offloader, passes: int) -> bool:
        model = model_of()
        if model is None or not any(_hooks(model)) or offloader.stats().saved.tensors > 0:
            return False
        if passes < 4 or all(parameter.grad is None for parameter in model.parameters()):
            return True
        warnings.warn(
            "ebb.wrap: backward passes have reached the model, and nothing that they needed was saved under its guard. "
            f"The loop does not call this {type(model).__name__} but a part or a method of it, as Lightning calls "
            "training_step: wrap the part, ebb.wrap(model.part), or have `with offloader:` around what the loop calls. Or "
            "all parts that save are under guards of their own.",
            stacklevel=2,
        )
        return False

    return look


def _usual_heads(modules: dict[str, torch.nn.Module]) -> list[str]:
    heads = outermost(
        [
            name
            for name in modules
            if name.rpartition(".")[2] in HEADS and not any(part.isdigit() for part in name.split("."))
        ]
    )
    if not heads:
        warnings.warn(
            f"ebb.wrap: the model has no module named {', '.join(HEADS[:-1])} or {HEADS[-1]}. What its head and its loss "
            "save is moved right before backward wants it, and backward waits for these copies from end to end. Name "
            "the head: keep=['...'], or keep=[] if there is none.",
            stacklevel=3,
        )
    return heads


def _regions(modules: dict[str, torch.nn.Module], regions: Sequence[str] | None, has_plan: bool) -> dict[str, bool]:
    """Of each part whose call is ebb's from now on, the name, and whether it may be run again."""
    compiled = compiled_parts(modules)
    if regions is None:
        return {name: may_run_again and has_plan for name, may_run_again in compiled.items()}
    if isinstance(regions, str):
        raise TypeError(f"ebb: regions is {regions!r}, and must be a list of names")
    if regions and not has_plan:
        raise ValueError(f"ebb: regions={regions!r} asks for a plan, which needs a budget: {', '.join(_BUDGETS)}")
    names = []
    for name in regions:
        found = [each for each in modules if name and (each == name or each.endswith(f".{name}"))]
        if not found:
            raise ValueError(f"ebb: the model has no module {name!r} to run again; its parts are {sorted(modules)[1:20]}")
        if len({type(modules[each]) for each in found}) > 1:
            raise ValueError(f"ebb: {name!r} to run again is the end of several names, {found[:20]}: write more of it")
        names += found
    return dict.fromkeys(compiled, False) | dict.fromkeys(outermost(sorted(set(names))), True)


def _named(modules: dict[str, torch.nn.Module], keep: Sequence[str]) -> list[str]:
    if isinstance(keep, str):
        raise TypeError(f"ebb: keep is {keep!r}, and must be a list of names")
    names = []
    for name in keep:
        found = [name] if name in modules else outermost([each for each in modules if each.endswith(f".{name}")])
        if not name or not found:
            raise ValueError(f"ebb: the model has no module {name!r} to keep; its parts are {sorted(modules)[1:20]}")
        if any(modules[each] is not modules[found[0]] for each in found):
            raise ValueError(f"ebb: {name!r} to keep is the end of several names, {found[:20]}: write more of it")
        names.append(found[0])
    return list(dict.fromkeys(names))
