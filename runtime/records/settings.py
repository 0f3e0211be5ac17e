"""The configuration in force, and what it leaves to an agent's own limits."""

from __future__ import annotations

from typing import Final

from runtime.records.config import Config
from runtime.records.model import Agent
from runtime.texts.names import parse_duration, parse_size

#: seconds of grace of what another machine leads, at most: its lead counts with that
PLACED_GRACE: Final = 10.0


class Settings:
    """Holds the configuration, which a reload replaces."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def grace(self, agent: Agent) -> float:
        """Seconds between SIGTERM and SIGKILL."""
        text = agent.limits.get("grace")
        grace = parse_duration(text) if text else self.config.grace
        return min(grace, PLACED_GRACE) if agent.peer else grace

    def timeout(self, agent: Agent) -> float | None:
        """Seconds that a run of it may take, None for any number."""
        text = agent.limits.get("timeout")
        return parse_duration(text) if text else self.config.timeout

    def log_max(self, agent: Agent) -> int:
        """Bytes that are kept of what its programs print."""
        text = agent.limits.get("log_max")
        return parse_size(text) if text else self.config.log_max
