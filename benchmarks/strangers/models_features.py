"""Models that remember features on their modules, and lists that log."""

from __future__ import annotations

import collections
import io

import torch
from torch import nn

from benchmarks.strangers.hosts import TOKENS, VOCABULARY, WIDTH, Layer, Residual, Table, inner, linear, tokens, vectors

TABLE = Table()


# --- self.feat = ... ------------------------------------------------------------------------------------------------


@TABLE.odd("feat", extra_loss=lambda model: inner(model, Feature).feat.pow(2).mean())
class Feature(Layer):
    def forward(self, x):
        self.feat = self.fc(x)
        return torch.relu(self.feat)


@TABLE.odd("feat", "gpt")
class ShownAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = linear(), linear()

    def forward(self, x):
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2) / WIDTH**0.5, -1)
        self.attention_weights = weights.detach()
        return weights @ x


@TABLE.odd("feat")
class FeatureDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()
        self.features = {}

    def forward(self, x):
        self.features["first"] = torch.tanh(self.first(x))
        self.features["second"] = self.second(self.features["first"])
        return self.features["second"]


@TABLE.odd("feat")
class KeyValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.value = linear(), linear()
        self.cache = None

    def forward(self, x):
        self.cache = (self.key(x), self.value(x))
        return torch.sigmoid(self.cache[0]) * self.cache[1]


@TABLE.odd("feat", "mlp", extra_loss=lambda model: 0.1 * inner(model, Sparsity).penalty)
class Sparsity(Layer):
    """A penalty that the training loop adds."""

    def forward(self, x):
        hidden = torch.sigmoid(self.fc(x))
        self.penalty = hidden.abs().mean()
        return hidden


@TABLE.odd("feat")
class RemembersShape(Layer):
    def forward(self, x):
        self.input_shape = tuple(x.shape)
        return self.fc(x)


@TABLE.odd("feat")
class LastNorm(Layer):
    def forward(self, x):
        out = self.fc(x)
        self.last_norm = out.detach().norm(dim=-1)
        return out


@TABLE.root("feat", vectors, extra_loss=lambda model: sum(feat.mean() for feat in model.feats))
class DeepSupervision(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        self.feats = []
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            self.feats.append(x)
        return self.head(x)


# --- lists that log -------------------------------------------------------------------------------------------------


@TABLE.odd("log")
class MeanLog(Layer):
    def __init__(self):
        super().__init__()
        self.log = []

    def forward(self, x):
        out = self.fc(x)
        self.log.append(out.mean().item())
        return out


@TABLE.odd("log")
class ShapeLog(Layer):
    def __init__(self):
        super().__init__()
        self.shapes = []

    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        return self.fc(x).relu()


@TABLE.odd("log")
class TensorLog(Layer):
    def __init__(self):
        super().__init__()
        self.history = []

    def forward(self, x):
        self.history.append(x.detach().norm(dim=-1))
        return self.fc(x)


@TABLE.odd("log")
class Recent(Layer):
    def __init__(self):
        super().__init__()
        self.recent = collections.deque(maxlen=2)

    def forward(self, x):
        out = torch.tanh(self.fc(x))
        self.recent.append(out.detach())
        return out


@TABLE.odd("log")
class Metrics(Layer):
    def __init__(self):
        super().__init__()
        self.metrics = collections.defaultdict(list)

    def forward(self, x):
        out = self.fc(x)
        self.metrics["norm"].append(float(out.norm()))
        self.metrics["rows"].append(len(x))
        return out


class Logger:
    """A logger as a project has its own."""

    def __init__(self):
        self.lines = []

    def write(self, line):
        self.lines.append(line)


@TABLE.odd("log")
class LogsByObject(Layer):
    def __init__(self):
        super().__init__()
        self.logger = Logger()

    def forward(self, x):
        self.logger.write(f"input {list(x.shape)}")
        return self.fc(x)


@TABLE.odd("log")
class TextLog(Layer):
    def __init__(self):
        super().__init__()
        self.text = io.StringIO()

    def forward(self, x):
        self.text.write(f"{x.dim()} dimensions, {'train' if self.training else 'eval'}\n")
        return self.fc(x)


@TABLE.root("log", tokens)
class TracedTagger(nn.Module):
    """Every block appends its name to a list that all share."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.head = nn.Linear(WIDTH * TOKENS, 3)
        self.trace = []

    def forward(self, ids):
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            x = block(x)
            self.trace.append(f"block {index}")
        return self.head(x.flatten(1))
