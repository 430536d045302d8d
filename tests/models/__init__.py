"""Toy models of the tests, by what they are good for. A model that two test files need belongs here.

named            whole models with their batches: chains, skips, norms, attention, recurrent and convolutional ones
three_layers     three linear layers and a forward that a test brings along: the shortest way to a special case
decoders         language models with labels, mixtures of experts among them
generators       tiny language models of 31 families of transformers, which generate
lengths          models whose inputs vary in length
random_modules   modules drawn by hypothesis
own_python       models that no graph can follow
"""
