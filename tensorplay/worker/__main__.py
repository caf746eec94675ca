"""``python -m tensorplay.worker``."""

from tensorplay.worker.cli import main

if __name__ == "__main__":
    main()
