"""The lease of a service: its heartbeat interval, and the silence after which other services take over its work."""

from __future__ import annotations

from dataclasses import dataclass

_BEAT_SECONDS = 5.0
#: Heartbeats per lease: several may be late or lost.
_BEATS = 6


@dataclass(frozen=True, slots=True)
class ServiceLease:
    """The lease of a service's session.

    Attributes:
        seconds: How long a session may stay without a heartbeat.
    """

    seconds: float = 30.0

    @property
    def beat_seconds(self) -> float:
        """The interval of heartbeats.

        Example:
            >>> ServiceLease(30.0).beat_seconds, ServiceLease(3.0).beat_seconds
            (5.0, 0.5)
        """
        return min(_BEAT_SECONDS, self.seconds / _BEATS)
