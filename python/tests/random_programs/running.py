"""What a program's source calls, and what it notes to be compared."""

import collections
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

import ebb
from random_programs.program import DATA, LEAVES, SIZE

Entry = tuple[str, Any]


class Refused(Exception):
    """What a program raises."""


class Stop(BaseException):
    """What a program raises as KeyboardInterrupt is raised: no Exception."""


class _Rounds(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        result = operation(*arguments, **(named or {}))
        rounds = operation.overloadpacket in (torch.ops.aten.silu, torch.ops.aten.mul, torch.ops.aten.mm)
        return result.round(decimals=2) if rounds and result.is_floating_point() else result


class Scaled(torch.autograd.Function):
    """Saves its input and asks for it twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] + gradient * ctx.saved_tensors[0]


class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


class SavesView(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.t(), x.sin())
        return x.cos()

    @staticmethod
    def backward(ctx, gradient):
        transposed, sine = ctx.saved_tensors
        return -gradient * sine + 0 * transposed.t()


class RunsBackward(torch.autograd.Function):
    """Runs a forward and a backward pass of its own in its backward, as reentrant checkpointing does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with torch.no_grad():
            return F.silu(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            F.silu(again).backward(gradient.detach())
        return again.grad


class SavesTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y, x)
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        x, y, again = ctx.saved_tensors
        return gradient * y, gradient * (x + again) * 0.5


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Counted(contextlib.AbstractContextManager):
    """Counts how often it begins and ends; unlike a generator's, it may do so again."""

    def __init__(self, run: "Run", name: str) -> None:
        self._run = run
        self._name = name

    def __enter__(self) -> None:
        self._run.count(f"{self._name}.begin")

    def __exit__(self, *error: object) -> None:
        self._run.count(f"{self._name}.end")


class Run:
    """One program's run. Its methods are what the program's source calls; the subclass says what a guard is.

    Note [What ebb is compared with]
    Guards are absent in Plain, and saved_tensors_hooks that return their argument in Identity. What LibTorch does
    otherwise under any saved-tensor hooks than without, ebb may do as under these. The innermost wins, guard or
    foreign hooks, so a guard inside of something foreign is such hooks in Plain, too.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def leaf(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator).requires_grad_()

        named = {name: leaf(SIZE, SIZE) for name in (*LEAVES, *DATA)}
        for name in DATA:
            named[name].requires_grad_(False)
        self.leaves = tuple(named.values())
        self.w, self.e, self.f, self.cube = leaf(SIZE, SIZE), leaf(SIZE), leaf(SIZE), leaf(SIZE, SIZE, SIZE)
        self.index = torch.randint(SIZE, (SIZE,), generator=generator)
        self.norm = torch.nn.BatchNorm1d(SIZE)
        self.last_norm = torch.nn.BatchNorm1d(SIZE, affine=False, momentum=None)
        self.trained = {name: each for name, each in named.items() if each.requires_grad}
        self.trained |= {"w": self.w, "e": self.e, "f": self.f, "cube": self.cube}
        self.trained |= {f"norm.{name}": each for name, each in self.norm.named_parameters()}
        self.counts: collections.Counter[str] = collections.Counter()
        self.entries: list[Entry] = []

    # Guards.

    def guard(self) -> contextlib.AbstractContextManager:
        raise NotImplementedError

    def inner_guard(self) -> contextlib.AbstractContextManager:
        return saved_tensors_hooks(_same, _same)

    def other_guard(self) -> contextlib.AbstractContextManager:
        return saved_tensors_hooks(_same, _same)

    @contextlib.contextmanager
    def no_offload(self) -> Iterator[None]:
        """Takes guards off the top of torch's stack of hooks: saves are left to what is below."""
        taken = 0
        while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None and top[0] is _same:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            taken += 1
        try:
            yield
        finally:
            for _ in range(taken):
                torch._C._autograd._push_saved_tensors_default_hooks(_same, _same)

    def checkpoint(self, function, *inputs, early_stop: bool = False, is_asked_for: bool = True):
        return function(*inputs)

    def call(self, function, *inputs):
        return function(*inputs)

    # Notes.

    def count(self, name: str) -> int:
        self.counts[name] += 1
        return self.counts[name]

    def note(self, label: str, *values: Any) -> None:
        self.entries.append((f"step {self.step}, calls by {label}", dict(self.counts)))
        for number, value in enumerate(values):
            self.entries.append((f"step {self.step}, {label} {number}", _noted(value)))

    def begin_step(self, step: int) -> None:
        self.step = step
        self.counts.clear()
        torch.manual_seed(step)

    def note_error(self, error: BaseException) -> None:
        text = re.sub(r"0x[0-9a-f]+", "0x", str(error))
        if "modified by an inplace operation" in text:  # LibTorch names the tensor by what hooks do not know
            text = "modified by an inplace operation"
        self.entries.append((f"step {self.step}, error", (type(error).__name__, text)))

    def end_step(self, updates: bool) -> None:
        self.note("the step's end", torch.get_rng_state(), _hooks_left())
        for name, each in self.trained.items():
            self.entries.append((f"step {self.step}, gradient of {name}", _noted(each.grad)))
        for module in (self.norm, self.last_norm):
            for name, each in module.named_buffers():
                self.entries.append((f"step {self.step}, buffer {name}", _noted(each)))
        with torch.no_grad():
            for each in self.trained.values():
                if updates and each.grad is not None:
                    each.sub_(each.grad.clamp(-1, 1), alpha=0.01)
                each.grad = None

    # Losses.

    def loss(self, value: torch.Tensor) -> torch.Tensor:
        value = value.float()
        return value.square().mean() + value.sum() * 0.05 + self.leaves[0].sum() * 0.01

    def penalty(self, gradients: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        return sum((each.square().sum() for each in gradients if each is not None), self.leaves[0].sum() * 0.01)

    # Operations.

    def write_row(self, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        value[1] = other[2]
        return value

    # Errors.

    def refuse(self, name: str, at: int) -> None:
        if self.count(name) == at:
            raise Refused(f"{name} refuses at {at}")

    def stop(self, name: str, at: int) -> None:
        if self.count(name) == at:
            raise Stop(f"{name} stops at {at}")

    # Hooks on tensors.

    def hook(self, value: torch.Tensor, name: str) -> None:
        if value.requires_grad:
            value.register_hook(lambda gradient: self.count(name) and None)

    def hook_that_runs_backward(self, value: torch.Tensor, name: str) -> None:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            self.count(name)
            with torch.enable_grad(), self.guard():
                inner = (self.w * gradient.detach()).sin().square().sum()
            return gradient + torch.autograd.grad(inner, self.w)[0]

        if value.requires_grad:
            value.register_hook(hook)

    # Dispatch modes.

    def rounded(self, function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
        """Of an operation that computes something else here than it does in backward."""
        with _Rounds():
            return function(*operands)

    # Contexts of torch's checkpoint.

    def contexts(self) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
        return _Counted(self, "contexts"), _Counted(self, "contexts.again")

    def selective(self):
        operations = torch.ops.aten
        return create_selective_checkpoint_contexts(
            [operations.mm.default, operations.addmm.default, operations.sin.default, operations.silu.default]
        )

    # Foreign hooks.

    def _hooks(self, name: str, pack, unpack) -> saved_tensors_hooks:
        def counted_pack(tensor: torch.Tensor) -> Any:
            self.count(f"{name}.pack")
            return pack(tensor)

        def counted_unpack(packed: Any) -> torch.Tensor:
            self.count(f"{name}.unpack")
            return unpack(packed)

        return saved_tensors_hooks(counted_pack, counted_unpack)

    def counting(self, name: str) -> saved_tensors_hooks:
        return self._hooks(name, _same, _same)

    def once(self, name: str) -> saved_tensors_hooks:
        """May be asked for each save once, as torchtune's and TRL's hooks may."""
        store: dict[int, torch.Tensor] = {}
        numbers = itertools.count()

        def pack(tensor: torch.Tensor) -> int:
            number = next(numbers)
            store[number] = tensor.detach().clone()
            return number

        def unpack(number: int) -> torch.Tensor:
            if number not in store:
                raise Refused(f"{name} is asked again")
            return store.pop(number)

        return self._hooks(name, pack, unpack)

    def converting(self, name: str) -> saved_tensors_hooks:
        """Runs operations where no gradients are recorded, and keeps every bit."""

        @torch.no_grad()
        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
            return tensor.double() if tensor.is_floating_point() else tensor.clone(), tensor.dtype

        @torch.no_grad()
        def unpack(packed: tuple[torch.Tensor, torch.dtype]) -> torch.Tensor:
            return packed[0].to(packed[1])

        return self._hooks(name, pack, unpack)

    def rounding(self, name: str) -> saved_tensors_hooks:
        """Loses bits, as hooks that compress do."""

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
            return tensor.bfloat16() if tensor.is_floating_point() else tensor, tensor.dtype

        return self._hooks(name, pack, lambda packed: packed[0].to(packed[1]))

    def computing(self, name: str) -> saved_tensors_hooks:
        """Whose unpack goes backward over a graph of its own, under a guard."""

        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad(), self.guard():
                loss = F.silu(self.w * 2).square().sum()
            torch.autograd.grad(loss, self.w)
            return tensor

        return self._hooks(name, torch.Tensor.detach, unpack)

    def refusing_pack(self, name: str, at: int) -> saved_tensors_hooks:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.refuse(f"{name}.refusal", at)
            return tensor

        return self._hooks(name, pack, _same)

    def refusing_unpack(self, name: str, at: int) -> saved_tensors_hooks:
        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            self.refuse(f"{name}.refusal", at)
            return tensor

        return self._hooks(name, _same, unpack)

    def stopping_unpack(self, name: str, at: int) -> saved_tensors_hooks:
        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            self.stop(f"{name}.stop", at)
            return tensor

        return self._hooks(name, _same, unpack)


def _hooks_left() -> int:
    """How many hooks were left on torch's stack, and are taken off it."""
    left = 0
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        left += 1
    return left


class Plain(Run):
    def guard(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


class Identity(Run):
    def guard(self) -> contextlib.AbstractContextManager:
        return saved_tensors_hooks(_same, _same)


class Offloaded(Run):
    def __init__(self, offloader: ebb.Offloader, other: ebb.Offloader) -> None:
        super().__init__()
        self.offloader = offloader
        self.other = other

    def guard(self) -> contextlib.AbstractContextManager:
        return self.offloader

    inner_guard = guard

    def other_guard(self) -> contextlib.AbstractContextManager:
        return self.other

    def no_offload(self) -> contextlib.AbstractContextManager:
        return ebb.no_offload()

    def checkpoint(self, function, *inputs, early_stop: bool = False, is_asked_for: bool = True):
        if not is_asked_for:
            return ebb.recomputable(function, *inputs)
        return ebb.checkpoint(function, *inputs, early_stop=early_stop)


def _noted(value: Any) -> Any:
    """What two runs must have in common of a tensor: its bits, sizes, strides and dtype."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    bits = value.contiguous().view(torch.uint8) if value.dim() else value.reshape(1).view(torch.uint8)
    return tuple(value.shape), value.stride(), value.dtype, bits.numpy().tobytes()


NAMES = {
    "torch": torch,
    "F": F,
    "ebb": ebb,
    "checkpoint": checkpoint,
    "set_checkpoint_early_stop": set_checkpoint_early_stop,
    "save_on_cpu": save_on_cpu,
    "Scaled": Scaled,
    "SavesOutput": SavesOutput,
    "SavesView": SavesView,
    "RunsBackward": RunsBackward,
    "SavesTwo": SavesTwo,
}


def execute(source: str, run: Run, steps: int, updates: bool) -> list[Entry]:
    """Runs step(run) so often, whatever it raises, and returns what it has noted."""
    names = dict(NAMES)
    exec(compile(source, "<program>", "exec"), names)
    for step in range(steps):
        run.begin_step(step)
        try:
            names["step"](run)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            run.note_error(error)
        run.end_step(updates)
    return run.entries
