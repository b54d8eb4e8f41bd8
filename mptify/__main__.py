"""`python -m mptify`."""

from mptify.cli import main

if __name__ == "__main__":
    main()
