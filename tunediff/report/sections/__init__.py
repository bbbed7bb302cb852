"""The sections of a report: each function returns its part of the page, or None."""
