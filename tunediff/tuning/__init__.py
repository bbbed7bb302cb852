"""Which trials run, and how one runs in processes of its own; imports no Ray."""
