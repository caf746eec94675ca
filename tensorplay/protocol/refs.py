"""Counting of remote references: who holds what, without clock, socket or thread.

The *owner* of an object keeps, for each reference to it, a count per process; any other
process that has the reference is a *user* and remembers how often it has received it.

    owner sends to Q     counts[Q] += 1                       at the owner, nothing is sent
    P sends to Q         P tells the owner ADD(key, Q, 1)     and goes on holding its own
    Q drops its last     Q tells the owner RELEASE(key, n)    n: how often it has received it
    X leaves or dies     the owner forgets all counts of X

Rule 1: the owner keeps the object while any count is not zero.  A count can be negative for
a while, when Q's RELEASE overtakes P's ADD; nothing depends on which comes first.

Rule 2: a user that sent ADDs tells the owner of no RELEASE until the owner has acknowledged
them.  The process whose own count covers the newcomer is thus never the first to go.

Rule 3: a message lists its references as ``RefToken``s next to its payload.  The receiver
counts them when the message arrives (``receive``) and holds them until the payload has been
unpacked or thrown away (``settle``), so that nothing is lost in between.

Rule 4: a reference that P sends home to its owner is held by P until it is there.  Where P
cannot know when that is, it says ADD(key, P, 1) and marks the token ``counted``: the owner
takes that count back when the message arrives, or when P dies.

What errs is on the safe side: if P dies after its ADD(key, Q, 1) was delivered, but before the
message was, the object stays until Q leaves.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

#: Incarnations of departed peers that are remembered, so that late news of them is ignored.
DEPARTED_LIMIT = 1 << 14

Adds = list[tuple["RRefKey", int, int]]
Releases = list[tuple["RRefKey", int]]


class RRefKey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Name of a remote reference, unique for ever.

    Attributes:
        creator: Incarnation of the process that made it.
        number: Drawn by the creator.
    """

    creator: int
    number: int


class RefToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Says that a message contains a reference, however often.

    Attributes:
        key: The reference.
        owner: Incarnation of the process that has the object.
        counted: Only where the receiver is the owner: whether the sender has added to its
            own count for the time that the message is under way.
    """

    key: RRefKey
    owner: int
    counted: bool = False


class _Recent:
    """A set that forgets its oldest members beyond a limit."""

    def __init__(self) -> None:
        self._members: dict[int, None] = {}

    def __contains__(self, member: int) -> bool:
        return member in self._members

    def add(self, member: int) -> None:
        self._members[member] = None
        while len(self._members) > DEPARTED_LIMIT:
            del self._members[next(iter(self._members))]

    def discard(self, member: int) -> None:
        self._members.pop(member, None)


class OwnerTable:
    """The owner's counts.

    Args:
        me: Incarnation of this process.
    """

    def __init__(self, me: int) -> None:
        self.me = me
        self._counts: dict[RRefKey, dict[int, int]] = {}
        self._departed = _Recent()
        self._returned = _Recent()

    def __contains__(self, key: RRefKey) -> bool:
        return key in self._counts

    def __len__(self) -> int:
        return len(self._counts)

    def users(self) -> int:
        """Returns how many (reference, process) pairs have a count."""
        return sum(len(users) for users in self._counts.values())

    def is_departed(self, peer: int) -> bool:
        """Returns whether the process is known to have left."""
        return peer in self._departed

    def add(self, key: RRefKey, user: int, count: int = 1) -> bool:
        """Changes a count.

        Returns:
            Whether the reference lost its last count by it.
        """
        if user in self._departed:
            return False
        users = self._counts.setdefault(key, {})
        total = users.pop(user, 0) + count
        if total:
            users[user] = total
        if users:
            return False
        del self._counts[key]
        return True

    def apply(
        self,
        src: int,
        adds: Iterable[tuple[RRefKey, int, int]],
        releases: Iterable[tuple[RRefKey, int]],
    ) -> list[RRefKey]:
        """Takes over what a user reports.

        Returns:
            The references that have lost their last count.
        """
        touched: dict[RRefKey, None] = {}
        changes = [*adds, *((key, src, -count) for key, count in releases)]
        for key, user, count in changes:
            if key in self._counts or self.may_come(key):
                self.add(key, user, count)
                touched[key] = None
        return [key for key in touched if key not in self._counts]

    def leave(self, peer: int) -> list[RRefKey]:
        """Forgets the counts of a process that has left.

        Returns:
            The references that have lost their last count.
        """
        self._departed.add(peer)
        freed = []
        for key, users in list(self._counts.items()):
            if users.pop(peer, None) is not None and not users:
                del self._counts[key]
                freed.append(key)
        return freed

    def join(self, peer: int) -> None:
        """Takes note that a process which was thought dead is back."""
        if peer in self._departed:
            self._departed.discard(peer)
            self._returned.add(peer)

    def may_come(self, key: RRefKey, asker: int | None = None) -> bool:
        """Returns whether an unknown reference may be one whose creation is under way.

        A request to create can be overtaken by the news of it.  Everything else that is
        not known has been freed: its user had been thought dead.

        Args:
            key: The reference.
            asker: Who has asked for it, if anybody has.
        """
        creator = key.creator
        return not (
            creator == self.me
            or creator in self._departed
            or creator in self._returned
            or (asker is not None and asker in self._returned)
        )


class _Held(msgspec.Struct):
    """A user's record of a reference: how often received, how often in use here."""

    owner: int
    received: int = 0
    uses: int = 0


