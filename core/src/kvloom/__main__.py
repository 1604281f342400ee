"""`python -m kvloom`: the command, for environments whose scripts are not on the path."""

from kvloom.cli.main import main

main()
