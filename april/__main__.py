"""Entry point of ``python -m april`` and the ``april`` script."""

from __future__ import annotations

import io
import sys

from april import __version__


def main() -> None:
    """Run the command line; exit with a message if a package that it needs is missing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # tables and cut lines have characters that some encodings lack
    if sys.argv[1:] == ["--version"]:
        sys.exit(print(f"april {__version__}"))  # without the imports of april.cli
    try:
        from april.cli import app
    except ModuleNotFoundError as error:
        from april.text.install_command import install  # only here, as its imports would slow down --version

        sys.exit(f"april's command line needs {error.name}: {install('cli')}")
    try:
        app()
    except ModuleNotFoundError as error:
        from april.text.install_command import install

        sys.exit(f"this command needs {error.name}: {install('demo')}")


if __name__ == "__main__":
    main()
