"""Make a comparison a result that others can check: code, seeds, folder, verdict."""
