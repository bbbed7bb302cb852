"""Classification of images: knobs, networks, training, what a classifier is judged by."""
