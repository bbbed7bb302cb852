"""What a colour means, the same in every figure and table; distinguished by colour-blind eyes as well."""

BASELINE, WINNER = "#1d5fa8", "#c2410c"
"""The baseline, and the best or the winner, whichever it may be called."""
OTHER, FAILED, PRUNED = "#b4b0a5", "#7f1d4e", "#a5a55b"
"""All other trials; those that failed; those that were stopped early."""
PLAIN = "#8b887e"
"""Of bars and lines that need none."""
SERIES = ("#137f54", "#35a7d0", "#e5a422", "#3a1fb8", "#a55b8c", "#59330d", "#1f1e1b")
"""Of things beside each other that are none of these, in order."""
