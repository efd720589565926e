"""AdamW, Adam and SGD: torch's optimizers over ebb's updates, whose states live where their parameters do."""

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch

from ebb import _core
from ebb._managed import joined, to_host

UpdateIn = Literal["step", "backward", "next_use"]
UpdateOn = Literal["device", "cpu"]

_ELEMENTS_AT_ONCE = _core.ELEMENTS_AT_ONCE  # the most of a part, unless one row has more
_LOADED = "ebb: loaded"  # by this name a state has states that are not beside their parameter yet


class Optimizer(torch.optim.Optimizer):
    """What AdamW, Adam and SGD have in common: torch's state_dict(), parameter groups and schedulers, over ebb's updates.

    Parameters in float32 and double get the bits of torch's optimizer with foreach=False. Those in bfloat16 and half have a
    master in float32, which the gradient in float32 updates, and which is then rounded to the parameter. A weight that the
    program writes, by whatever means, counts: an update first takes the weight's value wherever the master does not round
    to it. So weights may be loaded before the states, or after them. States and masters of parameters that
    Offloader.manage has been given are managed beside them, and are on the device around their uses only.

    Parameters of more than 16 million elements are updated in parts of so many, or of one row, whose states come and go by
    themselves: state[parameter]["parts"] has a dict for each. Reading state[parameter]["exp_avg"] makes a tensor of all
    parts there, and writing to that tensor is a RuntimeError. state_dict() has copies of all states, in host memory.

    update_in: "step", "backward" (each parameter as soon as its gradient is whole, which is then let go of) or "next_use"
        (managed parameters, when these, their gradients or states are used next).
    update_on: "device", or "cpu": where parameters, gradients and states are at home in host memory the CPU updates them,
        with LibTorch's fused kernels, which round differently.
    docs/python.md says what these ask of a program. With "backward", clip_grad_norm_() clips nothing, and neither
        accumulation, GradScaler nor DistributedDataParallel may be used.

    An optimizer whose states are managed can be neither copied nor pickled (its state_dict() can), nor can one with
    "backward". Raises ValueError when made with options out of their range, or with maximize=True on the CPU, and
    RuntimeError for gradients that are not dense, and with "backward" for a parameter's second gradient before step() or
    zero_grad(). Where the device's memory does not suffice, step() raises torch.OutOfMemoryError with some parameters
    updated and others not: go on from what was saved.
    """

    _kind: ClassVar[str]
    _states: ClassVar[tuple[str, ...]]  # all that there may be, as torch's optimizer calls them, and masters

    def _rule(self, group: dict[str, Any], step: float) -> _core.UpdateRule:
        """How a parameter is updated. step: from 1. Raises ValueError."""
        if self._update_on == "cpu" and group["maximize"]:
            raise ValueError(f'ebb: {type(self).__name__} with update_on="cpu" does not maximize')
        return _core.rule_of(self._kind, group, step)

    def __init__(self, params: Any, defaults: dict[str, Any], update_in: UpdateIn, update_on: UpdateOn) -> None:
        self._set_updates(update_in, update_on)
        super().__init__(params, defaults)

    def _set_updates(self, update_in: UpdateIn, update_on: UpdateOn) -> None:
        self._update_in, self._update_on = update_in, update_on
        self._updates = _core.Updates(update_in, update_on, _ELEMENTS_AT_ONCE)
        weakref.finalize(self, self._updates.end_thread)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._rule(self.defaults | param_group, 1).check()
        super().add_param_group(param_group)
        for place, parameter in enumerate(self.param_groups[-1]["params"] if self._update_in == "backward" else ()):
            if parameter.requires_grad:
                update = functools.partial(_update_in_backward, weakref.ref(self), place)
                weakref.finalize(self, parameter.register_post_accumulate_grad_hook(update).remove)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient. `closure` is called first, with gradients, and its result returned."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        self._updates.end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._updates.end_step()

    @torch.no_grad()
    def _update(self, parameter: torch.Tensor, group: dict[str, Any], in_backward: bool = False) -> None:
        state = self.state.get(parameter, {})
        step = float(state.get("step", 0)) + 1
        parts = [self._states_of(part) for part in state.get("parts", [state])]
        parts = self._updates.update(parameter, parts, self._rule(group, step), in_backward)
        with torch.inference_mode(False):  # of the type that torch's optimizers give it
            steps = torch.tensor(step, dtype=torch.promote_types(torch.float32, torch.get_default_dtype()))
        self.state[parameter] = _in_parts(state | {"step": steps}, parts)

    def _states_of(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: state[name] for name in self._states if state.get(name) is not None}

    def state_dict(self, *, given: Callable[[Any], Any] = to_host) -> dict[str, Any]:
        """As torch's, with copies of the states in host memory. `given`: what there is in place of each value, or Joined."""

        def of_states(_: torch.optim.Optimizer, known: dict[str, Any]) -> dict[str, Any]:
            return known | {"state": {key: joined(state, given) for key, state in known["state"].items()}}

        with self.register_state_dict_post_hook(of_states, prepend=True):  # the program's hooks see whole states
            return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. States keep their own type, and are managed where their parameters are. Takes what torch's optimizer
        has saved, too: masters are then made of the parameters. An option that is True or False and is missing, as in
        checkpoints that are older than the option, is False. Raises ValueError, and changes nothing, where a state has
        other sizes than its parameter, or another option of this optimizer is missing.
        """
        with self.register_load_state_dict_pre_hook(Optimizer._to_load):  # behind the program's
            super().load_state_dict(state_dict)

    def _to_load(self, known: dict[str, Any]) -> dict[str, Any]:
        """A state_dict() with states that __setstate__ puts beside their parameters."""
        newer = {name: False for name, value in self.defaults.items() if isinstance(value, bool)}
        groups = [newer | group for group in known["param_groups"]]
        if missing := sorted({name for name in self.defaults for group in groups if name not in group}):
            raise ValueError(f"ebb: this is no state of {type(self).__name__}, which has options that it lacks: {missing}")
        states = dict(known["state"])
        indices = (index for group in groups for index in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for index, parameter in zip(indices, parameters, strict=False):  # torch refuses another number of parameters
            if not isinstance(state := states.get(index), dict):
                continue
            ours = self._states_of(state)
            for name, value in ours.items():
                if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                    found = tuple(value.shape) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
                    must_be = f"must be a tensor of {tuple(parameter.shape)}"
                    raise ValueError(f"ebb: {name} of parameter {index} is {found}, and {must_be}")
            others = {name: value for name, value in state.items() if name not in self._states}
            states[index] = copy.deepcopy(others) | {_LOADED: functools.partial(dict, ours)}  # which torch leaves alone
        return known | {"state": states, "param_groups": groups}

    def __getstate__(self) -> dict[str, Any]:
        if self._update_in == "backward":
            name = type(self).__name__
            raise TypeError(f'ebb: {name} with update_in="backward" cannot be copied or pickled; its state_dict() can')
        return super().__getstate__() | {"update_in": self._update_in, "update_on": self._update_on}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ours = {name: state[name] for name in ("update_in", "update_on") if name in state}  # load_state_dict has none
        super().__setstate__({name: value for name, value in state.items() if name not in ours})
        self.defaults.pop("differentiable", None)  # which torch adds here, and ebb's optimizers do not have
        if ours:
            self._set_updates(**ours)
        for parameter, known in self.state.items():
            if isinstance(known, dict) and (loaded := known.pop(_LOADED, None)) is not None:
                self.state[parameter] = _in_parts(known, _core.place_states(parameter, loaded(), _ELEMENTS_AT_ONCE))


def _update_in_backward(this: "weakref.ref[Optimizer]", place: int, parameter: torch.Tensor) -> None:
    """place: where the parameter was in its group. The program may have changed the groups."""
    if (optimizer := this()) is None or parameter.grad is None:
        return
    groups = optimizer.param_groups
    found = [group for group in groups if any(each is parameter for each in group["params"][place : place + 1])]
    found = found or [group for group in groups if any(each is parameter for each in group["params"])]
    if found:
        optimizer._update(parameter, found[0], in_backward=True)


class _InParts(dict[str, Any]):
    """The state of a parameter that is updated in parts. state["exp_avg"] is a new tensor of all parts on the device.
    Writing to that would change no part, and is a RuntimeError."""

    def __missing__(self, name: str) -> torch.Tensor:
        with torch.inference_mode():  # outside of which nobody may write to the tensor
            return torch.cat([part[name] for part in self["parts"]])


def _in_parts(others: dict[str, Any], parts: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    return others | parts[0] if len(parts) == 1 else _InParts(others, parts=parts)


class Adam(Optimizer):
    """torch.optim.Adam, as ebb.Optimizer has it (Kingma, Ba: Adam: A Method for Stochastic Optimization, 2015)."""

    _kind = "Adam"
    _states = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        update_in: UpdateIn = "step",
        update_on: UpdateOn = "device",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"amsgrad": amsgrad, "maximize": maximize}, update_in, update_on)


class AdamW(Optimizer):
    """torch.optim.AdamW, as ebb.Optimizer has it (Loshchilov, Hutter: Decoupled Weight Decay Regularization, 2019)."""

    _kind = "AdamW"
    _states = Adam._states

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        update_in: UpdateIn = "step",
        update_on: UpdateOn = "device",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"amsgrad": amsgrad, "maximize": maximize}, update_in, update_on)


class SGD(Optimizer):
    """torch.optim.SGD, with momentum, as ebb.Optimizer has it."""

    _kind = "SGD"
    _states = ("momentum_buffer", "master")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        update_in: UpdateIn = "step",
        update_on: UpdateOn = "device",
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"nesterov": nesterov, "maximize": maximize}, update_in, update_on)
