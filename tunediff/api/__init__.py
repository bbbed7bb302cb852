"""What the commands do, as functions: `tunediff.search` and the other commands parse a command line
and call them."""
