"""``python -m vaerdict`` is the command ``vaerdict``."""

from vaerdict.cli import main

if __name__ == "__main__":
    main()
