"""Question: under a budget, is ebb as fast as the best that one could do by hand in that memory, for programs that
nobody has annotated?

From the repository's root: ./dev bench plan --programs, or python -m bench.programs --out programs.json. Each program
(bench/programs/programs.py) has one process, in which its configurations follow each other on the same weights, plain
autograd first and last. Of a step, which is forward, backward and the optimizer's if the program has one, the time is
the host's between synchronisations, and the peak is that of torch's allocator.

"plan" has ebb.wrap(model, device_budget=...) and no word more, at --budgets sizes from the least that a plan can do with
to all. "plan and manage" has offloader.manage(model), too, and "manage and checkpoint" is the same by hand.
Gradients are compared bit by bit with plain autograd's, by a sum over all their bits, in deterministic mode.

The steps of "lengths" differ: its ms_median is their mean, over the same lengths in each configuration.

A row is {program, config, budget_bytes, ms_median, peak_bytes, gradients}; budget_bytes is null for what is no plan.
A plan's row has what was predicted, too: predicted_ms is of forward and backward alone."""

import argparse
import json
import sys
from pathlib import Path

from bench.peers import measure
from bench.peers.options import Options, full_device_name, parse_bytes
from bench.peers.process import NotMeasured, in_new_process

from . import configurations
from .programs import PROGRAMS
from .rows import Row, best_other, measured
from .run import run_program, text_of

NEAR = 1.01


def behind(rows: list[Row]) -> list[str]:
    """Where a plan takes longer than something that fits into its budget, too."""
    found = []
    for plan in (row for row in measured(rows) if row["budget_bytes"] is not None):
        best = best_other(plan, measured(rows))
        if best is not None and plan["ms_median"] > NEAR * best["ms_median"]:
            more = 100 * (plan["ms_median"] / best["ms_median"] - 1)
            found.append(f"{text_of(plan)}: {more:.1f} % over {best['config']} ({best['ms_median']:.1f} ms)")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; default: all")
    parser.add_argument("--configs", nargs="*", choices=configurations.BY_HAND, help="by hand; default: all")
    parser.add_argument("--budgets", type=int, default=8, help="how many, from the least to all; default: 8")
    parser.add_argument("--within", nargs="+", type=parse_bytes, help="these budgets instead")
    parser.add_argument("--within-managed", nargs="*", type=parse_bytes, default=[], help="of plans that manage, too")
    parser.add_argument("--managed", nargs="*", type=parse_bytes, default=[], help="by hand: manage()'s device_bytes")
    parser.add_argument("--warm-up", type=int, default=12, help="steps before timing, of plans; default: 12")
    parser.add_argument("--steps", type=int, default=5, help="timed steps; default: 5")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--explain", action="store_true", help="put each plan's explanation into the file")
    parser.add_argument("--records", action="store_true", help="put into the file what each plan is made from")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results here as JSON")
    flags = parser.parse_args()
    flags.programs = flags.programs or list(PROGRAMS)
    if unknown := set(flags.programs) - set(PROGRAMS):
        parser.error(f"no program: {', '.join(sorted(unknown))}")
    flags.device = full_device_name(flags.device)
    return flags


def main() -> int:
    flags = parse()
    try:
        machine = in_new_process(measure.describe_machine, Options(device=flags.device))
    except NotMeasured as reason:
        sys.exit(f"programs: error: {flags.device}: {reason}")
    rows: list[Row] = []
    for name in flags.programs:
        try:
            rows += in_new_process(run_program, flags, name)
        except NotMeasured as reason:
            rows.append({"program": name, "config": "all", "budget_bytes": None, "error": str(reason)})
            print(text_of(rows[-1]), file=sys.stderr)
        if flags.out is not None:
            flags.out.parent.mkdir(parents=True, exist_ok=True)
            about = {"machine": machine, "warm_up": flags.warm_up, "steps": flags.steps, "rows": rows}
            flags.out.write_text(json.dumps(about, indent=1) + "\n")
    for line in (line for name in flags.programs for line in behind([row for row in rows if row["program"] == name])):
        print(f"behind: {line}")
    wrong = [row for row in rows if row.get("gradients") == "DIFFERENT" and row["budget_bytes"] is not None]
    for row in wrong:
        print(f"programs: error: gradients differ: {text_of(row)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
