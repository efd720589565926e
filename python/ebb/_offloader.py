"""Offloader, and the guards."""

import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from ebb import _core, _trace
from ebb._backward import watch_backward
from ebb._managed import is_managed
from ebb._optimizer_step import watch_optimizer_steps
from ebb._sizes import Size, to_bytes
from ebb.policies import PolicyLike, as_policy


def _choice(kind: Any, name: str, value: str) -> Any:
    try:
        return kind.__members__[value]
    except (KeyError, TypeError):
        choices = " or ".join(repr(each) for each in kind.__members__)
        raise ValueError(f"ebb: {name} is {value!r}, and must be {choices}") from None


def _flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"ebb: {name} is {value!r}, and must be True or False")
    return value


def _folder(name: str, value: str | os.PathLike[str]) -> str:
    if not isinstance(value, str | os.PathLike) or "\0" in os.fsdecode(value):
        raise TypeError(f"ebb: {name} is {value!r}, and must be a path")
    return os.fsdecode(value)


def _fraction(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"ebb: {name} is {value!r}, and must be a fraction: 0.05 is five percent")
    return value


def _make(parameter: torch.Tensor, device: torch.device) -> None:
    """Has a parameter on the meta device stay the same object, with its hooks and attributes, and have memory."""
    memory = torch.empty_like(parameter.detach(), device=device)
    made = torch.Tensor._make_subclass(type(parameter), memory, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, made)
    # Both stayed with the object in Python; setting them tells autograd.
    parameter._backward_hooks = parameter._backward_hooks
    if parameter._post_accumulate_grad_hooks is not None:
        parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


def _warn_of_other_memory(offloader: "Offloader", passes: int) -> bool:
    """For watch_backward: warns once of each parameter that was given to manage() and is not managed any more."""
    others = [each for each in offloader._managed if not is_managed(each)]
    for each in others:
        offloader._managed.pop(each, None)
    if others:
        warnings.warn(
            f"ebb: {len(others)} parameters that were given to manage() have other memory since, which is not managed: "
            "model.to(dtype) and model.half() do that. Call them before manage(), or manage() once more.",
            stacklevel=2,
        )
    return True


