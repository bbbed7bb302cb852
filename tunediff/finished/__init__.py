"""Runs that have ended elsewhere: read from their logs, and judged."""
