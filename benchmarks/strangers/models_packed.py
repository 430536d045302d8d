"""Models with packed sequences, and models that mix rows for real."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from benchmarks.strangers.hosts import VOCABULARY, WIDTH, Layer, Residual, Table, padded, vectors

TABLE = Table()


# --- packed sequences -----------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """A tagger of padded sequences; ``encoder`` gets embeddings and lengths, and returns states per token."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.encoder = encoder
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids, lengths):
        x = self.encoder(self.embed(ids), lengths)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def packed(encoder):
    """Declare an encoder of padded sequences."""

    def build() -> nn.Module:
        return Packed(encoder())

    build.__name__ = encoder.__name__
    TABLE.root("packed", padded)(build)
    return encoder


@packed
class PackedLstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x, lengths):
        sequence = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return rnn.pad_packed_sequence(self.lstm(sequence)[0], batch_first=True, total_length=x.shape[1])[0]


@packed
class ToLongest(PackedLstm):
    """Without a total length the output is as long as the longest; what is missing is padded by hand."""

    def forward(self, x, lengths):
        sequence = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = rnn.pad_packed_sequence(self.lstm(sequence)[0], batch_first=True)
        return F.pad(out, (0, 0, 0, x.shape[1] - out.shape[1]))


@packed
class LastHidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x, lengths):
        _, hidden = self.gru(rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return hidden[-1]


@packed
class SortedByHand(PackedLstm):
    def forward(self, x, lengths):
        lengths, order = lengths.sort(descending=True)
        sequence = rnn.pack_padded_sequence(x[order], lengths.tolist(), batch_first=True)
        out, _ = rnn.pad_packed_sequence(self.lstm(sequence)[0], batch_first=True, total_length=x.shape[1])
        return out[order.argsort()]


@packed
class Bidirectional(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH // 2, 2, batch_first=True, bidirectional=True)

    def forward(self, x, lengths):
        sequence = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return rnn.pad_packed_sequence(self.gru(sequence)[0], batch_first=True, total_length=x.shape[1])[0]


@packed
class ListOfRows(Layer):
    def forward(self, x, lengths):
        rows = [self.fc(row[:length]) for row, length in zip(x, lengths.tolist(), strict=True)]
        out = rnn.pad_sequence(rows, batch_first=True)
        return F.pad(out, (0, 0, 0, x.shape[1] - out.shape[1]))


@packed
class PackedWithDropout(PackedLstm):
    def forward(self, x, lengths):
        x = F.dropout(x, 0.2, self.training)
        sequence = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, (hidden, _) = self.lstm(sequence)
        return rnn.pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0] + hidden[-1][:, None]


@packed
class PackedData(PackedLstm):
    """Works on the packed data as they are."""

    def forward(self, x, lengths):
        sequence = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        sequence = sequence._replace(data=torch.tanh(sequence.data))
        return rnn.pad_packed_sequence(self.lstm(sequence)[0], batch_first=True, total_length=x.shape[1])[0]


# --- mixed rows -----------------------------------------------------------------------------------------------------


@TABLE.odd("mixing", "mlp")
class AddsSorted(nn.Module):
    def forward(self, x):
        return x[x[:, 0].argsort()]


@TABLE.odd("mixing", "mlp")
class RanksScores(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x):
        scores = self.score(x).squeeze(-1)
        return x * (torch.msort(scores) - scores.sort()[0].mean()).unsqueeze(-1)


@TABLE.odd("mixing", "tagger")
class MixesUp(Layer):
    def forward(self, x):
        if not self.training:
            return self.fc(x)
        return 0.7 * self.fc(x) + 0.3 * self.fc(x[torch.rand(x.shape[0]).argsort()])


@TABLE.odd("mixing", "gpt")
class Standardizes(Layer):
    def forward(self, x):
        return self.fc((x - x.mean(0)) / (x.std(0) + 1e-3))


@TABLE.root("mixing", vectors)
class Contrastive(nn.Module):
    """Rows meet only in the last product."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, WIDTH), Residual(), Residual(), Residual(), nn.Linear(WIDTH, WIDTH))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        z = F.normalize(self.encoder(x), dim=-1)
        return (z @ z.T / self.temperature).log_softmax(-1).diagonal()[:, None]


@TABLE.root("mixing", vectors)
class Discriminator(nn.Module):
    """Minibatch discrimination in the head."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(6, WIDTH), Residual(), Residual(), Residual()])
        self.head = nn.Linear(WIDTH + 1, 1)

    def forward(self, x):
        for layer in self.body:
            x = layer(x)
        closeness = torch.exp(-torch.cdist(x, x + 1e-3)).sum(1, keepdim=True)
        return self.head(torch.cat([x, closeness], 1))


@TABLE.root("mixing", vectors)
class HardExamples(nn.Module):
    """Only the two hardest rows count double."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, WIDTH), Residual(), Residual(), Residual())
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        out = self.head(self.body(x))
        _, hardest = out.pow(2).sum(-1).topk(2)
        return out + out * torch.zeros(len(out), 1, dtype=out.dtype).index_fill(0, hardest, 1.0)


@TABLE.root("mixing", vectors)
class ManifoldMixup(nn.Module):
    """Input mixup: a permutation of the batch before everything else."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, WIDTH), Residual(), Residual(), nn.Linear(WIDTH, 3))

    def forward(self, x):
        if self.training:
            x = 0.8 * x + 0.2 * x[torch.randperm(x.shape[0])]
        return self.layers(x)