class _Owed(msgspec.Struct):
    """What is to be told to an owner."""

    adds: dict[tuple[RRefKey, int], int] = msgspec.field(default_factory=dict)
    releases: dict[RRefKey, int] = msgspec.field(default_factory=dict)
    unacknowledged: int = 0


class UserTable:
    """A user's holdings, and what it owes to the owners."""

    def __init__(self) -> None:
        self._held: dict[RRefKey, _Held] = {}
        self._owed: dict[int, _Owed] = {}
        self._departed = _Recent()

    def __contains__(self, key: RRefKey) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def settled(self) -> bool:
        """Whether no owner is owed anything, nor has an acknowledgement outstanding."""
        return not self._owed

    @property
    def due(self) -> bool:
        """Whether ``drain`` has something to send."""
        return any(
            owed.adds or (owed.releases and not owed.unacknowledged) for owed in self._owed.values()
        )

    def receive(self, key: RRefKey, owner: int) -> None:
        """Counts a reference that has come, or that was just made; one use of it begins."""
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held(owner)
        held.received += owner not in self._departed
        held.uses += 1

    def use(self, key: RRefKey) -> None:
        """Begins a further use of a reference that is held.

        Raises:
            KeyError: If it is not held.
        """
        self._held[key].uses += 1

    def drop(self, key: RRefKey) -> None:
        """Ends a use; with the last one the owner is owed a release."""
        held = self._held.get(key)
        if held is None:  # let go of by ``drop_all``
            return
        held.uses -= 1
        if held.uses:
            return
        del self._held[key]
        if held.received:
            releases = self._owed.setdefault(held.owner, _Owed()).releases
            releases[key] = releases.get(key, 0) + held.received

    def drop_all(self) -> None:
        """Ends every use at once; whoever ends one later finds nothing."""
        for key, held in list(self._held.items()):
            held.uses = 1
            self.drop(key)

    def announce(self, key: RRefKey, owner: int, user: int, count: int = 1) -> None:
        """Owes the owner the news that ``user`` is sent the reference, or is not after all."""
        if owner in self._departed:
            return
        adds = self._owed.setdefault(owner, _Owed()).adds
        total = adds.pop((key, user), 0) + count
        if total:
            adds[key, user] = total
        self._tidy(owner)

    def drain(self) -> list[tuple[int, Adds, Releases]]:
        """Returns what is to be sent now: owner, ADDs, RELEASEs.

        Each entry with ADDs must be followed by ``acknowledged``.
        """
        due = []
        for owner, owed in self._owed.items():
            releases: Releases = []
            if not owed.unacknowledged:
                releases = list(owed.releases.items())
                owed.releases.clear()
            adds = [(key, user, count) for (key, user), count in owed.adds.items()]
            owed.adds.clear()
            owed.unacknowledged += bool(adds)
            if adds or releases:
                due.append((owner, adds, releases))
        for owner in list(self._owed):
            self._tidy(owner)
        return due

    def acknowledged(self, owner: int) -> None:
        """The owner has taken over an entry of ``drain`` that had ADDs."""
        owed = self._owed.get(owner)
        if owed is not None:
            owed.unacknowledged = max(0, owed.unacknowledged - 1)
            self._tidy(owner)

    def leave(self, peer: int) -> None:
        """Owes nothing to a process that has left, whatever is still held of it."""
        self._departed.add(peer)
        self._owed.pop(peer, None)
        for held in self._held.values():
            if held.owner == peer:
                held.received = 0

    def join(self, peer: int) -> None:
        """Takes note that a process which was thought dead is back."""
        self._departed.discard(peer)

    def _tidy(self, owner: int) -> None:
        owed = self._owed[owner]
        if not (owed.adds or owed.releases or owed.unacknowledged):
            del self._owed[owner]


