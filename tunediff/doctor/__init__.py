"""Check a machine before a search is started on it: `tunediff doctor`."""
