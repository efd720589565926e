"""A trace in the format that Chrome and Perfetto read."""

from collections.abc import Iterable
from typing import Any

Span = tuple[str, int, float, float, int, int]  # name, track, begin and end in microseconds, bytes, thread

_HOST = 0
_TRACKS = {1: "compute stream", 2: "lane out", 3: "lane in"}


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Complete events of the "Trace Event Format" (Chromium project); times start with the earliest span.

    Spans of a host thread nest, and share a row; of the others each takes the first row of its track that is free.
    """
    events: list[dict[str, Any]] = []
    names: dict[int, str] = {}
    ends: dict[int, list[float]] = {}
    start = None
    for name, track, begin, end, size, thread in sorted(spans, key=lambda span: span[2]):
        start = begin if start is None else start
        row = 1000 * track
        if track == _HOST:
            row += thread
            names[row] = f"host thread {thread}"
        else:
            rows = ends.setdefault(track, [])
            free = next((i for i, last in enumerate(rows) if last <= begin), len(rows))
            rows[free : free + 1] = [end]
            row += free
            names[row] = _TRACKS[track]
        events.append(
            {
                "name": name,
                "ph": "X",
                "ts": begin - start,
                "dur": end - begin,
                "pid": 1,
                "tid": row,
                "args": {"bytes": size},
            }
        )
    for row, name in sorted(names.items()):
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": row, "args": {"sort_index": row}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
