"""The one function that rounds sizes up."""

import pytest

from pyggml.sizes import round_up

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("multiple", [1, 2, 5, 64])
def test_the_next_multiple(multiple):
    for n in range(3 * multiple):
        rounded = round_up(n, multiple)
        assert rounded % multiple == 0 and 0 <= rounded - n < multiple
