"""Optimizers whose states live where their parameters do."""

import contextlib
import copy
import numbers
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch

from ebb import _core
from ebb._managed import is_managed

UpdateIn = Literal["step", "backward", "next_use"]
UpdateOn = Literal["device", "cpu"]

_Run = Callable[[torch.Tensor, torch.Tensor, list[dict[str, torch.Tensor]]], None]  # of a parameter, its gradient, parts

_ELEMENTS_AT_ONCE = _core.ELEMENTS_AT_ONCE  # the most of a part, unless one row has more
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Optimizer(torch.optim.Optimizer):
    """What AdamW, Adam and SGD have in common; these say how a parameter is updated.

    Parameters in float32 and double get the bits of torch's optimizer with foreach=False. Parameters in bfloat16 and half
    have a master in float32, which is updated by the gradient in float32, and then rounded to the parameter. A weight that
    the program writes, by whatever means, counts: each update first takes the weight's value wherever the master does not
    round to it. So weights may be loaded before the states, or after them. States and masters of parameters that
    Offloader.manage has been given are managed beside them: with the parameters in host memory, or without a GPU on the
    disk, and on the device around their uses only.

    Parameters of more than 16 million elements are updated in parts of so many, or of one row. Their states are in such
    parts, too, each of which comes and goes by itself: state[parameter]["parts"] has a dict for each. Reading
    state[parameter]["exp_avg"] makes a tensor of all parts there, and writing to that tensor is a RuntimeError.

    update_in: "step", "backward" or "next_use".
        "backward": each parameter is updated as soon as its gradient is whole, and the gradient is let go of, so that no
        more than a few gradients are alive at once. One backward pass is one step then: no accumulation over
        micro-batches, and no clipping by the norm of all gradients (clip_grad_norm_() finds no gradient afterwards, and
        clips nothing). A parameter's second gradient before step() or zero_grad() is a RuntimeError, raised by backward.
        step() updates what still has a gradient, and so does nothing for a second optimizer of the same parameter. A
        weight that shares its memory with another by other means than a view (set_(), .data) is changed under the
        other's backward, which cannot tell; nor can a checkpointed part of the model that reads a weight without its
        gradient (weight.detach()) and runs again after the update.
        "next_use": parameters that Offloader.manage has been given, with their gradients and states, are updated when
        one of these is used next, on whatever thread: mostly in the next forward pass, which computes while states come
        and go. What a program reads is what "step" gives. A gradient that the program lets go of lives until the update;
        an error in an update comes from the use (where the device has no memory for the parameter and its gradient,
        nothing has been updated, and the next use tries again); a profiler, or a mode that is active around step(), does
        not see the update there. The update runs on the stream of step(), which must still be there. Where weight decay
        is part of the states (Adam, SGD) and a program lets go of the parameter but not of the state, each use of the
        state or the gradient is a RuntimeError.

    update_on: "device" or "cpu".
        "cpu": the CPU updates parameters whose gradients and states are at home in host memory: gradients go there,
        weights come back, and states stay. With "backward" and "next_use", a thread does so beside whatever the GPU does,
        and an error in an update comes from the next use of the parameter. LibTorch's fused kernels are used, which round
        differently: after one step from the same state, a weight in float32 differs by at most 8 units in the last place
        of the largest of its values before and after and the learning rate. The device updates parameters with a tensor
        that is not at home (resident, refused by a full host, or just then in use or fetched by another thread), or that
        the kernels do not take: one that is not contiguous, is negated, or is complex, or a gradient in the memory of the
        parameter or a state. At most 2 GiB of copies of gradients, or one that is larger, wait for their updates in host
        memory. On the device a copy lives until it is home and the next update is put off.

    state_dict() has copies of all states, in host memory. Learning-rate schedulers, parameter groups and zero_grad are
    torch's. An optimizer whose states are managed can be neither copied nor pickled (its state_dict() can), and neither can
    one with "backward", where hooks around step() do not enclose the updates, and neither torch.amp.GradScaler, a reentrant
    checkpoint nor DistributedDataParallel (whose ranks would drift apart) may be used.

    Raises ValueError when made with options out of their range, or with maximize=True on the CPU, and RuntimeError for
    gradients that are not dense. Where the device's memory does not suffice, step() raises torch.OutOfMemoryError with some
    parameters updated and others not: go on from what was saved.
    """

    # All that a subclass says. `group` has the subclass's options.
    _kind: ClassVar[str]
    _states: ClassVar[tuple[str, ...]] = ()  # the names of the states that there may be, as torch's optimizer has them

    @staticmethod
    def _check(group: dict[str, Any]) -> None:
        """Raises ValueError."""
        raise NotImplementedError

    @staticmethod
    def _wanted(group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the states that an update takes."""
        raise NotImplementedError

    @staticmethod
    def _update_rows(
        target: torch.Tensor,
        gradient: torch.Tensor,
        states: dict[str, torch.Tensor],
        new: set[str],
        steps: torch.Tensor,
        group: dict[str, Any],
    ) -> None:
        """Updates some rows of a parameter, or of its master. `new`: which states are zeros. `steps`: before this one."""
        raise NotImplementedError

    @staticmethod
    def _do_states_take_parameter(group: dict[str, Any]) -> bool:
        """Whether the states after an update depend on the parameter before."""
        return bool(group["weight_decay"] != 0)

    @staticmethod
    def _numbers(group: dict[str, Any]) -> dict[str, float]:
        """The options as ebb's own optimizer of this name takes them, which has no `maximize`."""
        raise NotImplementedError

    _update_in: UpdateIn = "step"
    _update_on: UpdateOn = "device"
    _cpu_updates: _core.CpuUpdates | None = None

    def __init__(self, params: Any, defaults: dict[str, Any], update_in: UpdateIn, update_on: UpdateOn) -> None:
        if update_in not in ("step", "backward", "next_use"):
            raise ValueError(f'ebb: update_in is {update_in!r}, and must be "step", "backward" or "next_use"')
        if update_on not in ("device", "cpu"):
            raise ValueError(f'ebb: update_on is {update_on!r}, and must be "device" or "cpu"')
        self._update_in = update_in
        self._set_update_on(update_on)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._places: dict[int, tuple[int, int]] = {}  # group and place there, by the id of a parameter
        self._updated: set[int] = set()  # the id of each parameter updated in backward since the last step()
        weakref.finalize(self, _remove, self._hooks)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
            self._check_for_cpu(group)
        except ValueError:
            self.param_groups.pop()
            raise
        if self._update_in != "backward":
            return
        this = weakref.ref(self)

        def update(parameter: torch.Tensor) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._update_in_backward(parameter)

        for parameter in group["params"]:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(update))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient. `closure` is called first, with gradients, and its result returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        self._end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        super().zero_grad(set_to_none)
        self._end_step()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with copies of the states in host memory. ebb.save writes the same without such copies."""
        known = self.state_dict_in_parts()
        known["state"] = {key: _whole(state) for key, state in known["state"].items()}
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, known)
            known = known if changed is None else changed
        return known

    def state_dict_in_parts(self) -> dict[str, Any]:
        """state_dict() with the states themselves, Joined in place of what is in parts, and no hooks called afterwards."""
        with self._without_hooks("state_dict_post"):
            known = super().state_dict()
        known["state"] = {key: _joined(state) for key, state in known["state"].items()}
        return known

    @contextlib.contextmanager
    def _without_hooks(self, *kinds: str) -> Iterator[None]:
        """torch calls no hooks of these kinds, which the caller calls with whole states."""
        hooks = {name: getattr(self, name) for name in (f"_optimizer_{kind}_hooks" for kind in kinds)}
        try:
            for name in hooks:
                setattr(self, name, OrderedDict())
            yield
        finally:
            for name, known in hooks.items():
                setattr(self, name, known)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. States keep their own type, and are managed where their parameters are. Takes what torch's optimizer
        has saved, too: masters are then made of the parameters. An option that is True or False and is missing, as in
        checkpoints that are older than the option, is False. Raises ValueError, and changes nothing, where a state has
        other sizes than its parameter, or another option of this optimizer is missing.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        names = (*self._states, "master")
        indices = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        known = set(indices)
        states = {
            number: state for number, state in state_dict["state"].items() if number in known and isinstance(state, dict)
        }
        tensors = {
            number: {name: value for name, value in state.items() if name in names and value is not None}
            for number, state in states.items()
        }
        for number, parameter in zip(indices, parameters, strict=False):  # torch refuses another number of parameters
            for name, value in tensors.get(number, {}).items():
                if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                    found = tuple(value.shape) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
                    raise ValueError(
                        f"ebb: {name} of parameter {number} is {found}, and must be a tensor of {tuple(parameter.shape)}"
                    )
        newer = {name: False for name, value in self.defaults.items() if isinstance(value, bool)}
        groups = [newer | group for group in state_dict["param_groups"]]
        for group in groups:
            if missing := self.defaults.keys() - group.keys():
                raise ValueError(
                    f"ebb: this is no state of {type(self).__name__}, which has options that it lacks: {sorted(missing)}"
                )
        others = {
            number: {name: copy.deepcopy(value) for name, value in state.items() if name not in names}
            for number, state in states.items()
        }
        for state in others.values():
            if "step" in state and not isinstance(state["step"], torch.Tensor):  # as old checkpoints of torch's have it
                state["step"] = torch.tensor(float(state["step"]), dtype=_type_of_steps())
        with self._without_hooks("load_state_dict_pre", "load_state_dict_post"):
            super().load_state_dict({"state": state_dict["state"] | others, "param_groups": groups})
        for number, parameter in zip(indices, parameters, strict=True):
            if not tensors.get(number):
                continue
            state = self.state[parameter]
            ranges = _ranges(parameter)
            parts = [state] if len(ranges) == 1 else [{} for _ in ranges]
            for name, value in tensors[number].items():
                for rows, part in zip(ranges, parts, strict=True):
                    own = value[rows].to(parameter.device, _state_type(parameter), copy=True)
                    part[name] = _beside(parameter, own)
            if len(ranges) > 1:
                self.state[parameter] = _InParts(state, parts=parts)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        if self._update_in == "backward":
            name = type(self).__name__
            raise TypeError(f'ebb: {name} with update_in="backward" cannot be copied or pickled; its state_dict() can')
        return super().__getstate__() | {"update_in": self._update_in, "update_on": self._update_on}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ours = ("update_in", "update_on")
        super().__setstate__({name: value for name, value in state.items() if name not in ours})
        self.defaults.pop("differentiable", None)  # which torch adds here, and ebb's optimizers do not have
        if "update_on" in state:  # load_state_dict, too, calls this
            self._update_in = state["update_in"]
            self._set_update_on(state["update_on"])

    def _set_update_on(self, update_on: UpdateOn) -> None:
        self._update_on = update_on
        if update_on == "cpu":
            self._cpu_updates = _core.CpuUpdates()
            weakref.finalize(self, self._cpu_updates.end)

    def _check_for_cpu(self, group: dict[str, Any]) -> None:
        if self._update_on == "cpu" and group["maximize"]:
            raise ValueError(f'ebb: {type(self).__name__} with update_on="cpu" does not maximize')

    def _end_step(self) -> None:
        if self._update_in == "backward":  # what was unpickled has no such attribute, and another mode
            self._updated.clear()

    def _update_in_backward(self, parameter: torch.Tensor) -> None:
        group = self._group_of(parameter)
        if parameter.grad is None or group is None:
            return
        if id(parameter) in self._updated:
            raise RuntimeError(
                f"ebb: {type(self).__name__} with update_in=\"backward\" got a parameter's second gradient before "
                "step(). Each backward pass is a step there, so gradients cannot be accumulated: call step() after each, or use "
                'update_in="step"'
            )
        self._updated.add(id(parameter))
        self._update(parameter, group)
        parameter.grad = None

    def _group_of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        for _ in range(2):  # the program may have changed the groups since places were looked up
            number, place = self._places.get(id(parameter), (0, 0))
            if number < len(self.param_groups):
                group = self.param_groups[number]
                if place < len(group["params"]) and group["params"][place] is parameter:
                    return group
            self._places = {
                id(each): (number, place)
                for number, group in enumerate(self.param_groups)
                for place, each in enumerate(group["params"])
            }
        return None

    @torch.no_grad()
    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"ebb: {type(self).__name__} does not support gradients that are sparse, or have another layout: "
                f"{gradient.layout}"
            )
        self._check_for_cpu(group)  # which the program may have changed
        plain = type(parameter) in _PLAIN and type(gradient) in _PLAIN
        may_wait = plain and "step" in self.state[parameter]
        state, parts, new = self._state_of(parameter, group)
        steps = state["step"]
        if self._cpu_updates is not None and plain and not parameter.is_complex():
            tensors = self._tensors_of(parts)
            update = _core.CpuUpdate(self._kind, self._numbers(group), int(steps.item()) + 1, bool(new))
            now = self._cpu_updates.now
            may_wait = may_wait and self._update_in != "step"
            if may_wait and self._cpu_updates.later(parameter, gradient, tensors, update):
                torch.autograd.graph.increment_version(parameter)  # as the update would
            elif not (
                may_wait
                and self._update_in == "next_use"
                and self._postpone(parameter, gradient, tensors, group, lambda *taken: now(*taken, update))
            ):
                now(parameter, gradient, tensors, update)
        elif not (
            may_wait
            and self._update_in == "next_use"
            and self._postpone(parameter, gradient, self._tensors_of(parts), group, self._deferred(new, steps, group))
        ):
            _update_parts(type(self), parameter, gradient, parts, new, steps, group)
        steps += 1

    def _tensors_of(self, parts: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
        return [{name: part[name] for name in (*self._states, "master") if name in part} for part in parts]

    def _deferred(self, new: set[str], steps: torch.Tensor, group: dict[str, Any]) -> _Run:
        """An update with the options and the number of steps that there are now."""
        kind, steps_before = type(self), steps.clone()
        options = {name: _as_of_now(value) for name, value in group.items() if name != "params"}
        return lambda parameter, gradient, parts: _update_parts(
            kind, parameter, gradient, parts, new, steps_before, options
        )

    def _postpone(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        parts: list[dict[str, torch.Tensor]],
        group: dict[str, Any],
        run: _Run,
    ) -> bool:
        """Has run(parameter, gradient, parts) be called at the next use of one of these. False where the update cannot
        wait: some of what it takes may be used without being seen."""
        names = [list(part) for part in parts]
        others = [gradient, *(tensor for part in parts for tensor in part.values())]

        def update(target: torch.Tensor, taken: list[torch.Tensor]) -> None:
            tensors = iter(taken)
            from_gradient = next(tensors)
            there = [{name: next(tensors) for name in known} for known in names]
            if not is_managed(target) and "master" in there[0]:  # it stands in for a parameter that has ended
                for rows, part in zip(_ranges(target), there, strict=True):
                    target[rows].copy_(part["master"])
            run(target, from_gradient, there)

        reads_parameter = bool(names[0]) and "master" not in names[0] and self._do_states_take_parameter(group)
        waits = _core.postpone(parameter, others, update, reads_parameter)
        if waits:
            torch.autograd.graph.increment_version(parameter)  # as the update would
        return waits

    def _state_of(
        self, parameter: torch.Tensor, group: dict[str, Any]
    ) -> tuple[dict[str, Any], list[dict[str, Any]], set[str]]:
        """The parameter's state, where its tensors are, by parts of the parameter, and which of these are new."""
        with torch.inference_mode(False), torch.no_grad():  # states of the first step are written in later ones
            return self._state_of_parts(parameter, group)

    def _state_of_parts(
        self, parameter: torch.Tensor, group: dict[str, Any]
    ) -> tuple[dict[str, Any], list[dict[str, Any]], set[str]]:
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=_type_of_steps())
        ranges = _ranges(parameter)
        if len(ranges) > 1 and "parts" not in state:
            self.state[parameter] = state = _InParts(state, parts=[{} for _ in ranges])
        parts = [state] if len(ranges) == 1 else state["parts"]
        dtype = _state_type(parameter)
        new: set[str] = set()
        for rows, part in zip(ranges, parts, strict=True):
            if dtype != parameter.dtype and "master" not in part:
                part["master"] = _beside(parameter, parameter.detach()[rows].to(dtype))
            for name in self._wanted(group):
                if name not in part:
                    like = parameter.detach()[rows]
                    zeros = torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)
                    part[name] = _beside(parameter, zeros)
                    new.add(name)
        return state, parts, new


