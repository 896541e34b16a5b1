"""Metrics pages of running services: fetched, parsed, and what happened between two of them."""

from __future__ import annotations

import http.client
import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families

Labels: TypeAlias = frozenset[tuple[str, str]]
Samples: TypeAlias = Mapping[tuple[str, Labels], float]

LOCAL_PAGES = ("127.0.0.1:9464", "127.0.0.1:9465", "127.0.0.1:9466")
"""Where `paceline up` has the pages of coordinator, draft worker and target worker, if it can."""

# Far more than a page of ours, which has some 20 kB.
_MOST_BYTES = 4 << 20
# Its own addresses are what a person gives: no proxy stands between.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class PageError(Exception):
    """There is no page of a Paceline service there; the message says why, in a few words."""


@dataclass(frozen=True)
class Page:
    """What a service said of itself at a time.

    Attributes:
        samples: Values by name and labels.
        read_s: When it was read, on the monotonic clock.
        service: `paceline-coordinator`, `paceline-draft-worker`, `paceline-target-worker`, or what
            OTEL_SERVICE_NAME has in their place.
        instance: Its name.
    """

    samples: Samples
    read_s: float
    service: str
    instance: str

    def value(self, name: str, **labels: str) -> float | None:
        """Return a gauge, summed over the labels that are not given; None where it has none."""
        wanted = labels.items()
        return _sum(value for (n, has), value in self.samples.items() if n == name and has >= wanted)

    @property
    def is_coordinators(self) -> bool:
        """Whether it is a coordinator's."""
        return self.value("paceline_requests_running") is not None

    @property
    def started(self) -> float | None:
        """When its process began, in seconds of the epoch; None where the system does not say."""
        return self.value("process_start_time_seconds")


def read_page(address: str, timeout_s: float) -> Page:
    """Fetch and parse a page.

    Args:
        address: HOST:PORT, or a URL.
        timeout_s: Most time that any step of the fetch takes.

    Raises:
        PageError: Nobody answers, or not with a page of a Paceline service.
    """
    url = address if "://" in address else f"http://{address}/metrics"
    try:
        with _opener.open(url, timeout=timeout_s) as response:
            text = response.read(_MOST_BYTES).decode("utf-8", "replace")
        return parse_page(text, time.monotonic())
    except urllib.error.HTTPError as error:
        raise PageError(f"HTTP {error.code}") from None
    except urllib.error.URLError as error:
        reason = error.reason
        raise PageError((reason.strerror if isinstance(reason, OSError) else None) or str(reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise PageError(str(error) or type(error).__name__) from None


def parse_page(text: str, read_s: float) -> Page:
    """Parse a page.

    Raises:
        PageError: It is none, or not of a Paceline service.
    """
    try:
        found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:
        raise PageError("answers, but not with metrics") from None
    info = next((sample.labels for sample in found if sample.name == "target_info"), {})
    service = info.get("service_name", "")
    samples = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}
    if not service.startswith("paceline-") and not any(name.startswith("paceline_") for name, _ in samples):
        raise PageError("answers, but is no Paceline service")
    return Page(samples, read_s, service, info.get("service_instance_id", ""))


class Window:
    """What services did between two pages of each, summed over them."""

    def __init__(self, pages: Sequence[tuple[Page, Page]]) -> None:
        """Look at some pods.

        Args:
            pages: Of each pod, an earlier and a later one.
        """
        self._pages = pages

    def gauge(self, name: str, **labels: str) -> float | None:
        """Return a gauge of the later pages; None where there is none."""
        return _sum(after.value(name, **labels) for _, after in self._pages)

    def grown(self, name: str, **labels: str) -> float | None:
        """Return by what counters grew, summed over the labels that are not given; None where there are none."""
        return _sum(_grown(before, after, name, labels) for before, after in self._pages)

    def rate(self, name: str, **labels: str) -> float | None:
        """Return by what counters grew in a second; None where there are none, or no time has passed."""
        return _sum(
            grown / elapsed_s
            for before, after in self._pages
            if (grown := _grown(before, after, name, labels)) is not None
            and (elapsed_s := after.read_s - before.read_s) > 0
        )

    def ratio(self, part: str, whole: str, **labels: str) -> float | None:
        """Return the growth of one counter over that of another; None where that has not grown."""
        above, below = self.grown(part, **labels), self.grown(whole, **labels)
        return None if above is None or not below else above / below

    def quantile(self, q: float, name: str, **labels: str) -> float | None:
        """Return a quantile of what a histogram took in, straight within a bucket, as Prometheus has it."""
        limits = {has["le"] for _, after in self._pages for n, ls in after.samples if n == name and (has := dict(ls))}
        counts = {float(limit): self.grown(name, **labels, le=limit) or 0.0 for limit in limits}
        total = counts.get(math.inf, 0.0)
        if not total:
            return None
        low, under = 0.0, 0.0
        for limit, count in sorted(counts.items()):
            if count >= q * total:
                # Beyond the last limit nothing is known but that.
                return low if limit == math.inf else low + (limit - low) * (q * total - under) / (count - under)
            low, under = limit, count
        return None


def _grown(before: Page, after: Page, name: str, labels: Mapping[str, str]) -> float | None:
    """Return by what a pod's counters grew.

    One that has gone back, or whose process is another one, counts from zero.
    """
    wanted = labels.items()
    then = before.samples if before.started == after.started else {}
    return _sum(
        value - earlier if value >= (earlier := then.get(key, 0.0)) else value
        for key, value in after.samples.items()
        if key[0] == name and key[1] >= wanted
    )


def _sum(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) if found else None
