"""Whole training of a Llama with ebb, and with what a user would pick instead, each as its own documentation has it."""

import importlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from .configurations import checkpoint_block
from .model import INIT_DEVIATION, TOKEN_SEED, WEIGHT_SEED, Llama, Shape, norm

TOKENS_OF_HEAD = 4096  # at once
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
CPU = torch.device("cpu")


def shapes(batch: int, sequence: int) -> dict[str, Shape]:
    """The sizes of bench/model/options.cc."""
    return {
        "tiny": Shape(256, 256, 4, 8, 4, 704, 1e4, batch, sequence),
        "1b": Shape(128256, 2048, 16, 32, 8, 8192, 5e5, batch, sequence),
        "3b": Shape(128256, 3072, 28, 24, 8, 8192, 5e5, batch, sequence),
        "8b": Shape(128256, 4096, 32, 32, 8, 14336, 5e5, batch, sequence),
    }


@dataclass(frozen=True)
class TrainingOptions:
    """What a user may set. Sizes are bytes."""

    shape: str = "1b"
    batch: int = 8
    sequence: int = 1024
    configs: tuple[str, ...] = ("resident", "ebb", "ebb_step", "torchao", "torchao_bfloat16", "fsdp2", "cpu")
    device: str = "auto"
    warm_up: int = 3  # steps
    steps: int = 5  # timed
    cap: int | None = None  # of the GPU's memory, for torch's allocator
    managed: int = 6_000_000_000  # manage()'s device_bytes
    resident: int = 0  # manage()'s resident_bytes
    minimum: int = 1 << 20  # smaller tensors do not move
    out: Path | None = None

    def sizes(self) -> Shape:
        return shapes(self.batch, self.sequence)[self.shape]


class Training(Llama):
    """The model with its loss. Blocks are checkpointed, and so are the head's parts if it has more than one.

    `checkpointed(function, *inputs)` runs a part of which only the inputs are saved; `kept` is around the head."""

    def __init__(
        self,
        options: TrainingOptions,
        dtype: torch.dtype,
        device: torch.device,
        checkpointed: Callable[..., Tensor] = checkpoint_block,
        kept: AbstractContextManager[None] | None = None,
    ) -> None:
        super().__init__(options.sizes(), dtype, device)
        self.cos, self.sin = self.cos.bfloat16(), self.sin.bfloat16()
        self.checkpointed, self.kept = checkpointed, kept or nullcontext()
        for block in self.blocks:
            block.forward = partial(checkpointed, block.forward)

    def initialize(self, generator: torch.Generator) -> None:
        """Leaves the weights unwritten, and those on the CPU without pages: fill() writes them where they live."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy, float32, of labels int64 [batch, sequence]."""
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        x = F.embedding(tokens, self.embedding).bfloat16()
        for block in self.blocks:
            x = block(x, cos, sin)
        hidden = norm(x, self.norm).flatten(0, 1)
        with self.kept:
            parts = list(zip(hidden.split(TOKENS_OF_HEAD), labels.flatten().split(TOKENS_OF_HEAD), strict=True))
            if len(parts) == 1:
                losses = [self.loss_of(*parts[0])]
            else:
                losses = [self.checkpointed(self.loss_of, *part) for part in parts]
            return torch.stack(losses).sum() / hidden.shape[0]

    def loss_of(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, self.head).float(), labels, reduction="sum")


@torch.no_grad()
def fill(model: Training, device: torch.device) -> None:
    """Writes the weights, the same in every configuration: drawn in bfloat16 on the device, one after the other."""
    generator = torch.Generator(device).manual_seed(WEIGHT_SEED)
    for parameter in model.parameters():
        drawn = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        if parameter.dim() == 1:
            drawn.fill_(1.0)
        else:
            drawn.normal_(0.0, INIT_DEVIATION, generator=generator)
        parameter.copy_(drawn)


