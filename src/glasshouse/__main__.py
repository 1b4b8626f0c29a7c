"""`python -m glasshouse`: the same as the command `glasshouse`."""

from glasshouse.cli import main

if __name__ == "__main__":
    main()
