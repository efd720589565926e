"""Has state_dict() give managed tensors as copies in host memory."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, ItemsView, Mapping, MutableMapping, ValuesView
from typing import Any

import torch
import torch.utils._pytree

from ebb import _core
from ebb._managed import is_managed, to_host
from ebb._optimizer import Optimizer
from ebb._wrap_once import wrap_once


class StateDict(OrderedDict[Any, Any]):
    """What state_dict() gives where some tensors are managed: these as copies in host memory.

    A copy is made when its entry is first asked for, and again when it is asked for after a write to the tensor: without
    ebb an entry shares the tensor's memory. Entries that are one tensor have one copy. What is written to a copy does not reach the managed tensor. What pickle and deepcopy
    make of this is an OrderedDict.

    Threads: one at a time, as for a dict.
    """

    _tied: Mapping[Any, list[Any]] = {}  # by name: all names of a tensor that has several
    _copies: dict[Any, tuple[int, torch.Tensor]] = {}  # by name: of which version, and the copy

    @classmethod
    def of(cls, known: Mapping[Any, Any]) -> Any:
        """The same entries; what is given where nothing in it is managed."""
        if not isinstance(known, dict) or not any(map(is_managed, known.values())):
            return known
        names = defaultdict(list)
        for name, value in known.items():
            if is_managed(value):
                names[_identity(value)].append(name)
        made = cls(known)
        vars(made).update(getattr(known, "__dict__", {}))
        made._copies = {}
        made._tied = {name: together for together in names.values() if len(together) > 1 for name in together}
        return made

    def managed_items(self) -> list[tuple[Any, Any]]:
        """The entries, with the managed tensors themselves where they have not been asked for."""
        return [(name, self[name] if name in self._copies else value) for name, value in super().items()]

    def __getitem__(self, name: Any) -> Any:
        value = super().__getitem__(name)
        if not is_managed(value):
            return value
        version, copied = self._copies.get(name, (None, None))
        if version != value._version:
            version, copied = value._version, to_host(value)
            for each in self._tied.get(name, [name]):
                other = super().get(each)
                if other is value or (is_managed(other) and _identity(other) == _identity(value)):
                    self._copies[each] = version, copied
        return copied

    get = Mapping.get
    pop = MutableMapping.pop

    def items(self) -> ItemsView[Any, Any]:
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:
        return ValuesView(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), self._attributes() or None, None, iter(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> OrderedDict[Any, Any]:
        copies = StateDict.of(OrderedDict(self.managed_items()))  # which are nobody else's
        made: OrderedDict[Any, Any] = OrderedDict(
            (name, copies[name] if is_managed(value) else copy.deepcopy(value, memo))
            for name, value in self.managed_items()
        )
        vars(made).update(copy.deepcopy(self._attributes(), memo))
        return made

    def _attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_tied", "_copies")}


def wrap_state_dicts() -> None:
    """Wraps state_dict() of torch's modules and optimizers, and what load_state_dict() of optimizers puts beside a parameter,
    which then is managed as the parameter is. Once for the process."""

    def make_of_module(function: Callable[..., Any]) -> Callable[..., Any]:
        def state_dict(
            self: torch.nn.Module, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
        ) -> Any:
            known = function(self, *args, destination=destination, prefix=prefix, keep_vars=keep_vars)
            is_part = destination is not None or any(each is not None for each in args[:1])
            return known if is_part or keep_vars or any(args[2:]) else StateDict.of(known)

        return state_dict

    def make_of_optimizer(function: Callable[..., Any]) -> Callable[..., Any]:
        def state_dict(self: torch.optim.Optimizer) -> Any:
            known = function(self)
            states = known.get("state") if isinstance(known, dict) else None  # a hook may have returned anything
            if isinstance(self, Optimizer) or not isinstance(states, dict):  # ebb's copy
                return known
            copied = {key: StateDict.of(state) for key, state in states.items()}
            return known if all(copied[key] is states[key] for key in states) else known | {"state": copied}

        return state_dict

    def make_of_loaded(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def process(
            param: torch.Tensor, value: torch.Tensor, param_id: int, param_groups: list[Any], key: Hashable = None
        ) -> torch.Tensor:
            loaded = function(param, value, param_id, param_groups, key)
            if not is_managed(param) or (key != "step" and loaded.shape != param.shape):
                return loaded
            own = loaded.clone() if loaded is value else loaded
            if key != "step":
                _core.manage_beside(param, own)
            return own

        return process

    wrap_once(torch.nn.Module, "state_dict", make_of_module)
    wrap_once(torch.optim.Optimizer, "state_dict", make_of_optimizer)
    wrap_once(torch.optim.Optimizer, "_process_value_according_to_param_policy", make_of_loaded)


def _identity(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    place = torch._C._storage_address(tensor), tensor.storage_offset()
    return *place, tensor.dtype, tensor.shape, tensor.stride()


torch.utils._pytree.register_pytree_node(
    StateDict,
    lambda known: (list(known.values()), list(known)),
    lambda values, names: OrderedDict(zip(names, values, strict=True)),
)
