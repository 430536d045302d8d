"""Groups of processes for the tests of this folder."""

from tests.distributed.conftest import ranks  # noqa: F401
