"""Entry point of ``python -m april`` and the ``april`` script."""

from __future__ import annotations

import sys

from april import __version__


def main() -> None:
    """Run the command line; exit with a message if a package that it needs is missing."""
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
