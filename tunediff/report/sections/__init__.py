"""The sections of a report: each builds its part of the page, or None where there is nothing to say."""
