"""What is measured of one Python configuration: each of the last four functions has a process of its own."""

import bisect
import gc
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from .configurations import Step, checkpoint_first, configuration, none
from .model import Workload
from .options import DTYPES, Options
from .results import relative_difference

CHECKED_STEPS = 3
LINK_BYTES = 1 << 30
LINK_COPIES = 7


def make_workload(options: Options, dtype: str) -> Workload:
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return Workload(options.chosen_shape(), DTYPES[dtype], device)


def make_steps(options: Options, dtype: str, config: str) -> tuple[Step, Step]:
    """Plain autograd's step and the configuration's, of the same weights and tokens."""
    workload = make_workload(options, dtype)
    return none(workload), configuration(config)(workload)


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def ignore() -> None:
    pass


def time_ms(work: Callable[..., object], *arguments: object) -> float:
    synchronize()
    start = time.perf_counter()
    work(*arguments)
    synchronize()
    return 1e3 * (time.perf_counter() - start)


def time_pairs(plain: Step, step: Step, warm_up: int, pairs: int) -> tuple[list[float], list[float]]:
    plain_ms: list[float] = []
    step_ms: list[float] = []
    for i in range(-warm_up, pairs):
        # Each is the first of every other pair, so that neither is always the one that follows the other.
        order = [(plain, plain_ms), (step, step_ms)]
        for run, ms in reversed(order) if i % 2 else order:
            ms.append(time_ms(run, ignore))
    return plain_ms[warm_up:], step_ms[warm_up:]


def measure_memory(step: Step) -> dict[str, int]:
    if not torch.cuda.is_initialized():
        return {}
    after_forward: list[int] = []

    def after_head() -> None:
        synchronize()
        after_forward.append(torch.cuda.memory_allocated())

    gc.collect()
    step(after_head)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step(ignore)
    synchronize()
    return {
        "undrained_after_forward_bytes": after_forward[0],
        "after_forward_bytes": after_forward[0],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def gradient_norm(gradients: Sequence[Tensor]) -> float:
    """The 2-norm over all gradients, in float64."""
    norms = torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients])
    return torch.linalg.vector_norm(norms).item()


def same_bits(a: Tensor, b: Tensor) -> bool:
    # As bytes: values would take +0 for -0, and no NaN for itself.
    return a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


def measure(options: Options, dtype: str, config: str) -> dict[str, Any]:
    plain, step = make_steps(options, dtype, config)
    none_ms, ms = time_pairs(plain, step, options.warm_up, options.pairs)
    p10, median, p90 = numpy.percentile(ms, (10, 50, 90)).tolist()
    none_median = statistics.median(none_ms)
    norm, none_norm = gradient_norm(step(ignore)), gradient_norm(plain(ignore))
    return {
        "ms_median": median,
        "ms_p10": p10,
        "ms_p90": p90,
        "none_ms_median": none_median,
        "ratio_of_medians": median / none_median,
        **measure_memory(step),
        "gradient_norm": norm,
        "none_gradient_norm": none_norm,
        "norm_difference": relative_difference(norm, none_norm),
    }


def gradients_equal(options: Options, dtype: str, config: str) -> bool:
    """Are all gradients of three steps those of plain autograd, bit for bit, in deterministic mode?"""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor is for programs that read memory which they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False
    plain, step = make_steps(options, dtype, config)
    expected = [gradient.cpu() for gradient in plain(ignore)]  # a step within a budget has no room for them
    for _ in range(CHECKED_STEPS):
        if not all(same_bits(a.to(b.device), b) for a, b in zip(expected, step(ignore), strict=True)):
            return False
    return True


def fewest(count: int, peak_bytes: Callable[[int], int], budget_bytes: int) -> int:
    """The least number from 0 to `count` whose peak, which falls with it, is within the budget. Raises ValueError where
    there is none."""
    least = bisect.bisect_left(range(count + 1), True, key=lambda number: peak_bytes(number) <= budget_bytes)
    if least > count:
        raise ValueError(f"all {count} of them take {peak_bytes(count)} bytes, over {budget_bytes}")
    return least


def blocks_to_checkpoint(options: Options, dtype: str, budget_bytes: int) -> int:
    """The fewest blocks with whose checkpointing a step's peak is within the budget."""
    workload = make_workload(options, dtype)

    def peak_bytes(blocks: int) -> int:
        step = checkpoint_first(workload, blocks)
        step(ignore)  # what the first step alone allocates
        memory = measure_memory(step)
        if not memory:
            raise RuntimeError(f"no peak is known on {options.device}")
        return memory["peak_bytes"]

    return fewest(len(workload.model.blocks), peak_bytes, budget_bytes)


def describe_machine(options: Options) -> dict[str, Any]:
    """The GPU, the versions of the packages, and the link's rate each way in GB/s (1e9 bytes)."""
    machine: dict[str, Any] = {"device": options.device, "torch": torch.__version__}
    for package in ("torchtune", "torchao", "trl", "transformers"):
        try:
            machine[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            machine[package] = None
    if options.device != "cpu":
        machine["gpu"] = torch.cuda.get_device_name(options.device)
        host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        device = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=options.device)
        for name, to, source in (("device_to_host", host, device), ("host_to_device", device, host)):
            ms = [time_ms(to.copy_, source, True) for _ in range(LINK_COPIES)]
            machine[f"{name}_gb_per_s"] = LINK_BYTES / statistics.median(ms) / 1e6
    return machine
