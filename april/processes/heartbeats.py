"""Detects peers that have been silent for too long."""

from __future__ import annotations

BEATS_PER_DEADLINE = 4


class Heartbeats:
    """Detects which peers, each sending a heartbeat every ``interval_s``, have been silent for ``deadline_s``.

    Methods take the current time. A pause of this process itself does not make its peers count as silent.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.interval_s = deadline_s / BEATS_PER_DEADLINE
        self._last_beat_s: dict[int, float] = {}
        self._last_check_s: float | None = None

    def note_beat(self, peer: int, now: float) -> None:
        """Note that a heartbeat of this peer has arrived."""
        self._last_beat_s[peer] = now

    def forget(self, peer: int) -> None:
        """Stop expecting heartbeats from a peer."""
        self._last_beat_s.pop(peer, None)

    def silent_peers(self, now: float) -> list[int]:
        """Return the peers that were silent for too long; after a pause of this process, all deadlines start again."""
        was_stopped = self._last_check_s is not None and now - self._last_check_s > self.deadline_s / 2
        self._last_check_s = now
        if was_stopped:  # heartbeats that arrived in the meantime have not been read yet
            self._last_beat_s = dict.fromkeys(self._last_beat_s, now)
        return [peer for peer, beat_s in self._last_beat_s.items() if now - beat_s >= self.deadline_s]
