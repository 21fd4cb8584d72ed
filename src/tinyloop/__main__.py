"""`python -m tinyloop`: the command line where its script is not on the path."""

from .cli import main

main()
