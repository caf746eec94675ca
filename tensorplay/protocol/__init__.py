"""The wire protocol: bytes and state, no sockets.

``messages`` defines what peers and broker say to each other, ``wire`` turns it
into frames and back, ``session`` is the peer's side of registration and liveness,
``chunks`` cuts large payloads up and puts them together again, and ``refs``
counts remote references.  Nothing here imports more than msgspec.
"""
