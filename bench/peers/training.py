"""Question: what does a step of whole training (forward, backward, AdamW) cost where weights, gradients and states do
not fit on the GPU, with ebb and with what a user would pick instead, for one Llama with the same weights and tokens?

From the repository's root: python -m bench.peers.training --shape 1b --batch 8 --out training.json. A package that is
missing, or memory that does not suffice, costs its row only. ebb's package and torchao must be importable.

"resident" has all of it on the GPU: bfloat16 weights, ebb.AdamW's float32 masters and moments. "ebb" manages all of it
(Offloader.manage) and updates in backward, "ebb_step" in step. "torchao" is its CPUOffloadOptimizer on float32 weights,
which stay on the GPU, with autocast to bfloat16; "torchao_bfloat16" has no masters, which is cheaper and inexact.
"fsdp2" is fully_shard with CPUOffloadPolicy on one GPU. "cpu" is the resident program on the processor, one step of it.

Every block is checkpointed, and the head takes 4096 tokens at a time. Each configuration has a process of its own. A
step's time is the mean of the timed ones: the host's, from one synchronisation of the device to another with all copies
done, each loss read in between. The peak is what torch's allocator has handed out in the timed steps, and "taken" what
it has from the GPU at the end. "Process" is the resident memory of the process at the end, in which pinned memory need
not be counted, "host" by how much the machine's available memory had fallen at the most, and "pool" what ebb has
reserved for homes and inputs. A row ends when the machine has nearly no memory left.

The exit status is 1 if an ebb row has no figures or, on a CPU, not the losses of the other rows of its arithmetic, bit
for bit."""

import argparse
import json
import multiprocessing
import os
import sys
import threading
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from . import measure, training_configurations
from .options import Options, full_device_name, parse_bytes, positive
from .process import NotMeasured, contexts, in_new_process
from .results import GB, show
from .training_configurations import CONFIGURATIONS, NOTES, SAME_BITS, TrainingOptions, proc_bytes, shapes

LEAST_HOST_BYTES = 2 * 10**9  # with less the system would end some process, perhaps not the row's
LOOK_S = 0.05
COLUMNS = (
    "configuration",
    "parameters",
    "tokens a step",
    "s/step",
    "tokens/s",
    "peak GB",
    "taken GB",
    "process GB",
    "host GB",
    "pool GB",
    "loss, first and last",
    "note",
)


@dataclass(frozen=True)
class Row:
    """One configuration. What is None was not measured."""

    config: str
    note: str = ""
    error: str | None = None  # why nothing was measured
    parameters: int | None = None
    tokens_per_step: int | None = None
    s_per_step: float | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None  # on the GPU, handed out in the timed steps
    reserved_bytes: int | None = None  # on the GPU, at the end
    rss_bytes: int | None = None  # of the process, at the end
    host_bytes: int | None = None  # by how much the machine's available memory had fallen at the most
    pool_bytes: int | None = None  # ebb's homes and inputs
    losses: list[float] | None = None  # of all steps, those before timing too


def table_line(row: Row) -> str:
    memory = (row.peak_bytes, row.reserved_bytes, row.rss_bytes, row.host_bytes, row.pool_bytes)
    ends = (None,) if not row.losses else (row.losses[0], row.losses[-1])
    cells = [
        row.config,
        show("{:,}", row.parameters),
        show("{:,}", row.tokens_per_step),
        show("{:.3f}", row.s_per_step),
        show("{:,.0f}", row.tokens_per_s),
        *(show("{:.2f}", None if bytes_ is None else bytes_ / GB) for bytes_ in memory),
        show("{:.4f}, {:.4f}", *ends),
        row.error or row.note or "-",
    ]
    return f"| {' | '.join(cells)} |"


def print_table(rows: list[Row]) -> None:
    print(f"| {' | '.join(COLUMNS)} |")
    print("|" + "---|" * len(COLUMNS))
    for row in rows:
        print(table_line(row), flush=True)


class HostMemoryWatch:
    """Within `with`: what a measurement takes of the machine's memory. Ends its process where too little is left."""

    def __enter__(self) -> Self:
        self._before = self._least = proc_bytes("/proc/meminfo", "MemAvailable")
        self.is_full = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def taken_bytes(self) -> int:
        return self._before - self._least

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self._least = min(self._least, proc_bytes("/proc/meminfo", "MemAvailable"))
            if self._least < LEAST_HOST_BYTES:
                self.is_full = True
                for child in multiprocessing.active_children():
                    child.kill()


