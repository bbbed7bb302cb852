"""Output for users: the live console, the files that a search leaves in its folder, and its HTML
report."""
