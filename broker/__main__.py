"""``python -m tensorplay.broker``."""

from tensorplay.broker.cli import main

if __name__ == "__main__":
    main()
