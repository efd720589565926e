"""The configurations of one program, one after the other in one process."""

import argparse
import gc
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from bench.peers import measure
from bench.peers.results import GB

from . import configurations
from .programs import PROGRAMS, Program
from .rows import PLANNED, Row

STEPS_UNTIL_PLANNED = 5
WARM_UP_BY_HAND = 3  # nothing is planned


def digest(program: Program) -> list[int]:
    """A number for each gradient, which any other bit changes."""
    found = []
    for parameter in program.parameters:
        bits = parameter.grad.detach().flatten().view(torch.int16 if parameter.element_size() == 2 else torch.int32)
        total = 0
        for place, part in enumerate(bits.split(1 << 24)):
            weights = torch.arange(1, part.numel() + 1, device=part.device) % 65521 + 1
            total += (place + 1) * int((part.long() * weights).sum().item())
        found.append(total)
    return found


class Run:
    """One program, and its configurations one after the other."""

    def __init__(self, flags: argparse.Namespace, name: str) -> None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # or its products are not deterministic
        torch.utils.deterministic.fill_uninitialized_memory = False
        self._flags, self._name = flags, name
        self._device = torch.device(flags.device)
        self.program = PROGRAMS[name](flags.tiny, self._device)
        self._expected: list[int] | None = None
        self._options = {"planned_minimum_bytes": 4096} if flags.tiny else {}  # or nothing would be planned

    def _step(self, guard: configurations.GUARD, look: Callable[[], Any] | None = None) -> Any:
        program = self.program
        with guard():
            program.loss().backward()
        seen = look() if look is not None else None
        if program.optimizer is not None:
            program.optimizer.step()
        program.model.zero_grad(set_to_none=True)
        return seen

    def _measure(self, guard: configurations.GUARD, is_planned: bool) -> Row:
        for _ in range(self._flags.warm_up if is_planned else min(self._flags.warm_up, WARM_UP_BY_HAND)):
            self._step(guard)
        self.program.steps = self._flags.warm_up
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        ms = [measure.time_ms(self._step, guard) for _ in range(self._flags.steps)]
        row: Row = {
            "ms_median": statistics.mean(ms) if self.program.lengths else statistics.median(ms),
            "ms_all": ms,
            "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        }
        return row | {"gradients": self._gradients(guard)}

    def _gradients(self, guard: configurations.GUARD) -> str:
        """Are they plain autograd's in deterministic mode? Plain autograd on a GPU does not agree with itself otherwise."""
        torch.use_deterministic_algorithms(True)
        self.program.steps = 0
        try:
            found = self._step(guard, lambda: digest(self.program))
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            self.program.model.zero_grad(set_to_none=True)
            return "not deterministic"
        finally:
            torch.use_deterministic_algorithms(False)
        self._expected = self._expected or found
        return "equal" if found == self._expected else "DIFFERENT"

    def row(self, config: str, entered: Callable[[Program], configurations.Entered], budget: int | None = None) -> Row:
        row: Row = {"program": self._name, "config": config, "budget_bytes": budget, "error": None}
        if self.program.optimizer is not None:
            self.program.optimizer.state.clear()  # or the states would stay where the configuration before had them
        self.program.steps = 0
        try:
            with entered(self.program) as guard:
                row |= self._measure(guard, is_planned=budget is not None)
                if self.program.offloader is not None and self._flags.explain:
                    row["explained"] = self.program.offloader.explain()
                if budget is not None:
                    report = self.program.offloader.plan_report()
                    if report is not None:  # else steps of which none is alike are left alone, because each fits
                        predicted = report.predicted
                        row |= {"predicted_ms": predicted.step_ms, "predicted_peak_bytes": predicted.peak_bytes}
                    if self._flags.records and report is not None:
                        row["record"] = report.record
        except Exception as error:  # a package that is missing, or too little memory, costs its row only
            row |= {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
            self.program.model.zero_grad(set_to_none=True)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        print(text_of(row), file=sys.stderr, flush=True)
        return row

    def least_bytes(self) -> int:
        with configurations.least(self.program, **self._options) as guard:
            for _ in range(STEPS_UNTIL_PLANNED):
                self._step(guard)
            return self.program.offloader.plan_report().predicted.peak_bytes

    def all(self) -> Iterator[Row]:
        flags = self._flags
        whole = None
        for config, entered in configurations.BY_HAND.items():
            if flags.configs is None or config in flags.configs:
                row = self.row(config, entered)
                whole = row.get("peak_bytes") if config == "none" else whole
                yield row
        trains = self.program.optimizer is not None
        for size in flags.managed if trains else []:
            yield self.row(f"manage and checkpoint, {size / GB:g} GB", partial(configurations.by_hand, device_bytes=size))
        planned = partial(configurations.plan, **self._options)
        budgets = flags.within or self._budgets(whole or 1 << 24)
        for budget in budgets:
            yield self.row(PLANNED, partial(planned, budget=budget), budget)
        for budget in flags.within_managed if trains else []:
            yield self.row("plan and manage", partial(planned, budget=budget, manages=True), budget)
        yield self.row("none, last", configurations.none)

    def _budgets(self, whole: int) -> list[int]:
        count = self._flags.budgets
        if count == 0:
            return []
        least = self.least_bytes()
        return [least + (whole - least) * i // max(count - 1, 1) for i in range(count)]


def text_of(row: Row) -> str:
    budget = "" if row["budget_bytes"] is None else f" {row['budget_bytes'] / GB:.2f} GB"
    if row["error"]:
        return f"{row['program']:18} {row['config']}{budget}: {row['error']}"
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / GB:.2f} GB"
    return f"{row['program']:18} {row['config'] + budget:36} {row['ms_median']:9.1f} ms {peak:>10}  {row['gradients']}"


def run_program(flags: argparse.Namespace, name: str) -> list[Row]:
    return list(Run(flags, name).all())
