"""What all other packages build on, without torch and Ray: clock, points, journals, files, text."""
