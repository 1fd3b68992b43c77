"""The entry point of the command, which handles Ctrl-C also while other modules are imported."""

import sys


def main() -> None:
    """Run the ``tramontane`` command."""
    try:
        from tramontane.cluster.cli.main import main as run
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT, as a shell reports it
    run()


if __name__ == "__main__":
    main()
