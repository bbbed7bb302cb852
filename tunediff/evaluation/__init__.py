"""How a model is judged: images drawn from it (`sampling`), features (`features`), distances (`distance`).

`evaluator` and `validation` are what every evaluation within a training takes; `quality` is for a finished model.
"""
