"""What connects a search with other people's services: trackers of experiments. Every package is imported lazily."""
