"""What works on this machine and what does not, before a search is started on it: `python -m
tunediff.doctor`."""
