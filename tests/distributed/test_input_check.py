"""The checksums that compare the batches of ranks: different batches have different ones, at a small cost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from oslo_models.distributed import input_check

from support import ROOT

fingerprint = input_check._fingerprint
DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.float32]
DTYPES += [torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn]
LARGE = (3, 2, 300, 301)  # its rows along the first two dimensions are larger than a piece in float64, and not in bool

COST = """
import json, resource, time, torch
from oslo_models.distributed.input_check import _fingerprint

torch.set_num_threads(1)  # threads that wait for each other on a busy machine count, too
images, seen = torch.empty(72, 3, 224, 224).uniform_(), []
_fingerprint(torch.zeros(100))
for given in (images, images.view(torch.uint8), images.to(memory_format=torch.channels_last)):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(3):
        began = time.process_time()
        _fingerprint(given)
        seconds.append(time.process_time() - began)
    seen.append([given.nbytes, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, min(seconds)])
print(json.dumps(seen))
"""


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of random bytes; of zeros and ones for truth values."""
    torch.manual_seed(0)
    if dtype == torch.bool:
        return torch.randint(2, shape).bool()
    width = torch.empty((), dtype=dtype).element_size()
    return torch.randint(256, (*shape, width), dtype=torch.uint8).view(dtype)[..., 0]


def test_checksums_of_images_cost_a_tenth_of_their_bytes_and_little_time() -> None:
    """On a quiet machine, 0.02 s. The bound leaves room for a busy one."""
    done = subprocess.run([sys.executable, "-c", COST], cwd=ROOT, capture_output=True, text=True, check=True)
    for size, more, seconds in json.loads(done.stdout):
        assert more < size / 10 and seconds < 0.3, (size, more, seconds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (0, 3), (70_001,), LARGE])
def test_checksums_do_not_depend_on_strides(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = drawn(shape, dtype)
    offset = torch.cat((x.new_zeros(1), x.reshape(-1)))[1:].view(shape)
    spread = torch.stack((x, x.clone()), -1)[..., 0]
    turned = x.movedim(0, -1).contiguous().movedim(-1, 0) if shape else x
    assert {fingerprint(given) for given in (offset, spread, turned, x.clone())} == {fingerprint(x)}
    assert fingerprint(x.new_zeros(2, 1).expand(2, 9)) == fingerprint(x.new_zeros(2, 9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksums_tell_apart_every_bit(dtype: torch.dtype) -> None:
    x = drawn((3, 5), dtype)
    raw = x.view(torch.uint8)
    seen = {fingerprint(x)}
    bits = [0] if dtype == torch.bool else range(8)
    for index in range(raw.numel()):
        for bit in bits:
            raw.view(-1)[index] ^= 1 << bit
            seen.add(fingerprint(x))
            raw.view(-1)[index] ^= 1 << bit
    assert len(seen) == 1 + raw.numel() * len(bits)
    x = drawn(LARGE, dtype)
    seen = {fingerprint(x)}
    places = [0, 1, x.numel() - 1, *torch.randint(x.numel(), (9,)).tolist()]
    for place in places:
        raw = x.view(-1)[place : place + 1].view(torch.uint8)
        raw[-1] ^= 1
        seen.add(fingerprint(x))
        raw[-1] ^= 1
    assert len(seen) == 1 + len(set(places))


def test_checksums_tell_apart_orders_and_pairs_of_signs() -> None:
    """Their hashes are added up, so differences between words must not cancel out."""
    x = drawn((8, 4), torch.float32)
    seen = {fingerprint(x)}
    for one in range(x.numel()):
        for other in range(one):
            pair = [one, other]
            for given in (x.view(-1)[pair[::-1]], -x.view(-1)[pair]):
                changed = x.clone()
                changed.view(-1)[pair] = given
                seen.add(fingerprint(changed))
    assert len(seen) == 1 + x.numel() * (x.numel() - 1)
    images = drawn(LARGE, torch.float32)
    assert len({fingerprint(given) for given in (images, images.flip(0), images.flip(1), images.flip(3))}) == 4


def test_dtype_and_shape_are_part_of_fingerprints() -> None:
    x = torch.zeros(4, 6)
    same = (x, x.view(torch.int32), x.to(torch.bfloat16), x.view(6, 4), x.view(24), x[:, :5], x[:0], x[:0, :5])
    assert len({fingerprint(given) for given in same}) == len(same)
    bits = drawn((4, 6), torch.int16)
    kinds = (bits, bits.view(torch.float16), bits.view(torch.bfloat16), bits.view(torch.uint8).view(4, 12))
    assert len({fingerprint(given) for given in kinds}) == 4


def test_checksums_leave_tensors_unchanged_and_without_gradients() -> None:
    x = torch.nn.Parameter(torch.ones(5, 7))
    with torch.inference_mode():
        inside = fingerprint(x)
    assert fingerprint(x) == inside and x.grad is None and bool((x == 1).all())
    z = torch.view_as_complex(torch.randn(4, 2)).conj()
    assert fingerprint(z) == fingerprint(z.resolve_conj()) != fingerprint(z.conj())
