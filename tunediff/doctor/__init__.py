"""Check a machine before a search is started on it: `python -m tunediff.doctor`."""
