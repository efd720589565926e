"""Prints tables of docs/benchmarks.md and docs/planning.md from what `./dev bench model` measured:

  python -m bench.model.tables runs FILE...     each run: its time, beside the resident run of the same shape and batch
  python -m bench.model.tables budgets FILE...  shapes and batches, by what the runs may take: the budgets, or no bound
  python -m bench.model.tables plans FILE...    what plans have predicted, and what was measured
"""

import sys

from bench import tables

GB = tables.GB
GIB = 2**30
MS_PER_S = 1e3
UPDATES = {"backward": "updates in backward", "next_use": "updates at the next use", "step": "updates in step"}


def load(paths):
    """The runs that did not run out of memory."""
    return [row for path in paths for row in tables.load(path) if "error" not in row]


def parameters(row):
    return f"{row['parameters'] / 1e9:.2f} billion"


def tokens(row):
    return f"{row['batch'] * row['sequence']:,}"


def model_of(row):
    """What a run trains, with which others are compared."""
    return row["device"], row["dtype"], row["shape"], row["layers"], row["batch"], row["sequence"]


def configuration(row):
    if row["config"] == "resident":
        return "resident"
    if row["budget_bytes"]:
        parts = [f"a budget of {gb(row['budget_bytes'])}"]
    else:
        parts = [f"managed within {gb(row['managed_bound_bytes'])}"]
    if row["resident_bytes"]:
        parts.append(f"{row['resident_bytes'] / GB:.0f} GB kept on the GPU besides")
    if "states" in row["home"]:
        parts.append(UPDATES[row["update"]] + (" on the CPU" if row["update_on"] == "cpu" else ""))
    else:
        parts.append("gradients and states resident")
    if row["cap_bytes"]:
        parts.append(f"a cap of {gb(row['cap_bytes'])}")
    return ", ".join(parts)


def print_runs(rows):
    resident = {model_of(row): row["ms_mean"] for row in rows if row["config"] == "resident"}

    def line(row):
        beside = resident.get(model_of(row))
        is_other = beside is not None and row["config"] != "resident"
        return (
            parameters(row),
            tokens(row),
            configuration(row),
            f"{row['ms_mean'] / MS_PER_S:.3f}",
            percent(row["ms_mean"] / beside - 1) if is_other else "–",
            f"{row['peak_bytes'] / GB:.1f}",
            f"{row['taken_bytes'] / GB:.1f}",
            f"{row['pool_bytes'] / GIB:.1f}",
            f"{row['tokens_per_s']:,.0f}",
        )

    columns = ("parameters", "tokens a step", "configuration", "s/step", "over resident", "peak GB", "taken GB")
    tables.print_table((*columns, "host GiB", "tokens/s"), map(line, rows))


def budget(row):
    """In bytes; 0 where all is on the device."""
    return row["budget_bytes"] if row["config"] == "managed" else 0


def gb(bytes_):
    return f"{bytes_ / GB:g} GB"


def percent(fraction):
    """With a decimal below ten percent alone: runs on other machines of a kind differ by several percent."""
    return f"{100 * fraction:+.{1 if abs(fraction) < 0.1 else 0}f} %"


def print_budgets(rows):
    rows = [row for row in rows if row["config"] == "resident" or row["budget_bytes"]]
    cells = {(model_of(row), budget(row)): row for row in rows}
    budgets = sorted({bytes_ for _, bytes_ in cells if bytes_}, reverse=True)
    models = sorted({model_of(row): row for row in rows}.values(), key=lambda row: (row["parameters"], row["batch"]))

    def cell(row):
        if row is None:
            return "–"
        missed = "" if row["config"] == "resident" or row["plan"]["fits"] else " (the plan does not fit)"
        return f"{row['ms_mean'] / MS_PER_S:.3f}, {row['peak_bytes'] / GB:.1f}, {row['tokens_per_s']:,.0f}{missed}"

    lines = (
        (parameters(row), tokens(row), *(cell(cells.get((model_of(row), bytes_))) for bytes_ in (0, *budgets)))
        for row in models
    )
    names = (f"ebb within {gb(bytes_)}" for bytes_ in budgets)
    tables.print_table(("parameters", "tokens a step", "resident", *names), lines)


def print_plans(rows):
    def line(row):
        plan = row["plan"]
        steps = len(row["losses"]) - len(row["warm_up_ms"])
        counted = (row["prefetched_bytes"] + row["fetched_late_bytes"]) / steps
        holds_all = plan["managed_bytes"] >= row["managed_bytes"]
        return (
            gb(row["budget_bytes"]),
            parameters(row),
            tokens(row),
            "all" if holds_all else f"{plan['managed_bytes'] / GB:.2f} GB",
            f"{plan['predicted_ms']:,.0f}",
            f"{row['ms_mean']:,.0f}",
            f"{100 * (row['ms_mean'] / plan['predicted_ms'] - 1):+.1f} %",
            f"{row['peak_bytes'] / GB:.2f}",
            f"{plan['managed_in_bytes'] / GB:.1f}, {counted / GB:.1f}",
        )

    columns = ("budget", "parameters", "tokens a step", "bound of managed storages", "predicted ms", "measured ms")
    more = ("off by", "peak, GB", "to the device in a step: predicted, counted, GB")
    tables.print_table((*columns, *more), (line(row) for row in rows if row.get("plan") and row["plan"]["fits"]))


TABLES = {"runs": print_runs, "budgets": print_budgets, "plans": print_plans}


def main():
    if len(sys.argv) < 3 or sys.argv[1] not in TABLES:
        sys.exit(__doc__)
    TABLES[sys.argv[1]](load(sys.argv[2:]))


if __name__ == "__main__":
    main()
