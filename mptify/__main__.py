"""The program, as `mptify` and as `python -m mptify`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, so that Ctrl-C ends in one line even during imports."""
    try:
        from mptify.cli import main as run

        run()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("mptify: stopped at once.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
