"""`python -m tidemill` is the command line."""

from tidemill.cli.entry import main

main()
