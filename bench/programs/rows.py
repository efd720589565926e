"""The rows of a result file. Without torch, for the tables."""

from typing import Any

PLANNED = "plan"
Row = dict[str, Any]


def measured(rows: list[Row]) -> list[Row]:
    return [row for row in rows if not row["error"] and row["peak_bytes"] is not None]


def best_other(plan: Row, rows: list[Row]) -> Row | None:
    """The fastest of what is no plan and fits into the plan's budget, too."""
    others = [row for row in rows if row["budget_bytes"] is None and row["peak_bytes"] <= plan["budget_bytes"]]
    return min(others, key=lambda row: row["ms_median"], default=None)