class Offloader:
    """Owns what a run needs to move saved activations: memory, policy, statistics. Make one before the loop.

        with offloader:
            loss = model(batch)
        loss.backward()        # inside of the guard or outside

    What autograd saves on this thread under the guard goes through the offloader. Guards nest, in each other and in
    torch.autograd.graph.saved_tensors_hooks, and the innermost wins. Threads may share an offloader. Graphs keep what
    they need, so it may end before their backward. A forked child may make one of its own; using its parent's is a
    RuntimeError there.

    Sizes are bytes, as an int or as text: "24GB" (10^9), "24GiB" (2^30). None means that ebb chooses.

    device: whose memory to relieve. None: the current CUDA device if there is one, else the CPU.
    policy: what leaves the device, from ebb.policies or a function of an ebb.Candidate. None: minimum_size("1MiB").

    At most one of the next four, in place of a policy: a plan then decides what stays, moves or is computed again. It
    is made from the first two steps that are alike.
    device_budget: as fast as possible within so many bytes of device memory.
    share_of_free: the same; what is in use, and this share of what is free now. GPU only.
    slowdown: the least memory for at most this fraction more time; 0.02 is two percent.
    least_memory: the least memory at any cost in time.

    planned_minimum_bytes: with a budget, smaller storages stay.
    device_budget_is_a_wish: a budget that is too small is a warning, and not an error in the third step.
    evict_when_out_of_memory: GPU only; when the device has no memory left, send managed tensors home, and then
        copy out what the policy has kept.
    stash_bytes, window_bytes: device memory for copies out under way, and for what is prefetched.
    home: "host" (memory), "disk", or "auto": the one beside a GPU, the other without. Beside a GPU there is no "disk", and
        without one "host" saves no memory: it is for trying out what is meant for a GPU.
    host_memory: "pinned" or "pageable". GPU only.
    capacity_bytes: the most host memory (GPU) or disk (CPU) to use; over it, storages stay. None: all there is.
    host_memory_warning: warn once when more than this fraction of the machine's memory is in use.
    spill_folder, disk_io ("auto", "uring" or "threads"): of a disk; where the spill file is made, and what reads it.
    return_freed_memory: CPU only; freed tensors go back to the system, by an allocator that stays for the process.
    record_timeline, record_trace: for timeline() and plot(), and for trace().
    enabled: False makes every guard do nothing.

    Raises ValueError for options that cannot be used, and RuntimeError where the device or the disk refuses.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        policy: PolicyLike | None = None,
        device_budget: Size | None = None,
        *,
        share_of_free: float | None = None,
        slowdown: float | None = None,
        least_memory: bool = False,
        planned_minimum_bytes: Size = 1 << 20,
        device_budget_is_a_wish: bool = False,
        evict_when_out_of_memory: bool = True,
        stash_bytes: Size | None = None,
        window_bytes: Size | None = None,
        home: str = "auto",
        host_memory: str = "pinned",
        capacity_bytes: Size | None = None,
        host_memory_warning: float = 0.6,
        spill_folder: str | os.PathLike[str] = "/var/tmp",
        disk_io: str = "auto",
        return_freed_memory: bool = True,
        record_timeline: bool = False,
        record_trace: bool = False,
        enabled: bool = True,
    ) -> None:
        options = _core.Options()
        options.enabled = _flag("enabled", enabled)
        if device is not None:
            options.set_device(str(torch.device(device)))
        if policy is not None:
            options.policy = as_policy(policy)
        goals = {
            "device_budget": device_budget is not None,
            "share_of_free": share_of_free is not None,
            "slowdown": slowdown is not None,
            "least_memory": _flag("least_memory", least_memory),
        }
        given = [name for name, is_given in goals.items() if is_given]
        if len(given) > 1:
            raise ValueError(f"ebb: {' and '.join(given)} are given, and only one of them may be")
        if device_budget is not None:
            options.set_device_bytes(to_bytes("device_budget", device_budget))
        if share_of_free is not None:
            options.set_share_of_free(_fraction("share_of_free", share_of_free))
        if slowdown is not None:
            options.set_slowdown(_fraction("slowdown", slowdown))
        if least_memory:
            options.set_least_memory()
        options.planned_minimum_bytes = to_bytes("planned_minimum_bytes", planned_minimum_bytes)
        options.device_budget_is_a_wish = _flag("device_budget_is_a_wish", device_budget_is_a_wish)
        options.evict_when_out_of_memory = _flag("evict_when_out_of_memory", evict_when_out_of_memory)
        for name, size in {
            "stash_bytes": stash_bytes,
            "window_bytes": window_bytes,
            "capacity_bytes": capacity_bytes,
        }.items():
            if size is not None:
                setattr(options, name, to_bytes(name, size))
        options.home = _choice(_core.Home, "home", home)
        options.host_memory = _choice(_core.HostMemory, "host_memory", host_memory)
        options.host_memory_warning = _fraction("host_memory_warning", host_memory_warning)
        options.spill_folder = _folder("spill_folder", spill_folder)
        options.disk_io = _choice(_core.DiskIo, "disk_io", disk_io)
        options.return_freed_memory = _flag("return_freed_memory", return_freed_memory)
        options.record_timeline = _flag("record_timeline", record_timeline)
        options.record_trace = _flag("record_trace", record_trace)
        self._records = {"record_timeline": record_timeline, "record_trace": record_trace}
        self._enabled = enabled
        self._core = _core.Offloader(options)
        self._managed = WeakTensorKeyDictionary()  # the parameters; the values are nothing
        self._watch = watch_backward(self, _warn_of_other_memory)
        self._here = threading.local()
        self._is_distributed = False

    def __enter__(self) -> Self:
        if not self._is_distributed and torch.distributed.is_available() and torch.distributed.is_initialized():
            self._is_distributed = True
            self._core.parameters_may_be_sharded()
        guard = _core.OffloadGuard(self._core)
        try:
            self._here.guards.append(guard)
        except AttributeError:  # the thread's first
            self._here.guards = [guard]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        guards = getattr(self._here, "guards", None)
        if not guards:
            raise RuntimeError("ebb: `with offloader` ends on a thread where it has not begun")
        guards.pop().end()

    def stats(self) -> _core.Stats:
        """What has become of what autograd saved: counts, bytes, peaks, stalls. str() of it is a table."""
        return self._core.stats()

    def summary(self) -> str:
        """The same in one line."""
        return self._core.summary()

    def explain(self) -> str:
        """With a budget, a table of the plan: what becomes of each operation's storages, and why."""
        return self._core.explain()

    def plan_report(self) -> _core.PlanReport | None:
        """The plan in figures; None where there is none yet."""
        return self._core.plan_report()

    def timeline(self) -> list[_core.TimelineSample]:
        """The samples since the last call. ValueError without record_timeline=True."""
        self._need("record_timeline")
        return self._core.take_timeline()

    def trace(self) -> dict[str, Any]:
        """Every copy, stall, pack and unpack that is over since the last call, as a Chrome trace.

        json.dump writes it; ui.perfetto.dev opens the file. ValueError without record_trace=True.
        """
        self._need("record_trace")
        return _trace.chrome_trace(self._core.take_trace())

    def evict(self, bytes: Size) -> int:
        """Lets go of at least so much device memory if it can, and returns how many bytes of storages that was."""
        return self._core.evict(to_bytes("bytes", bytes))

    @property
    def device(self) -> torch.device:
        """The device whose memory is spared."""
        return torch.device(self._core.device())

    def exclude(self, *what: torch.Tensor | torch.nn.Module) -> None:
        """Never moves these tensors, nor any view of them; of a module, its parameters and buffers.

        Leaves that require gradients need no mention. Call it after the last `to(device)` or `to(dtype)`.
        """
        for each in what:
            if isinstance(each, torch.nn.Module):
                for tensor in (*each.parameters(), *each.buffers()):
                    self._core.exclude(tensor)
            elif isinstance(each, torch.Tensor):
                self._core.exclude(each)
            else:
                raise TypeError(f"ebb: exclude() got {each!r}, and takes tensors and modules")

    def manage(
        self,
        what: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
        *,
        device_bytes: Size | None = None,
        resident_bytes: Size = 0,
        prefetch_bytes: Size | None = None,
        minimum_bytes: Size = "1MiB",
        weights: bool = True,
        gradients: bool = True,
        states: bool = True,
        which: Callable[[str, torch.Tensor], bool] | None = None,
    ) -> None:
        """Keeps parameters in host memory, or without a GPU on the disk, and has them on the device around their uses.

        The training loop and torch's optimizers stay as they are: each operation on a managed tensor finds its bytes,
        and gives the bits that it always gave. Gradients live beside their parameters, and so do the states that a
        torch.optim.Optimizer makes by zeros_like in step(), or loads. What else the program makes like a parameter is the
        program's, and stays on the device; so do the states of an optimizer that is none of torch.optim.Optimizer's, unless
        they are given to manage(), too. The order of uses is learned, and what comes next is prefetched. Make the optimizer with
        foreach=False, or fused=True, on a GPU: foreach asks for everything at once. Calls add up; the first says how.

        what: a module, of which the parameters are managed, a tensor or tensors.
        device_bytes: the most bytes of managed tensors on the device at once, but for what one operation needs, and for a
            gradient or state that has just been made, until others have left. None: the plan for the offloader's device_budget, which has to be in bytes or a share of free memory, decides about these
            tensors together with what autograd saves; until there is a plan, a quarter of the budget or less.
        resident_bytes: so many bytes of parameters, in their order, and then of the optimizer's states stay on the device for
            good, beside device_bytes, and take no host memory.
        prefetch_bytes: how far ahead to fetch; None: half of device_bytes, and at most 2 GB.
        minimum_bytes: smaller tensors stay on the device.
        weights, gradients, states: what leaves the device: the parameters; their gradients, each when backward has
            accumulated the next one; and what optimizers keep of them.
        which: of a module's parameters, those for which which(name, parameter) is true.

        Addresses, and numpy arrays, that code inside of an operation takes of a managed tensor (a saved-tensor hook, a
        dispatch mode, a custom operation) are good until that operation ends: take no address for a tensor's name.

        state_dict() of a module, and of torch's optimizers, has managed tensors as copies in host memory, each made when it
        is first asked for, and again after a write to the tensor, and kept as long as the dict: torch.save needs host memory for all of them, and ebb.save for one.
        What is written to a copy does not reach the tensor: load_state_dict() does, and state_dict(keep_vars=True) has
        the module's tensors themselves.

        Whatever else asks for memory without an operation (numpy(), data_ptr(), share_memory_(), torch.save of a tensor, a
        Triton kernel, copy.deepcopy of a gradient; on a CPU print() and tolist(), too) gets RuntimeError. A numpy array of
        the same memory must be gone before this call. Not for two backward passes at once into one parameter.

        Parameters in CPU memory are moved to the offloader's GPU, and parameters on the meta device get memory there,
        which is not initialized: one after the other, so that a model may be larger than the GPU's memory. Buffers stay
        where they are: model.to(offloader.device) moves those in CPU memory. Call model.to(dtype) and model.half() before:
        they give parameters other memory, which is not managed. A UserWarning tells of that after a backward pass.

        Warns where no tensor is large enough to be managed.

        Raises ValueError for what is not dense, wraps other tensors (FSDP's DTensor), or is on another device, and where
        neither device_bytes nor a budget says how much may be on the device. Raises RuntimeError where there is no room,
        with the tensors before managed, or where another offloader manages a tensor: what is managed stays so when its
        offloader ends. A parameter gets memory that another offloader may manage by
        parameter.data = parameter.detach().clone().
        """
        if which is not None and not callable(which):
            raise TypeError(f"ebb: which is {which!r}, and must be a function of a name and a parameter")
        if isinstance(what, torch.nn.Module):
            named = what.named_parameters()
            tensors = [each for name, each in named if which is None or which(name, each)]
        elif which is not None:
            raise TypeError("ebb: manage() takes `which` with a module only")
        elif isinstance(what, torch.Tensor):
            tensors = [what]
        elif isinstance(what, Iterable):
            tensors = list(what)
        else:
            raise TypeError(f"ebb: manage() got {what!r}, and takes a module, a tensor or tensors")
        if not all(isinstance(each, torch.Tensor) for each in tensors):
            raise TypeError("ebb: manage() takes a module, a tensor or tensors")
        for each in tensors:
            if is_traceable_wrapper_subclass(each):
                raise ValueError(
                    f"ebb: a {type(each).__name__} wraps other tensors and has no memory of its own, so manage() cannot "
                    "take it: FSDP's fully_shard makes such parameters; which=... leaves parameters out"
                )
        how = (
            None if device_bytes is None else to_bytes("device_bytes", device_bytes),
            None if prefetch_bytes is None else to_bytes("prefetch_bytes", prefetch_bytes),
            to_bytes("minimum_bytes", minimum_bytes),
            to_bytes("resident_bytes", resident_bytes),
            _flag("weights", weights),
            _flag("gradients", gradients),
            _flag("states", states),
        )
        watch_optimizer_steps()
        managed = False
        for each in tensors:  # one after the other: together they need not fit on the device
            if each.is_meta:
                _make(each, self.device)
            if gradients and each.is_leaf and each._post_accumulate_grad_hooks is None:
                # Torch replaces a C++ hook where the program adds its first one in Python: as if one had been removed.
                each._post_accumulate_grad_hooks = OrderedDict()
            managed = self._core.manage([each], *how) or managed
        if not managed and self._enabled:
            why = f"all of {len(tensors)} tensors are smaller than minimum_bytes" if tensors else "no tensor was chosen"
            warnings.warn(f"ebb: manage() manages nothing: {why}", stacklevel=2)
        self._managed.update((each, None) for each in tensors if is_managed(each))
        self._watch.passes = 0

    def release(self, what: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Has parameters, their gradients and the optimizer's states on the device for good, as before manage().

        Updates that were put off are done first, and new gradients stay on the device. Raises torch.OutOfMemoryError where
        the device has no room, with some of them released.
        """
        tensors = what.parameters() if isinstance(what, torch.nn.Module) else what
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        for each in tensors:
            self._managed.pop(each, None)
        self._core.release(tensors)

    def drain(self) -> None:
        """Has all copies out done and their sources let go of. For measuring; training does not need it."""
        self._core.drain()

    def reset_stats(self) -> None:
        """Sets all counts to zero, and all peaks but the pool's to the present levels."""
        self._core.reset_stats()

    def _need(self, option: str) -> None:
        if not self._records[option]:
            raise ValueError(f"ebb: this needs an Offloader that was made with {option}=True")

    def __reduce__(self) -> Any:
        raise TypeError("ebb: an Offloader cannot be pickled or copied: it owns memory of this process")

    def __repr__(self) -> str:
        return f"<ebb.Offloader: {self.summary()}>"


class no_offload:
    """`with ebb.no_offload():` leaves what autograd saves on this thread to torch.

    Put it around the output head and the loss, whose saves backward wants at once.
    """

    def __init__(self) -> None:
        self._guards: list[_core.NoOpGuard] = []

    def __enter__(self) -> None:
        self._guards.append(_core.NoOpGuard())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._guards:
            raise RuntimeError("ebb: `with ebb.no_offload()` ends and has not begun")
        self._guards.pop().end()
