"""Models with torch.distributions, custom autograd functions that take Python arguments, and hooks set in forward."""

from __future__ import annotations

import functools

import torch
from torch import distributions as D
from torch import nn
from torch.nn import functional as F

from benchmarks.strangers.hosts import WIDTH, Layer, Residual, Table, linear, vectors

TABLE = Table()

# --- torch.distributions --------------------------------------------------------------------------------------------


@TABLE.odd("distributions")
class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.spread = linear(), linear()

    def forward(self, x):
        return D.Normal(self.mean(x), F.softplus(self.spread(x)) + 1e-3).rsample()


@TABLE.odd("distributions")
class Entropy(Layer):
    def forward(self, x):
        gate = D.Categorical(logits=self.fc(x))
        return x * gate.probs * gate.entropy().unsqueeze(-1)


@TABLE.odd("distributions")
class Relaxed(Layer):
    def forward(self, x):
        if not self.training:
            return torch.softmax(self.fc(x), -1)
        return D.RelaxedOneHotCategorical(torch.tensor(0.7, dtype=x.dtype), logits=self.fc(x)).rsample()


@TABLE.odd("distributions")
class LogProbability(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.log_scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return 0.1 * D.Normal(self.mean, self.log_scale.exp()).log_prob(x)


@TABLE.odd("distributions")
class Divergence(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.spread = linear(), linear()

    def forward(self, x):
        posterior = D.Normal(self.mean(x), F.softplus(self.spread(x)) + 0.1)
        self.prior_width = 1.0
        return D.kl_divergence(posterior, D.Normal(torch.zeros_like(x), torch.ones_like(x)))


@TABLE.odd("distributions")
class StraightThrough(Layer):
    def forward(self, x):
        probabilities = torch.sigmoid(self.fc(x))
        hard = D.Bernoulli(probs=probabilities).sample()
        return x * (hard + probabilities - probabilities.detach())


@TABLE.odd("distributions")
class MixtureDensity(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights, self.means = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        components = D.Independent(D.Normal(self.means(x).unflatten(-1, (3, WIDTH)), 1.0), 1)
        mixture = D.MixtureSameFamily(D.Categorical(logits=self.weights(x)), components)
        return x * 0.01 * mixture.log_prob(x).unsqueeze(-1)


@TABLE.root("distributions", vectors)
class Vae(nn.Module):
    """Returns the reconstruction and the divergence of each row."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, WIDTH), Residual(), Residual(), nn.Linear(WIDTH, 8))
        self.decoder = nn.Sequential(nn.Linear(4, WIDTH), Residual(), Residual(), nn.Linear(WIDTH, 6))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        posterior = D.Normal(mean, (0.5 * log_variance).exp())
        latent = posterior.rsample() if self.training else mean
        kl = D.kl_divergence(posterior, D.Normal(torch.zeros_like(mean), torch.ones_like(mean))).sum(-1)
        return self.decoder(latent), kl


# --- custom autograd functions with a Python argument ---------------------------------------------------------------


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.scale * grad, None


class Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bits, symmetric):
        ctx.save_for_backward(x)
        ctx.limit = 1.0 if symmetric else 2.0
        levels = 2**bits - 1
        return torch.round(x.clamp(-1, 1) * levels) / levels

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= ctx.limit), None, None


class Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        ctx.save_for_backward(x)
        ctx.name = name
        return x.relu() if name == "relu" else x.tanh()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ((x > 0).to(x.dtype) if ctx.name == "relu" else 1 - x.tanh() ** 2), None


class Swish(torch.autograd.Function):
    """In the newer style, with ``setup_context``."""

    @staticmethod
    def forward(x, beta):
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.beta = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(ctx.beta * x)
        return grad * (gate + ctx.beta * x * gate * (1 - gate)), None


class SumAndDifference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, swap):
        ctx.swap = swap
        return (a - b, a + b) if swap else (a + b, a - b)

    @staticmethod
    def backward(ctx, first, second):
        if ctx.swap:
            first, second = second, first
        return first + second, first - second, None


class Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function, shape):
        with torch.enable_grad():
            ctx.inner = x.detach().requires_grad_()
            ctx.outer = function(ctx.inner).reshape(shape)
        return ctx.outer.detach()

    @staticmethod
    def backward(ctx, grad):
        return torch.autograd.grad(ctx.outer, ctx.inner, grad)[0], None, None


@TABLE.odd("custom function")
class Adversarial(Layer):
    def forward(self, x):
        return self.fc(ReverseGradient.apply(x, 0.5))


@TABLE.odd("custom function")
class AdversarialAttribute(Layer):
    def __init__(self):
        super().__init__()
        self.strength = 0.3

    def forward(self, x):
        return self.fc(ReverseGradient.apply(x, self.strength))


@TABLE.odd("custom function")
class FakeQuantized(Layer):
    def forward(self, x):
        return F.linear(x, Quantize.apply(self.fc.weight, 4, True), self.fc.bias)


@TABLE.odd("custom function")
class NamedActivation(Layer):
    def __init__(self, name="relu"):
        super().__init__()
        self.name = name

    def forward(self, x):
        return Activation.apply(self.fc(x), self.name) + Activation.apply(x, "tanh")


@TABLE.odd("custom function")
class EfficientSwish(Layer):
    def forward(self, x):
        return Swish.apply(self.fc(x), 1.5)


@TABLE.odd("custom function")
class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH // 2, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x):
        a, b = x.chunk(2, -1)
        return torch.cat(SumAndDifference.apply(self.left(a), self.right(b), self.training), -1)


@TABLE.odd("custom function")
class AppliesCallable(Layer):
    def forward(self, x):
        return Applied.apply(self.fc(x), torch.sin, tuple(x.shape))


@TABLE.root("custom function", lambda rows: (vectors(rows)[0], {"alpha": 0.25}))
class DomainAdaptation(nn.Module):
    """DANN: the reversal's strength is an argument of the forward."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, WIDTH), Residual(), Residual(), Residual())
        self.label = nn.Linear(WIDTH, 3)
        self.domain = nn.Sequential(Residual(), nn.Linear(WIDTH, 1))

    def forward(self, x, alpha=1.0):
        features = self.features(x)
        return self.label(features) + self.domain(ReverseGradient.apply(features, alpha))


# --- register_hook in forward ---------------------------------------------------------------------------------------


@TABLE.odd("register_hook")
class HalvesGradient(Layer):
    def forward(self, x):
        out = self.fc(x)
        if out.requires_grad:
            out.register_hook(lambda grad: grad * 0.5)
        return out


@TABLE.odd("register_hook")
class GradCam(Layer):
    """Keeps the activation and its gradient."""

    def save(self, grad):
        self.gradient = grad.detach()

    def forward(self, x):
        self.activation = self.fc(x)
        if self.activation.requires_grad:
            self.activation.register_hook(self.save)
        return torch.relu(self.activation)


@TABLE.odd("register_hook")
class ClipsGradient(Layer):
    def __init__(self):
        super().__init__()
        self.limit = 1e-3

    def forward(self, x):
        out = torch.tanh(self.fc(x))
        if out.requires_grad:
            out.register_hook(lambda grad: grad.clamp(-self.limit, self.limit))
        return out


def scaled(grad, factor):
    """Return a gradient times a factor."""
    return grad * factor


@TABLE.odd("register_hook")
class ScalesByPartial(Layer):
    def forward(self, x):
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(functools.partial(scaled, factor=2.0))
        return self.fc(x)


@TABLE.odd("register_hook")
class RetainsGradient(Layer):
    def forward(self, x):
        self.hidden = self.fc(x)
        if self.hidden.requires_grad:
            self.hidden.retain_grad()
        return F.gelu(self.hidden)


@TABLE.odd("register_hook")
class CountsBackward(Layer):
    def __init__(self):
        super().__init__()
        self.backwards = 0

    def count(self, grad):
        self.backwards += 1

    def forward(self, x):
        out = self.fc(x)
        if out.requires_grad:
            out.register_hook(self.count)
        return out


@TABLE.odd("register_hook")
class NormalizesGradient(Layer):
    def forward(self, x):
        out = self.fc(x)
        if self.training:
            out.register_hook(lambda grad: grad / (grad.norm(dim=-1, keepdim=True) + 1e-6))
        return out


@TABLE.root("register_hook", vectors)
class GradientProbe(nn.Module):
    """Collects the norm of every block's gradient by name."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)
        self.norms = {}

    def forward(self, x):
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda grad, index=index: self.norms.__setitem__(index, grad.norm()))
        return self.head(x)