class RefCounts:
    """All counts of one process: as the owner of some references and the user of others.

    Args:
        me: Incarnation of this process.
    """

    def __init__(self, me: int) -> None:
        self.me = me
        self.owned = OwnerTable(me)
        self.used = UserTable()

    def expect(self, key: RRefKey, user: int) -> None:
        """Counts a reference that ``user`` has asked for; held until ``made``."""
        if user != self.me:
            self.owned.add(key, user)
        self.owned.add(key, self.me)

    def made(self, key: RRefKey) -> bool:
        """Ends the hold of ``expect``; returns whether the last count went with it."""
        return self.owned.add(key, self.me, -1)

    def export(self, key: RRefKey, owner: int, dst: int, *, kept: bool) -> RefToken:
        """Counts a reference that a message to ``dst`` will contain.

        Args:
            key: The reference.
            owner: Incarnation of its owner.
            dst: Incarnation of the receiver.
            kept: Whether the sender holds the reference until the receiver has it.
        """
        token = RefToken(key, owner, counted=dst == owner != self.me and not kept)
        self._change(token, dst, 1)
        return token

    def unexport(self, token: RefToken, dst: int) -> bool:
        """Takes back ``export`` for a message that was never sent.

        Returns:
            Whether the reference lost its last count by it.
        """
        return self._change(token, dst, -1)

    def receive(self, token: RefToken, src: int) -> None:
        """Counts a reference that a message from ``src`` contains, and holds it."""
        if src == self.me:
            return  # held since the export
        if token.owner != self.me:
            self.used.receive(token.key, token.owner)
        else:
            self.owned.add(token.key, self.me)
            if token.counted:
                self.owned.add(token.key, src, -1)

    def settle(self, token: RefToken) -> bool:
        """Ends the hold of ``receive``.

        Returns:
            Whether this process owned the reference and it lost its last count by it.
        """
        if token.owner == self.me:
            return self.owned.add(token.key, self.me, -1)
        self.used.drop(token.key)
        return False

    def is_departed(self, peer: int) -> bool:
        """Returns whether the process is known to have left."""
        return self.owned.is_departed(peer)

    def leave(self, peer: int) -> list[RRefKey]:
        """Forgets a process that has left; returns the references freed by it."""
        self.used.leave(peer)
        return self.owned.leave(peer)

    def join(self, peer: int) -> None:
        """Takes note that a process which was thought dead is back."""
        self.used.join(peer)
        self.owned.join(peer)

    def _change(self, token: RefToken, dst: int, count: int) -> bool:
        if token.owner == self.me:
            return self.owned.add(token.key, dst, count)
        if dst == self.me:
            if count > 0:
                self.used.use(token.key)
            else:
                self.used.drop(token.key)
        elif token.counted:
            self.used.announce(token.key, token.owner, self.me, count)
        elif dst != token.owner:
            self.used.announce(token.key, token.owner, dst, count)
        return False
