"""What ranks and their caller send each other arrives as it was, without what lies around it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.cluster.messages import decode, decode_beside, encode, encode_beside
from posttrain.core.training.digests import Block


def test_views_of_one_large_tensor_are_sent_without_it() -> None:
    """As the blocks of weights whose digests are recorded after a step."""
    whole = torch.arange(1_000_000.0)
    blocks = {str(i): Block(part, (len(part),)) for i, part in enumerate(whole.split(1000))}
    message = encode(blocks)
    assert len(message) < 1.1 * 4 * len(whole)
    found = decode(bytes(message))
    assert found.keys() == blocks.keys()
    assert all(torch.equal(found[name].values, block.values) for name, block in blocks.items())


def test_what_travels_in_another_way_is_left_out_and_put_back() -> None:
    class Reference:
        """Cannot be pickled, as a reference of Ray's must not be."""

        def __reduce__(self) -> str:
            raise AssertionError("it was pickled")

    one, other = Reference(), Reference()
    data, kept = encode_beside(
        (None, {"files": (one, other, one), "bytes": torch.ones(3)}), Reference
    )
    assert kept == [one, other, one]
    failure, found = decode_beside(bytes(data), kept)
    assert failure is None and found["files"] == (one, other, one)
    assert torch.equal(found["bytes"], torch.ones(3))
    data, kept = encode_beside((None, 5), Reference)
    assert decode_beside(bytes(data), kept) == (None, 5)


TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8)


@given(
    st.sampled_from(TYPES),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_tensor_arrives_bit_for_bit_and_can_be_changed(
    dtype: torch.dtype, shape: list[int], start: int, transposed: bool
) -> None:
    made = (torch.randn([4, *shape], generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    sent: Tensor = made[start:].transpose(0, -1) if transposed else made[start]
    found = decode(bytes(encode({"sent": (sent, 3)})))["sent"]
    assert found[1] == 3
    assert found[0].dtype == dtype and found[0].shape == sent.shape
    assert torch.equal(found[0], sent)
    found[0].zero_()
