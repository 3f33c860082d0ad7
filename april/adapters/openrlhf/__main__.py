"""``python -m april.adapters.openrlhf``."""

from april.adapters.openrlhf.launch import main

if __name__ == "__main__":
    main()
