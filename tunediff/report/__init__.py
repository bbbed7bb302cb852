"""Output for users: the live console, the files of a search, and its HTML report."""
