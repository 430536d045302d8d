"""``hf:config.json``, with a stand-in for transformers: which class, dtype, device and inputs, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from autosplit.cli import app as cli
from autosplit.cli.hf import build, default_inputs
from autosplit.errors import InputError
from autosplit.planning.plan.plan import Plan

TINY = {"model_type": "tiny", "width": 8, "vocab_size": 50, "max_position_embeddings": 16}


class TinyConfig:
    """What transformers promises of every config, and three entries."""

    model_type = "tiny"
    seen: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **entries: Any) -> None:
        defaults = {"architectures": None, "use_cache": True, "is_encoder_decoder": False}
        vars(self).update(defaults | entries)

    @classmethod
    def from_dict(cls, entries: dict[str, Any]) -> TinyConfig:
        cls.seen.append(entries)
        if entries.get("width", 0) < 0:
            raise ValueError("a width below 0\n is none")
        return cls(**entries)

    def get_text_config(self) -> TinyConfig:
        return self


class PreTrainedModel(nn.Module):
    main_input_name = "input_ids"
    config_class = TinyConfig

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids)


class TinyForCausalLM(PreTrainedModel):
    pass


class TinyDeep(PreTrainedModel):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.num_layers))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class TinyTranslator(PreTrainedModel):
    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids) + self.embed(decoder_input_ids)


class TinyWithLoss(PreTrainedModel):
    loss_type: str | None = None

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        logits = self.embed(input_ids) @ self.embed.weight.T
        if labels is None:
            return (logits,)
        return nn.functional.cross_entropy(logits.float().view(-1, 50), labels.view(-1)), logits


class TinyVision(PreTrainedModel):
    main_input_name = "pixel_values"


class TinyClassifier(TinyVision):
    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError


class TinyPairs(PreTrainedModel):
    """A text and an image per row, as CLIP takes them."""

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor, return_loss: bool = False) -> torch.Tensor:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    mappings = SimpleNamespace(
        MODEL_FOR_CAUSAL_LM_MAPPING={TinyConfig: (TinyForCausalLM, TinyWithLoss)},
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING={TinyConfig: TinyClassifier},
    )
    fake = SimpleNamespace(
        __version__="5.0",
        CONFIG_MAPPING={"tiny": TinyConfig},
        PreTrainedModel=PreTrainedModel,
        TinyForCausalLM=TinyForCausalLM,
        TinyVision=TinyVision,
        TinyWithLoss=TinyWithLoss,
        TinyTranslator=TinyTranslator,
        TinyDeep=TinyDeep,
        TinyClassifier=TinyClassifier,
        TinyPairs=TinyPairs,
        pipeline=print,
        models=SimpleNamespace(auto=SimpleNamespace(modeling_auto=mappings)),
    )
    monkeypatch.setitem(sys.modules, "transformers", fake)
    monkeypatch.setattr(TinyConfig, "seen", [])


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    def write(entries: Any = TINY, *, name: str = "config.json") -> str:
        text = entries if isinstance(entries, str) else json.dumps(entries)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return f"hf:{tmp_path / name}"

    return write


def test_the_model_is_on_meta_in_the_dtype_of_the_config_and_keeps_no_cache(written: Callable[..., str]) -> None:
    model = build(written(TINY | {"torch_dtype": "bfloat16"}), kwargs={}, blank=True)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert model.config.use_cache is False
    assert torch.get_default_dtype() == torch.float32
    assert build(written(TINY | {"dtype": "float16"}), kwargs={}, blank=True).embed.weight.dtype == torch.float16
    assert build(written(), kwargs={"dtype": "float64"}, blank=True).embed.weight.dtype == torch.float64


def test_a_config_needs_no_prefix_and_is_trained_with_fp32_copies(written: Callable[..., str], tmp_path: Path) -> None:
    path = written(TINY | {"architectures": ["TinyForCausalLM"]}).removeprefix("hf:")
    for target in (path, f"hf:{path}"):
        result = CliRunner().invoke(cli.app, ["plan", target, "--devices", "l4", "--chunks", "1", "--json"])
        assert result.exit_code == 0, result.output
        assert Plan.model_validate_json(result.stdout).precision == "bf16_fp32_master"
        assert "precision: bf16_fp32_master, bf16 with fp32 copies of the weights" in result.stderr
    assert Plan.model_validate_json(result.stdout).machine == "1xL4-24GB"
    asked = ["plan", path, "--devices", "l4", "--chunks", "1", "--precision", "bf16"]
    pure = CliRunner().invoke(cli.app, asked).stdout
    assert "trained in bf16 alone, without fp32 copies of the weights" in pure
    forward = CliRunner().invoke(cli.app, [*asked[:-2], "--schedule", "forward", "--json"])
    assert Plan.model_validate_json(forward.stdout).precision is None
    report = ["report", path, "--devices", "cpu,cpu", "--chunks", "1"]
    assert "is no plan" not in CliRunner().invoke(cli.app, report).output
    nowhere = CliRunner().invoke(cli.app, ["plan", str(tmp_path / "none.json")])
    assert "there is no file" in nowhere.stderr


def test_the_most_layers_that_fit(written: Callable[..., str]) -> None:
    deep = TINY | {"architectures": ["TinyDeep"], "num_layers": 4, "width": 2048}
    asked = [written(deep), "--devices", "l4", "--chunks", "1", "--json", "--largest-model"]
    asked += ["--memory-limit", "2GiB", "--recompute", "never", "--schedule", "1f1b", "--batch", "2"]
    result = CliRunner().invoke(cli.app, ["plan", *asked])
    assert result.exit_code == 0, result.output
    plan = Plan.model_validate_json(result.stdout)
    layers = int(plan.reasons[0].split("the most layers that fit are ")[1].split()[0])
    assert layers > 4
    for more, verdict in ((0, "fits"), (1, "borderline")):
        kwargs = json.dumps({"num_layers": layers + more})
        other = CliRunner().invoke(
            cli.app, ["plan", *[word for word in asked if word != "--largest-model"], "--kwargs", kwargs]
        )
        assert Plan.model_validate_json(other.stdout).verdict in (verdict, "no" if more else verdict)
    refused = CliRunner().invoke(cli.app, ["plan", written(), "--devices", "l4", "--largest-model"])
    assert "--largest-model changes the layers of a config" in refused.stderr


def test_nothing_that_would_be_fetched_reaches_transformers(written: Callable[..., str]) -> None:
    kernel = {"_attn_implementation": "somebody/kernel", "attn_implementation": "somebody/kernel"}
    entries = TINY | kernel | {"text_config": dict(kernel), "use_pretrained_backbone": True}
    build(written(entries), kwargs=kernel, blank=True)
    assert TinyConfig.seen == [TINY | {"text_config": {}, "use_pretrained_backbone": False}]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (TINY | {"model_type": "tiiny"}, r"transformers 5.0 has no model_type 'tiiny'; near it: tiny; write a factory"),
        (TINY | {"model_type": "x", "auto_map": {}}, r"no model_type 'x'; the code that its auto_map names is not run"),
        ({"width": 8}, r"names no model_type, so it is no config of transformers"),
        (TINY | {"model_type": ["tiny"]}, r"names no model_type"),
        (TINY | {"width": -1}, r"makes no tiny of this config: ValueError: a width below 0\n is none$"),
        ({"model_type": "tiny"}, r"makes no tiny of this config: AttributeError"),
        (TINY | {"dtype": "float8"}, r"dtype 'float8' is none of float32, float64"),
        ([1], r"holds a JSON list, no config"),
        (
            '{"model_type": "tiny",\n "width": }',
            r"is no JSON: Expecting value: line 2 column 11",
        ),
        ("[" * 100_000, r"is no JSON: "),
    ],
)
def test_bad_configs(written: Callable[..., str], entries: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(written(entries), kwargs={}, blank=True)


def test_no_file_and_no_transformers(written: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"No such file or directory: 'gpt2'; hf: takes the config.json of a model"):
        build("hf:gpt2", kwargs={}, blank=True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"hf: needs transformers: .*; pip install transformers"):
        build(written(), kwargs={}, blank=True)


@pytest.mark.parametrize(
    ("entries", "sequence", "inputs"),
    [
        (TINY, None, ["input_ids=int64[6,16]<50"]),
        (TINY | {"max_position_embeddings": 131072}, None, ["input_ids=int64[6,4096]<50"]),
        (TINY | {"max_position_embeddings": 131072}, 9000, ["input_ids=int64[6,9000]<50"]),
        (
            TINY | {"is_encoder_decoder": True, "architectures": ["TinyTranslator"]},
            8,
            ["input_ids=int64[6,8]<50", "decoder_input_ids=int64[6,8]<50"],
        ),
        (
            TINY | {"is_encoder_decoder": True, "architectures": ["TinyVision"]},
            None,
            ["pixel_values=float32[6,3,224,224]"],
        ),
        (TINY | {"max_position_embeddings": -1}, None, ["input_ids=int64[6,512]<50"]),
        (TINY | {"architectures": ["TinyVision"]}, None, ["pixel_values=float32[6,3,224,224]"]),
        (
            TINY | {"architectures": ["TinyVision"], "image_size": {"height": 32, "width": 16}},
            None,
            ["pixel_values=float32[6,3,32,16]"],
        ),
        (
            TINY | {"architectures": ["TinyVision"], "image_size": [32, 16], "num_channels": 1, "dtype": "bfloat16"},
            None,
            ["pixel_values=bfloat16[6,1,32,16]"],
        ),
    ],
)
def test_the_inputs_that_a_config_describes(
    written: Callable[..., str], entries: dict[str, Any], sequence: int | None, inputs: list[str]
) -> None:
    model = build(written(entries), kwargs={}, blank=True)
    assert list(map(str, default_inputs(model, batch=6, sequence=sequence))) == inputs


def test_rows_beyond_the_positions_of_a_config(written: Callable[..., str]) -> None:
    model = build(written(TINY), kwargs={}, blank=True)
    with pytest.warns(UserWarning, match=r"rows of 40 tokens, and the config has max_position_embeddings=16"):
        default_inputs(model, batch=6, sequence=40)
    model.places = nn.Embedding(16, 4)
    assert default_inputs(model, batch=6, sequence=16)
    with pytest.raises(InputError, match=r"rows of 17 tokens, and the config has .*=16, which a table of learned"):
        default_inputs(model, batch=6, sequence=17)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("TinyWithLoss", ["labels=int64[6,16]<50"]),
        ("TinyClassifier", ["labels=int64[6]<9"]),
        ("TinyForCausalLM", []),
        ("TinyVision", []),
    ],
)
def test_labels_are_for_a_model_that_makes_its_loss(written: Callable[..., str], name: str, labels: list[str]) -> None:
    model = build(written(TINY | {"architectures": [name], "num_labels": 9}), kwargs={}, blank=True)
    plain = list(map(str, default_inputs(model, batch=6, sequence=None)))
    assert list(map(str, default_inputs(model, batch=6, sequence=None, labels=None))) == plain + labels
    if not labels:
        with pytest.raises(InputError, match=f"it is not known which labels {name} makes a loss from; give --input"):
            default_inputs(model, batch=6, sequence=None, labels=True)


def test_a_training_is_planned_with_the_models_own_loss(written: Callable[..., str]) -> None:
    config = written(TINY | {"architectures": ["TinyWithLoss"]})
    asked = ["plan", config, "--devices", "1xL4-24GB", "--chunks", "2", "--batch", "4", "--schedule", "1f1b", "--json"]
    peaks = {}
    for flag, given in (("--labels", True), ("--no-labels", False)):
        result = CliRunner().invoke(cli.app, [*asked, flag])
        assert result.exit_code == 0, result.output
        plan = Plan.model_validate_json(result.stdout)
        assert ("labels=int64[4,16]<50 (--batch, --sequence, --no-labels or --input" in result.stderr) is given
        assert any("no loss is given: the mean of the first output" in note for note in plan.notes) is not given
        peaks[flag] = plan.stages[0].memory.peak_bytes
    assert peaks["--labels"] > peaks["--no-labels"]
    assert "labels" in CliRunner().invoke(cli.app, asked).stderr
    evaluated = CliRunner().invoke(cli.app, [*asked, "--schedule", "forward"])
    assert "labels" not in evaluated.stderr
    assert "no loss is given" not in evaluated.stdout


def test_inputs_that_a_config_does_not_describe(written: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinyForCausalLM, "main_input_name", "waves", raising=False)
    model = build(written(), kwargs={}, blank=True)
    with pytest.raises(
        InputError, match=r"config of TinyForCausalLM does not say what its waves look like; give --inp"
    ):
        default_inputs(model, batch=6, sequence=None)
