"""Words and pictures: the live console, what a search leaves in its folder, and its report, one HTML page."""
