"""Colours with one meaning in all figures and tables, also for colour-blind readers."""

BASELINE, WINNER = "#1d5fa8", "#c2410c"
"""The baseline, and the best configuration or the winner."""
OTHER, FAILED, PRUNED = "#b4b0a5", "#7f1d4e", "#a5a55b"
"""All other trials; those that failed; those that were stopped early."""
PLAIN = "#8b887e"
"""Bars and lines that need no colour."""
SERIES = ("#137f54", "#35a7d0", "#e5a422", "#3a1fb8", "#a55b8c", "#59330d", "#1f1e1b")
"""Several series in one figure that are none of the above, in order."""
