"""Where the broker is; the class lives where commands find it that do without torch."""

from tensorplay.address import BrokerAddress

__all__ = ["BrokerAddress"]
