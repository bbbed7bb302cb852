"""What everything else stands on, without torch and Ray: clock, points, journals, files, text."""
