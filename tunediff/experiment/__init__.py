"""What an experiment is: candidates × seeds, run under one limit, until a rule is satisfied."""
