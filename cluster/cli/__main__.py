"""The command's first lines: Ctrl-C is one line also while the rest is being imported, which takes a second."""

import sys


def main() -> None:
    """Entry point of ``tramontane``."""
    try:
        from tramontane.cluster.cli.main import main as run
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT, as a shell reports it
    run()
