"""Metrics in Prometheus' text format, written by hand: a dozen numbers need no dependency and no global registry."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from glasshouse.serve.runtime.exchange import Job

PREFIX = "glasshouse_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class HttpCount(NamedTuple):
    """What HTTP requests are counted by."""

    route: str
    method: str
    status: int


class Histogram:
    """Counts of durations, by upper bounds in seconds.

    >>> histogram = Histogram()
    >>> histogram.observe(0.004)
    >>> next(line for line in histogram.lines("wait_seconds", 'model="a"') if 'le="0.005"' in line)
    'glasshouse_wait_seconds_bucket{model="a",le="0.005"} 1'
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield the lines of the text format."""
        total = 0
        for bound, count in zip((*map(repr, SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{PREFIX}{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{PREFIX}{name}_sum{{{labels}}} {self._sum!r}"
        yield f"{PREFIX}{name}_count{{{labels}}} {total}"


class ModelMetrics:
    """What is measured of one model; written by the thread that steps, read by any."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.finish_reasons: Counter[str] = Counter()
        self.rules_fired: Counter[tuple[str, str]] = Counter()  # by the probe, and what the rule does
        self.time_to_first_token, self.time_per_output_token, self.request_duration = (Histogram() for _ in range(3))

    def finished(self, job: Job) -> None:
        """Count a finished job."""
        request, now = job.request, time.perf_counter()
        self.prompt_tokens += len(request.source or request.prompt)
        self.generation_tokens += len(request.ids)
        self.finish_reasons[str(request.finish_reason)] += 1
        self.rules_fired.update((one.rule.probe, one.rule.then) for one in request.firings)
        self.request_duration.observe(now - job.arrived)
        if job.first_token is not None:
            self.time_to_first_token.observe(job.first_token - job.arrived)
            if len(request.ids) > 1:
                self.time_per_output_token.observe((now - job.first_token) / (len(request.ids) - 1))


Sample = tuple[str, str, str, list[str]]  # name, type, help, lines


def exposition(samples: list[Sample]) -> str:
    """Return metrics as Prometheus reads them."""
    lines = []
    for name, kind, text, values in samples:
        lines += [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}", *values]
    return "\n".join(lines) + "\n"


def gauge(name: str, labels: Mapping[str, str], value: float) -> str:
    """Return the line of one number.

    >>> gauge("requests_running", {"model": "a"}, 2)
    'glasshouse_requests_running{model="a"} 2'
    """
    return f"{PREFIX}{name}{{{label_text(labels)}}} {value!r}"


def label_text(labels: Mapping[str, str]) -> str:
    r"""Return labels as the text format has them.

    >>> print(label_text({"model": 'a"b'}))
    model="a\"b"
    """
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in labels.items()
    }
    return ",".join(f'{name}="{value}"' for name, value in escaped.items())