def measure_row(options: TrainingOptions, config: str) -> Row:
    row = Row(config, NOTES.get(config, ""))
    with HostMemoryWatch() as host:
        try:
            measured = in_new_process(training_configurations.measure, options, config)
        except NotMeasured as reason:
            error = str(reason)
            if host.is_full:
                error = f"out of host memory: {host.taken_bytes / GB:.1f} GB were taken, and next to nothing was left"
            return replace(row, error=error)
    return replace(row, **measured, host_bytes=host.taken_bytes)


def write(out: Path | None, about: dict[str, Any], rows: list[Row]) -> None:
    """The file is replaced whole, so that a run that is cut off keeps what it has."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    part.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    part.replace(out)


def errors(options: TrainingOptions, rows: list[Row]) -> list[str]:
    of_ebb = [row for row in rows if row.config in SAME_BITS]
    found = [f"{row.config}: {row.error}" for row in of_ebb if row.error and row.config != "resident"]
    if options.device == "cpu" and len({tuple(row.losses) for row in of_ebb if row.losses}) > 1:
        found.append(f"the losses of {', '.join(row.config for row in of_ebb)} differ")
    return found


def print_files(paths: list[Path]) -> None:
    print_table([Row(**row) for path in paths for row in json.loads(path.read_text())["rows"]])


def parse_options() -> TrainingOptions:
    """Ends the program where it is to print files."""
    parser = argparse.ArgumentParser(
        prog="training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(**{field.name: field.default for field in fields(TrainingOptions)})
    parser.add_argument("--shape", choices=shapes(1, 1))
    parser.add_argument("--batch", type=positive)
    parser.add_argument("--sequence", type=positive, help="tokens of each of the batch; default: 1024")
    parser.add_argument("--configs", nargs="+", choices=CONFIGURATIONS, help="measured in this order; default: all")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--warm-up", type=positive, help="steps before timing; default: 3")
    parser.add_argument("--steps", type=positive, help="timed steps; default: 5")
    parser.add_argument("--cap", type=parse_bytes, help="the most memory that torch may take from the GPU")
    parser.add_argument("--managed", type=parse_bytes, help="ebb's device_bytes; default: 6GB")
    parser.add_argument("--resident", type=parse_bytes, help="ebb's resident_bytes; default: 0")
    parser.add_argument("--minimum", type=parse_bytes, help="smaller tensors do not move with ebb; default: 1MiB")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results here as JSON")
    parser.add_argument("--print", nargs="+", type=Path, metavar="FILE", help="print what the files have, and end")
    arguments = vars(parser.parse_args())
    if (paths := arguments.pop("print")) is not None:
        print_files(paths)
        sys.exit()
    options = TrainingOptions(**arguments)
    return replace(options, device=full_device_name(options.device))


def main() -> int:
    options = parse_options()
    # Not what the other benchmark's processes share: transformers, which imports torchao, takes long.
    contexts[-1].set_forkserver_preload([training_configurations.__name__])
    try:
        machine = in_new_process(measure.describe_machine, Options(device=options.device))
    except NotMeasured as reason:
        sys.exit(f"training: error: {options.device}: {reason}")
    machine |= {"cores": os.cpu_count(), "host_bytes": proc_bytes("/proc/meminfo", "MemTotal")}
    about = {
        "machine": machine,
        "shape": {"name": options.shape, **asdict(options.sizes())},
        "warm_up": options.warm_up,
        "steps": options.steps,
        "cap_bytes": options.cap,
        "managed_device_bytes": options.managed,
        "managed_resident_bytes": options.resident,
        "minimum_bytes": options.minimum,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    }
    rows: list[Row] = []
    write(options.out, about, rows)
    for config in options.configs:
        rows.append(measure_row(options, config))
        print(table_line(rows[-1]), file=sys.stderr, flush=True)  # the table comes at the end
        write(options.out, about, rows)
    print_table(rows)
    found = errors(options, rows)
    for error in found:
        print(f"training: error: {error}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
