"""Asynchronous training: 1F1B without a flush over a stream of minibatches, with versions of the weights."""
