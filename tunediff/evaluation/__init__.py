"""How a model is judged: images drawn from it (`sampling`), features (`features`), distances (`distance`)."""