def _as_of_now(option: Any) -> Any:
    """The option, which stays what it is when the program writes to its tensors and lists."""
    if isinstance(option, torch.Tensor):
        return option.clone()
    return tuple(map(_as_of_now, option)) if isinstance(option, list | tuple) else option


def _update_parts(
    kind: type[Optimizer],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    parts: list[dict[str, Any]],
    new: set[str],
    steps: torch.Tensor,
    options: dict[str, Any],
) -> None:
    names = (*kind._states, "master")
    all_parts = _core.OnDevice([parameter, gradient])
    try:
        for rows, part in zip(_ranges(parameter), parts, strict=True):
            one_part = _core.OnDevice([part[name] for name in names if name in part])
            try:
                master = part.get("master")
                if master is None:
                    kind._update_rows(parameter[rows], gradient[rows], part, new, steps, options)
                else:
                    _follow_weight(master, parameter[rows])
                    kind._update_rows(master, gradient[rows].float(), part, new, steps, options)
                    parameter[rows].copy_(master)
            finally:
                one_part.end()
    finally:
        all_parts.end()


def _follow_weight(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Has the master take the weight's value wherever it does not round to it: the program has written the weight."""
    master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight))


def _ranges(parameter: torch.Tensor) -> list[Any]:
    """Indices of the rows of each part of a parameter.

    Tensors of other classes stay whole: their rows need not be views (a DTensor's are copies).
    """
    rows = parameter.shape[0] if parameter.dim() > 0 else 1
    if type(parameter) not in _PLAIN or parameter.numel() <= _ELEMENTS_AT_ONCE:
        return [...]
    at_once = max(1, _ELEMENTS_AT_ONCE // (parameter.numel() // rows))
    return [slice(begin, begin + at_once) for begin in range(0, rows, at_once)]


class Joined:
    """A tensor that is in parts, one behind the other in the first dimension."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts = parts
        self.shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


class _InParts(dict[str, Any]):
    """The state of a parameter that is updated in parts.

    state["exp_avg"] is a new tensor of all parts on the device. Writing to that would change no part, and is a RuntimeError.
    """

    def __missing__(self, name: str) -> torch.Tensor:
        with torch.inference_mode():  # outside of which nobody may write to the tensor
            return torch.cat([part[name] for part in self["parts"]])


def _joined(state: Any) -> Any:
    if not isinstance(state, dict):  # of the program's own
        return state
    joined = {name: value for name, value in state.items() if name != "parts"}
    for name in state.get("parts", [{}])[0]:
        joined[name] = Joined([part[name] for part in state["parts"]])
    return joined


def _whole(state: Any) -> Any:
    """The state with copies of its tensors in host memory, none of them in parts."""
    return {name: to_host(value) for name, value in state.items()} if isinstance(state, dict) else state


def _type_of_steps() -> torch.dtype:  # as torch's optimizers have it
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def _state_type(parameter: torch.Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype


def _remove(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _beside(parameter: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    _core.manage_beside(parameter, made)
    return made


@torch.inference_mode(False)
@torch.no_grad()
def to_host(value: Any) -> Any:
    """A copy of a tensor in host memory; what else there is as it is."""
    if isinstance(value, Joined):
        return torch.cat([to_host(part) for part in value.parts])
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.is_cpu else value.cpu()


def is_number(value: Any) -> bool:
    """Whether torch's optimizers take the value for a number."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_at_least_0(kind: str, group: dict[str, Any], *names: str) -> None:
    """Raises ValueError for options of these names that are no numbers of at least 0."""
    for name in names:
        if not is_number(group[name]) or not group[name] >= 0:
            raise ValueError(f"ebb: {kind} got {name}={group[name]!r}, and takes a number of at least 0")
