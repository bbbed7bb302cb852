"""Judge generators: requests for images (`generation`), `features`, and `distance`.

`judge` is for the evaluations within a training; `quality` is for a finished model.
"""
