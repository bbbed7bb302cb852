"""Run any program as a training: parameters by its command line, metrics from what it prints."""