class Program:
    """A training loop's state. `guard` is around each forward pass; `offloader` is ebb's, if it has one."""

    def __init__(
        self,
        options: TrainingOptions,
        model: Training,
        optimizer: Any,
        device: torch.device,
        guard: AbstractContextManager[Any] | None = None,
        offloader: Any = None,
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.guard, self.offloader = guard or nullcontext(), offloader
        shape = options.sizes()
        generator = torch.Generator().manual_seed(TOKEN_SEED)
        text = torch.randint(0, shape.vocab, (shape.batch, shape.sequence + 1), generator=generator)
        self.tokens, self.labels = text[:, :-1].to(device), text[:, 1:].to(device)

    def step(self) -> float:
        """Forward, backward and update. Returns the loss, read as a program reads it."""
        with self.guard:
            loss = self.model(self.tokens, self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def finish(self) -> None:
        """Waits for all copies, too."""
        if self.offloader is not None:
            self.offloader.drain()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def resident(options: TrainingOptions, device: torch.device | None = None) -> Program:
    """All of it in the device's memory; None: the options' device."""
    ebb = importlib.import_module("ebb")
    device = device or torch.device(options.device)
    model = Training(options, torch.bfloat16, device)
    fill(model, torch.device(options.device))
    return Program(options, model, ebb.AdamW(model.parameters(), **ADAMW), device)


def managed(options: TrainingOptions, update_in: str) -> Program:
    """Weights, gradients and states in host memory, and the blocks' inputs, too."""
    ebb = importlib.import_module("ebb")
    device = torch.device(options.device)
    offloader = ebb.Offloader(device, policy=ebb.policies.minimum_size(options.minimum))
    checkpointed = partial(ebb.checkpoint, early_stop=True)  # as torch's, by default
    model = Training(options, torch.bfloat16, CPU, checkpointed, ebb.no_offload())
    offloader.manage(
        model, device_bytes=options.managed, resident_bytes=options.resident, minimum_bytes=options.minimum
    )
    model.cos, model.sin = model.cos.to(device), model.sin.to(device)
    fill(model, device)
    optimizer = ebb.AdamW(model.parameters(), update_in=update_in, **ADAMW)
    return Program(options, model, optimizer, device, offloader, offloader)


def torchao(options: TrainingOptions, dtype: torch.dtype) -> Program:
    """The optimizer's states and its own weights, which are of this type, in host memory, and updates on the CPU.

    In float32, which autocast rounds, the norms' gains are in bfloat16 all the same: torch has no fused norm for both.
    """
    optim = importlib.import_module("torchao.optim")
    device = torch.device(options.device)
    model = Training(options, dtype, device)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = parameter.data.bfloat16()
    fill(model, device)
    optimizer = optim.CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, **ADAMW
    )
    # A weight is cast once in each pass. The cache would keep all of them on the GPU until the forward pass ends.
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.float32, cache_enabled=False)
    return Program(options, model, optimizer, device, autocast)


def fsdp2(options: TrainingOptions) -> Program:
    """Float32 weights, gradients and states in host memory, computing in bfloat16, and updates on the CPU."""
    device = torch.device(options.device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    model = Training(options, torch.float32, CPU)
    fill(model, device)
    shard = partial(
        fully_shard,
        mesh=init_device_mesh(device.type, (1,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    )
    for block in model.blocks:
        shard(block)
    shard(model)
    return Program(options, model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), device)


ON_CPU = "cpu"
CONFIGURATIONS: dict[str, Callable[[TrainingOptions], Program]] = {
    "resident": resident,
    "ebb": partial(managed, update_in="backward"),
    "ebb_step": partial(managed, update_in="step"),
    "torchao": partial(torchao, dtype=torch.float32),
    "torchao_bfloat16": partial(torchao, dtype=torch.bfloat16),
    "fsdp2": fsdp2,
    ON_CPU: partial(resident, device=CPU),
}
SAME_BITS = ("resident", "ebb", "ebb_step")  # of a device that agrees with itself
NOTES = {
    "torchao_bfloat16": "inexact: weights and states in bfloat16, no masters",
    ON_CPU: "one step, the first",
}


def proc_bytes(file: str, key: str) -> int:
    """A line such as "VmRSS: 12 kB" of a file of /proc's, in bytes."""
    line = next(line for line in Path(file).read_text().splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


def cap_memory(cap_bytes: int) -> None:
    _, total_bytes = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(cap_bytes / total_bytes)


def measure(options: TrainingOptions, config: str) -> dict[str, Any]:
    """The row's fields, of one configuration in this process."""
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if options.cap is not None:
            cap_memory(options.cap)
    program = CONFIGURATIONS[config](options)
    on_gpu = program.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()  # of drawn weights
    warm_up, steps = (0, 1) if config == ON_CPU else (options.warm_up, options.steps)
    losses = [program.step() for _ in range(warm_up)]
    program.finish()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    losses += [program.step() for _ in range(steps)]
    program.finish()
    seconds = (time.perf_counter() - start) / steps
    tokens = options.batch * options.sequence
    return {
        "parameters": sum(parameter.numel() for parameter in program.model.parameters()),
        "tokens_per_step": tokens,
        "s_per_step": seconds,
        "tokens_per_s": tokens / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "reserved_bytes": torch.cuda.memory_reserved() if on_gpu else None,
        "rss_bytes": proc_bytes("/proc/self/status", "VmRSS"),
        "pool_bytes": None if program.offloader is None else program.offloader.stats().pool.capacity_bytes,
        "losses": losses,
    }
