"""The zoo: many models from configs with random weights, each split and compared with itself.

Two environments, because torchvision from the package index breaks the import of some transformers models, and timm
needs it::

    python3 -m venv .venv-zoo && .venv-zoo/bin/pip install -c constraints.txt -e ".[zoo]"
    .venv-zoo/bin/python -m benchmarks.zoo --json zoo.json

    python3 -m venv .venv-zoo-vision && .venv-zoo-vision/bin/pip install -c constraints.txt -e ".[zoo-vision]"
    .venv-zoo-vision/bin/python -m benchmarks.zoo --group timm --group torchvision --json zoo.json --resume

Every model runs in a process of its own on CPU lanes, with ragged microbatches, forward and backward, in eval and in
train mode (two steps), then at another batch size, at another length where it takes sequences, and with other values
where it reads values. Outputs, gradients and buffers are compared with the plain model's on the full batch: the largest
absolute difference over (the plain tensor's largest absolute value + 1e-6), 1e-5 allowed in float32. A difference that
float32 alone makes, gone in float64 with the same weights and inputs, is called "float32". Models with batch norm or
random operations are compared in eval mode; dropout probabilities are zero. Nothing is downloaded.
"""
