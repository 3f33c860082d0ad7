"""Runs an OpenRLHF training with april: ``python -m april.adapters.openrlhf``."""

from april.adapters.openrlhf import main

if __name__ == "__main__":
    main()
