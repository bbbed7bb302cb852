"""Judge generators: requests for images (`generation`), features (`features`), distances
(`distance`).

`judge` is for the evaluations within a training; `quality` is for a finished model.
"""
