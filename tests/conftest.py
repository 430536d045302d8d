"""What every test shares: fixed randomness, golden files, and the one reason to skip."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import HealthCheck, register_random, settings

from tests import tiers


class _TorchRandom:
    """torch's global generator as hypothesis wants it, so that every example starts from the same seed."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_TORCH_RANDOM = _TorchRandom()
register_random(_TORCH_RANDOM)
_PROFILE = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], max_examples=25
)
settings.register_profile("autosplit", _PROFILE)
settings.register_profile("full", _PROFILE, max_examples=50)
settings.register_profile("campaign", _PROFILE, max_examples=100)
settings.load_profile("autosplit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the golden files with what the tests produce"
    )
    parser.addoption("--update-costs", action="store_true", help="rewrite the list of what the cases of tests cost")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-costs"):
        config.pluginmanager.register(tiers.Meter())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.deal(items)
    cuda_items = [item for item in items if item.get_closest_marker("cuda")]
    if cuda_items and not _cuda_is_available():
        for item in cuda_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _cuda_is_available() -> bool:
    with warnings.catch_warnings():
        # A CUDA build of torch on a machine without a driver answers False and warns.
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="session")
def _no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep a calibration in the user's cache folder out of every prediction."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def one_intra_op_thread() -> Iterator[None]:
    """Give the caller one intra-op thread, as lanes have: how torch adds up depends on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare text with ``golden/<name>`` beside the test file; ``--update-golden`` writes it instead."""
    folder = request.path.parent / "golden"
    update = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        path: Path = folder / name
        if update:
            folder.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing; write it with --update-golden and read it"
        assert text == path.read_text(encoding="utf-8")

    return check
