"""``python -m tensorplay.demo``."""

from tensorplay.demo.cli import main

if __name__ == "__main__":
    main()
