"""``hf:config.json``, with a stand-in for transformers: which class, dtype, device and inputs, and what is refused."""

from __future__ import annotations

import json
import math
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
from autosplit.cli import hf
from autosplit.cli.hf import build, default_inputs
from autosplit.cli.inputs import InputSpec, ModelSpec
from autosplit.cli.models import input_specs, make_model, make_sample
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


def test_with_values_only_where_there_are_few(written: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert build(written(), kwargs={}, blank=False).embed.weight.device.type == "cpu"
    monkeypatch.setattr(hf, "MOST_BYTES", 1024)
    with pytest.raises(InputError, match=r"has 1.56 KiB of parameters, .* gets values up to 1.00 KiB; autosplit plan"):
        build(written(), kwargs={}, blank=False)


def test_a_folder_and_entries_of_ones_own(written: Callable[..., str], tmp_path: Path) -> None:
    written()
    model = build(f"hf:{tmp_path}", kwargs={"width": 4}, blank=True)
    assert model.embed.weight.shape == (50, 4)


@pytest.mark.parametrize(
    ("architectures", "found"),
    [
        (None, TinyForCausalLM),
        (["TinyVision"], TinyVision),
        (["Mine"], TinyForCausalLM),
        (["pipeline"], TinyForCausalLM),
    ],
)
@pytest.mark.filterwarnings("ignore:transformers has no")
def test_the_class_is_the_named_one_else_what_the_family_has(
    written: Callable[..., str], architectures: list[str] | None, found: type
) -> None:
    assert type(build(written(TINY | {"architectures": architectures}), kwargs={}, blank=True)) is found


def test_another_class_than_the_named_one_is_said(written: Callable[..., str]) -> None:
    with pytest.warns(UserWarning, match="transformers has no Mine for this config; TinyForCausalLM is taken"):
        build(written(TINY | {"architectures": ["Mine"]}), kwargs={}, blank=True)


def test_numbers_that_json_has_not_are_read_as_transformers_writes_them(written: Callable[..., str]) -> None:
    limits = [0.0, {"__float__": "Infinity"}, {"__float__": "-Infinity"}, {"__float__": "one"}]
    build(written(TINY | {"limits": limits, "scale": {"__float__": "NaN"}}), kwargs={}, blank=True)
    (seen,) = TinyConfig.seen
    assert seen["limits"] == [0.0, math.inf, -math.inf, {"__float__": "one"}]
    assert math.isnan(seen["scale"])


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


def test_sound_is_shown_by_an_example(written: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinyForCausalLM, "main_input_name", "input_values", raising=False)
    model = build(written(TINY | {"conv_stride": [5, 2]}), kwargs={}, blank=True)
    with pytest.raises(InputError, match=r"such as input_values=float32\[6,160000\] for ten seconds at 16 kHz"):
        default_inputs(model, batch=6, sequence=None)


def test_a_model_that_compares_text_and_images_gets_both(written: Callable[..., str]) -> None:
    model = build(written(TINY | {"architectures": ["TinyPairs"]}), kwargs={}, blank=True)
    model.config.vision_config = TinyConfig(image_size=32)
    both = ["input_ids=int64[6,16]<50", "pixel_values=float32[6,3,32,32]"]
    assert list(map(str, default_inputs(model, batch=6, sequence=None))) == both
    model.config.vision_config = TinyConfig(temporal=4)
    assert list(map(str, default_inputs(model, batch=6, sequence=None))) == both[:1], "no size of an image is known"


def test_inputs_are_where_the_model_is_and_said(
    written: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec(written(), batch=4)
    sample = make_sample(spec, model=make_model(spec, blank=True), rows=99)
    assert (sample.kwargs["input_ids"].shape, sample.kwargs["input_ids"].is_meta) == ((4, 16), True)
    assert "inputs, from the config: input_ids=int64[4,16]<50 (--batch" in capsys.readouterr().err
    input_specs(spec, model=make_model(spec, blank=True), rows=99, say=False)
    assert capsys.readouterr().err == ""
    beside = ModelSpec(spec.target, inputs=(InputSpec.parse("labels=null"), InputSpec.parse("flag=false")))
    monkeypatch.setattr(PreTrainedModel, "forward", lambda self, input_ids, labels=None, flag=True: None)
    assert list(make_sample(beside, model=make_model(beside, blank=True), rows=2).kwargs.values())[1:] == [None, False]
    assert "inputs, from the config: input_ids=int64[2,16]<50 (--batch" in capsys.readouterr().err
    own = ModelSpec(spec.target, inputs=(InputSpec.tensor("0", "int64", (2, 3), 9),))
    assert make_sample(own, model=make_model(own), rows=99).args[0].shape == (2, 3)
    assert capsys.readouterr().err == ""
