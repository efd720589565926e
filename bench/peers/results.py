"""The benchmark's rows, as a file and as a table."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GB = 1e9
NOT_CHECKED = "not checked"
COLUMNS = (
    "dtype",
    "configuration",
    "ms/step",
    "p10 to p90",
    "over none",
    "after forward GB",
    "copies awaited",
    "peak GB",
    "gradient norm",
    "off by",
    "gradients",
)


@dataclass(frozen=True)
class Row:
    """One configuration beside plain autograd in the same process. What is None was not measured."""

    config: str
    dtype: str
    error: str | None = None  # why nothing was measured
    ms_median: float | None = None
    ms_p10: float | None = None
    ms_p90: float | None = None
    none_ms_median: float | None = None
    ratio_of_medians: float | None = None
    undrained_after_forward_bytes: int | None = None  # when the device has nothing left to do
    after_forward_bytes: int | None = None  # when ebb has let go of what was copied, which it does at its next call
    peak_bytes: int | None = None
    offloaded_bytes: int | None = None
    gradient_norm: float | None = None
    none_gradient_norm: float | None = None  # of Python's plain autograd, for ebb's rows too
    norm_difference: float | None = None  # relative, to `none_gradient_norm`
    gradients: str = NOT_CHECKED  # else "equal", "DIFFERENT", or why they could not be compared


def relative_difference(norm: float, reference: float | None) -> float | None:
    return None if reference is None else abs(norm / reference - 1)


def verdict(equal: bool | None) -> str:
    """None: the gradients that were compared are not of such steps as were timed."""
    return {True: "equal", False: "DIFFERENT", None: "not compared"}[equal]


def show(form: str, *values: float | None) -> str:
    return "-" if None in values else form.format(*values)


def cells(row: Row) -> list[str]:
    """A row of the table, in the order of COLUMNS."""
    overhead = None if row.ratio_of_medians is None else 100 * (row.ratio_of_medians - 1)
    measured = (row.undrained_after_forward_bytes, row.after_forward_bytes, row.peak_bytes)
    undrained, after_forward, peak = (None if b is None else b / GB for b in measured)
    return [
        row.dtype,
        row.config,
        row.error or show("{:.1f}", row.ms_median),
        show("{:.1f} to {:.1f}", row.ms_p10, row.ms_p90),
        show("{:+.1f} %", overhead),
        show("{:.2f}", undrained),
        show("{:.2f}", after_forward),
        show("{:.2f}", peak),
        show("{:.6g}", row.gradient_norm),
        show("{:.1e}", row.norm_difference),
        "-" if row.error else row.gradients,
    ]


def print_row(row: Row) -> None:
    print(f"| {' | '.join(cells(row))} |", flush=True)


def print_header() -> None:
    print(f"| {' | '.join(COLUMNS)} |")
    print("|" + "---|" * len(COLUMNS), flush=True)


class Results:
    """Rows so far. The file is replaced whole after each, so that a run that is cut off keeps what it has."""

    def __init__(self, out: Path | None, about: dict[str, Any]) -> None:
        self.out, self.about = out, about
        self.rows: list[Row] = []
        self.write()
        print_header()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print_row(row)
        self.write()

    def write(self) -> None:
        if self.out is None:
            return
        self.out.parent.mkdir(parents=True, exist_ok=True)
        part = self.out.with_name(self.out.name + ".part")
        part.write_text(json.dumps({**self.about, "rows": [asdict(row) for row in self.rows]}, indent=1) + "\n")
        part.replace(self.out)
