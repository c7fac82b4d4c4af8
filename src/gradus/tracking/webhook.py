"""Posts what a person should hear of a run to one address: alarms, and how the run ended."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Sequence

from gradus.errors import ConfigError
from gradus.run.records import Record
from gradus.tracking.base import EpisodeRow, RunOutcome, TrackedRun

_SECONDS = 30.0


class Webhook:
    """Owns an address that takes JSON. What it does not take now is sent again later."""

    def __init__(self, *, url_var: str, key: str) -> None:
        self._url = os.environ.get(url_var, "")
        self._key = key
        self._name = ""
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"{url_var} holds no address that begins with http:// or https://")

    def open(self, run: TrackedRun) -> None:
        self._name = run.name

    def log(self, record: Record) -> None:
        """No numbers are sent."""

    def log_episodes(self, step: int, rows: Sequence[EpisodeRow]) -> None:
        """No texts are sent."""

    def alert(self, title: str, text: str, step: int) -> None:
        del title, step  # They stand in the text.
        self._post(f"{self._name}: {text}")

    def flush(self) -> None:
        """Each line was taken, or raised an error."""

    def close(self, outcome: RunOutcome) -> None:
        if outcome != "unknown":
            self._post(f"{self._name}: {outcome}")

    def _post(self, line: str) -> None:
        body = json.dumps({self._key: line}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            answer.read(1 << 10)
