"""Make a comparison a result that others can check: its code, its seeds, its folder, its verdict."""
