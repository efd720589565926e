"""The rows of the C++ program: its plain autograd, and ebb beside it."""

import json
import math
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .options import CPP_CONFIGS, EBB, Options
from .results import GB, Row, relative_difference, verdict

ROW_NAMES = dict(zip(CPP_CONFIGS, ("none in C++", EBB, f"{EBB}, lean")))
MEASURED = (
    "ms_median",
    "ms_p10",
    "ms_p90",
    "none_ms_median",
    "ratio_of_medians",
    "undrained_after_forward_bytes",
    "after_forward_bytes",
    "peak_bytes",
    "offloaded_bytes",
    "gradient_norm",
)


# Steps until a plan is made, and until it is corrected no more.
PLAN_WARM_UP = 11


def run_step(options: Options, dtype: str, configs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The program's results by its configurations. Raises OSError or ValueError where it gives none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        flags = {"--shape": options.shape, "--dtypes": dtype, "--device": options.device, "--out": out}
        flags |= {"--warm-up": options.warm_up, "--pairs": options.pairs}
        if options.layers:
            flags["--layers"] = options.layers
        words = (word for flag in flags.items() for word in flag)
        command = [options.step.absolute(), "--configs", *configs, *words]
        # Its exit status says no more than its results: it is 1 where gradients differ or could not be compared.
        status = subprocess.run([str(word) for word in command], stdout=subprocess.DEVNULL, check=False).returncode
        text = out.read_text() if out.exists() else ""
    if not text:
        raise ValueError(f"{options.step} ended with status {status} and wrote no results")
    results = {result["config"]: result for result in json.loads(text)}
    for result in results.values():
        if result["gradient_norm"] is None:  # JSON has no NaN, and the program's writer puts null
            result["gradient_norm"] = math.nan
    return results


def measure(options: Options, dtype: str, none_norm: float | None, names: dict[str, str]) -> list[Row]:
    """`names`: the rows', by the program's configurations."""
    try:
        results = run_step(options, dtype, tuple(names))
        return [
            Row(
                name,
                dtype,
                **{field: results[config][field] for field in MEASURED},
                none_gradient_norm=none_norm,
                norm_difference=relative_difference(results[config]["gradient_norm"], none_norm),
                gradients=verdict(results[config]["gradients_equal"]),
            )
            for config, name in names.items()
        ]
    except (OSError, ValueError) as error:
        return [Row(name, dtype, error=f"not runnable here: {error}") for name in names.values()]
    except KeyError as error:
        return [Row(name, dtype, error=f"{options.step} does not say {error}") for name in names.values()]


def measure_cpp(options: Options, dtype: str, none_norm: float | None) -> list[Row]:
    """`none_norm` is that of plain autograd in Python, whose model must be the same."""
    return measure(options, dtype, none_norm, {config: ROW_NAMES[config] for config in options.cpp_configs})


def measure_planned(
    options: Options, dtype: str, none_norm: float | None, budget: int | None, peer_peaks: Sequence[int]
) -> list[Row]:
    """Within the budget; None: within the least of these peaks."""
    name = f"{EBB}, planned" if budget is None else f"{EBB}, within {budget / GB:g} GB"
    if budget is None and not peer_peaks:
        return [Row(name, dtype, error="its budget is the least that a package takes, and none was measured before it")]
    bytes_ = min(peer_peaks) if budget is None else budget
    settled = replace(options, warm_up=max(options.warm_up, PLAN_WARM_UP))
    rows = measure(settled, dtype, none_norm, {f"budget:{bytes_}": name})
    return [
        replace(row, error=f"takes {row.peak_bytes} bytes, over its budget of {bytes_}")
        if row.peak_bytes is not None and row.peak_bytes > bytes_
        else row
        for row in rows
    ]
