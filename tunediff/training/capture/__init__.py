"""A whole training step, captured once and replayed: `compile.capture`."""
