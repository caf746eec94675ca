"""``python -m tensorplay.broker``."""

from tensorplay.broker.cli import main

main()
