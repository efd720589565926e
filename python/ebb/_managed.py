"""What Python has to know of managed tensors, and of tensors in parts."""

from collections.abc import Callable
from typing import Any

import torch

from ebb import _core
from ebb._wrap_once import wrap_once

KEY = torch._C._parse_dispatch_key("TESTING_ONLY_GenericMode")  # Note [How operations are observed]


def is_managed(value: Any) -> bool:
    """Whether this is a tensor of which Offloader.manage has been given the storage, also where that stays."""
    return isinstance(value, torch.Tensor) and torch._C._dispatch_keys(value).has(KEY)


def let_legacy_methods_pass() -> None:
    """Has torch's legacy methods, which read a tensor's kind from its keys, take managed tensors. Once for the process."""

    def make(method: Callable[..., Any]) -> Callable[..., Any]:
        def legacy(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            alike = torch.empty(0, dtype=self.dtype, device=self.device) if is_managed(self) else self
            return method(alike, *arguments, **named)

        return legacy

    for name in ("new", "new_tensor"):
        wrap_once(torch.Tensor, name, make)


def refuse_to_share_memory() -> None:
    """Has managed storages be shared with no other process: asking is answered, and sharing refused, with RuntimeError.

    LibTorch would read their addresses, and let no error out of is_shared(). Once for the process.
    """

    def is_storage_managed(storage: torch.UntypedStorage) -> bool:
        return is_managed(_core.bytes_of(storage))

    def make_answer(is_shared: Callable[[torch.UntypedStorage], bool]) -> Callable[[torch.UntypedStorage], bool]:
        return lambda self: not is_storage_managed(self) and is_shared(self)

    def make_refusal(share: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(self: torch.UntypedStorage, *arguments: Any, **named: Any) -> Any:
            if is_storage_managed(self):
                raise RuntimeError("ebb: memory that comes and goes cannot be shared with other processes: share a clone()")
            return share(self, *arguments, **named)

        return refuse

    wrap_once(torch.UntypedStorage, "is_shared", make_answer)
    for name in ("_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_"):
        wrap_once(torch.UntypedStorage, name, make_refusal)


class Joined:
    """A tensor that is in parts, one behind the other in the first dimension."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts = parts
        self.shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def joined(state: Any, given: Callable[[Any], Any]) -> Any:
    """What is given of each value in an optimizer's state of a parameter, with Joined in place of what is in parts."""
    if not isinstance(state, dict):  # of the program's own
        return state
    parts = state.get("parts", [{}])
    whole = {name: value for name, value in state.items() if name != "parts"}
    whole |= {name: Joined([part[name] for part in parts]) for name in parts[0]}
    return {name: given(value) for name, value in whole.items()}


@torch.inference_mode(False)
@torch.no_grad()
def to_host(value: Any) -> Any:
    """A copy of a tensor in host memory; what else there is as it is."""
    if isinstance(value, Joined):
        return torch.cat([to_host(part) for part in value.parts])
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.is_cpu else value.cpu()
