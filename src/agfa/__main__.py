"""python -m agfa."""

from agfa.cli import main

main()
