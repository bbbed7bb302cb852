"""The commands as functions: `tunediff.search` and others parse a command line and call them."""
