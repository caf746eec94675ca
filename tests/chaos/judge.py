"""Accounts for every call of a run: what became of it, and whether that was right.

A call may fail only if something on its way was broken for long enough, and only with the
error that fits.  What it is judged by is what the docs promise:

- it ends by its deadline, the time that its own process was stopped not counted;
- it runs at most once; if it succeeded, exactly once;
- it ends with WorkerLostError only if one of its processes was killed, ended, cut off for about
  the grace period or silent for about the heartbeat time-out;
- it times out only if what was broken on its way took a good part of its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tests.chaos.records import Call, Fault

#: Seconds that a call may end after its deadline: threads of a loaded machine are late.
SLACK = 2.0
#: Seconds after a fault was mended in which its consequences may last: connections are made
#: again after up to 2 s, and peers that a restarted broker does not know say HELLO each second.
RECOVERY = 2.5
#: Kinds of fault that a peer's end follows from.
ENDINGS = frozenset({"kill", "terminate"})
#: Seconds of a cut link after which its peer may be given up: the broker's grace period begins
#: when it notices, but a peer tries to connect again ever more seldom.
CUT_SECONDS = 0.4
#: Kinds of fault that only slow things down.
SLOWING = frozenset({"delay", "fragment"})
#: What a call whose worker is gone may raise.
LOST = frozenset({"WorkerLostError", "OwnerLostError", "WorkerNotFoundError"})
#: What follows for calls that use what an earlier call has left at a worker, if it was lost.
STATEFUL = {
    "method": frozenset({"RRefError", *LOST}),
    "fetch": frozenset({"RRefError", *LOST}),
    "backward": frozenset({"GraphLostError", *LOST}),
}
#: Kinds of call that leave no line in the ledger.
WITHOUT_LEDGER = frozenset({"fetch", "backward"})


class Judge:
    """Judges calls by the faults of the run.

    Args:
        faults: What was broken, and when.
        executed: How often each call has run.
        heartbeat_timeout: Seconds of silence after which a peer is given up.
    """

    def __init__(
        self,
        faults: Iterable[Fault],
        executed: Mapping[str, int],
        heartbeat_timeout: float,
    ) -> None:
        self._faults = sorted(faults, key=lambda fault: fault.start)
        self._executed = executed
        self._timeout = heartbeat_timeout

    def complaints(self, calls: Iterable[Call]) -> list[str]:
        """Returns a sentence for each promise that was not kept."""
        return [f"{_describe(call)}: {what}" for call in calls for what in self._judge(call)]

    def _judge(self, call: Call) -> list[str]:
        wrong = []
        runs = self._executed.get(call.id, 0)
        if runs > 1:
            wrong.append(f"ran {runs} times")
        if call.end is None:
            if not any(f.kind == "kill" and f.target == call.client for f in self._during(call)):
                wrong.append("never ended, though its client lived")
            return wrong
        late = self._late(call)
        if late > SLACK:
            wrong.append(f"ended {late:.1f} s after its deadline of {call.timeout} s")
        if call.outcome == "ok":
            if runs != 1 and call.kind not in WITHOUT_LEDGER and not self._is_remote(call):
                wrong.append(f"succeeded, but ran {runs} times")
        else:
            wrong += self._wrong_error(call)
        return wrong

    def _is_remote(self, call: Call) -> bool:
        return call.kind == "remote"  # has ended when the request was sent

    def _wrong_error(self, call: Call) -> list[str]:
        allowed = LOST | STATEFUL.get(call.kind, frozenset())
        if call.outcome == "RpcTimeoutError":
            blocked = self._blocked(call)
            if call.kind == "final":
                return ["timed out when all was mended"]
            if blocked < 0.2 * (call.timeout or 10.0):
                return [f"timed out, though its way was broken for {blocked:.2f} s only"]
            return []
        if call.outcome in allowed:
            return [] if self._was_lost(call) else [f"nobody was lost: {call.text}"]
        return [f"raised what it must not: {call.text}"]

    def _late(self, call: Call) -> float:
        """Returns how long after its deadline a call ended, its process being awake."""
        if not call.timeout or call.end is None:
            return 0.0
        deadline = call.start + call.timeout
        asleep = sum(
            max(0.0, min(call.end, fault.end) - max(call.start, fault.start))
            for fault in self._faults
            if fault.kind == "stop" and fault.target == call.client
        )
        return call.end - deadline - asleep

    def _during(self, call: Call, before: float = RECOVERY) -> list[Fault]:
        """Returns the faults on a call's way that may have touched it."""
        end = float("inf") if call.end is None else call.end
        way = {call.client, "broker", *call.workers}
        return [
            f
            for f in self._faults
            if f.target in way and f.start <= end and f.end + before >= call.start
        ]

    def _blocked(self, call: Call) -> float:
        """Returns for how much of its time a call's way was broken."""
        assert call.end is not None
        blocked, until = 0.0, call.start
        for fault in self._during(call):
            begin = max(until, fault.start)
            end = min(call.end, fault.end + RECOVERY)
            if end > begin:
                blocked += end - begin
                until = end
        return blocked

    def _was_lost(self, call: Call) -> bool:
        """Returns whether one of a call's processes had reason to be given up."""
        # What a call uses may have been lost since it was made, a while ago.
        before = 60.0 if call.kind in STATEFUL else 4.0 * self._timeout
        peers = {call.client, *call.workers}
        if call.outcome == "WorkerNotFoundError":  # a new broker learns of its peers one by one
            peers.add("broker")
        for fault in self._during(call, before):
            if fault.target in peers and fault.kind in ENDINGS:
                return True
            if fault.kind in SLOWING:
                continue
            # Faults that follow each other add up: count with what came shortly before.
            enough = CUT_SECONDS if fault.kind == "cut" else 0.7 * self._timeout
            if self._together(fault) >= enough:
                return True
        return False

    def _together(self, fault: Fault) -> float:
        """Returns how long a fault lasted, with those of its target that adjoin it."""
        start, end = fault.start, fault.end
        for other in self._faults:
            if other.kind in SLOWING or other.target not in (fault.target, "broker"):
                continue
            if other.start <= end + 1.0 and other.end + 1.0 >= start:
                start, end = min(start, other.start), max(end, other.end)
        return end - start


def _describe(call: Call) -> str:
    how = call.outcome or "no end"
    seconds = (call.end or call.start) - call.start
    return f"{call.id} ({call.kind} at {'+'.join(call.workers)}, {how} after {seconds:.2f} s)"


def outcomes(calls: Iterable[Call]) -> dict[str, Counter[str]]:
    """Returns how often calls of each kind ended in what way."""
    table: dict[str, Counter[str]] = {}
    for call in calls:
        how = "client died" if call.end is None else call.outcome
        table.setdefault(call.kind, Counter())[how] += 1
    return table
