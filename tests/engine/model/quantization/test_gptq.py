"""GPTQ beside the published algorithm, written slowly: one column at a time, in doubles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.model.quantization.gptq import DAMPING, gptq, nearest

SCALES = torch.bfloat16


def scale_of(values: list[float], bits: int) -> float:
    """A group's scale: the largest magnitude is the lowest code of 4 bits, or 127 of 8, as bfloat16 has it."""
    extreme = max(values, key=abs)
    scale = extreme / -8 if bits == 4 else abs(extreme) / 127
    return float(torch.tensor(scale, dtype=torch.float32).to(SCALES))


def reference(weight: Tensor, hessian: Tensor, bits: int, group: int, act_order: bool) -> tuple[Tensor, Tensor]:
    """Codes about 0 (out, in) and scales (out, groups): the inverse loses a row and a column with each that is done
    (Frantar & Alistarh 2022, OBC, equation 3; Frantar et al. 2022, section 3.3)."""
    out, width = weight.shape
    work, half = weight.double().clone(), 2 ** (bits - 1)
    damped = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    inverse = torch.linalg.inv(damped)
    order = sorted(range(width), key=lambda j: -float(hessian[j, j])) if act_order else range(width)
    codes, scales = torch.zeros(out, width), torch.zeros(out, width // group)
    known = set[int]()
    if act_order or group == width:
        for row in range(out):
            for g in range(width // group):
                scales[row, g] = scale_of(weight[row, g * group : (g + 1) * group].tolist(), bits)
        known = set(range(width // group))
    left = list(order)
    for column in order:
        number = column // group
        if number not in known:
            known.add(number)
            for row in range(out):
                scales[row, number] = scale_of(work[row, column : column + group].tolist(), bits)
        left.remove(column)
        scale = scales[:, number].double()
        codes[:, column] = (work[:, column] / scale).round().clamp(-half, half - 1)
        error = (work[:, column] - codes[:, column] * scale) / inverse[column, column]
        work[:, left] -= torch.outer(error, inverse[column, left])
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return codes, scales


def drawn(out: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """A weight, and the second moments of inputs that go together, of unlike sizes."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, width, generator=random)
    mixing = torch.randn(width, width, generator=random) / width**0.5
    sizes = torch.rand(width, generator=random) * 3 + 0.1
    inputs = (torch.randn(4 * width, width, generator=random) @ (torch.eye(width) + mixing) * sizes).double()
    return weight, inputs.t() @ inputs


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 192)])
def test_codes_are_those_of_the_published_algorithm(bits: int, group: int, act_order: bool) -> None:
    for seed in range(2):
        weight, hessian = drawn(5, 192, seed)  # more columns than are updated at once
        found = gptq(weight, hessian, bits, group, SCALES, act_order=act_order)
        codes, scales = reference(weight, hessian, bits, group, act_order)
        assert torch.equal(found.codes.int() - found.zero, codes.int())
        assert torch.equal(found.scales, scales)


@pytest.mark.parametrize("act_order", [False, True])
def test_inputs_that_do_not_go_together_leave_nothing_to_make_up_for(act_order: bool) -> None:
    weight, _ = drawn(16, 256, 0)
    moments = torch.rand(256, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    found = gptq(weight, moments.diag(), 4, 32, SCALES, act_order=act_order)
    rounded = nearest(weight, 4, 32, SCALES)
    assert torch.equal(found.codes, rounded.codes) and torch.equal(found.scales, rounded.scales)


@pytest.mark.parametrize("act_order", [False, True])
def test_outputs_are_nearer_than_those_of_the_nearest_codes(act_order: bool) -> None:
    weight, hessian = drawn(64, 256, 3)
    errors = []
    for found in (gptq(weight, hessian, 4, 32, SCALES, act_order=act_order), nearest(weight, 4, 32, SCALES)):
        off = found.dequantize().double() - weight.double()
        errors.append(float((off @ hessian * off).sum()))
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("act_order", [False, True])
def test_inputs_that_are_never_used_do_no_harm(act_order: bool) -> None:
    weight, hessian = drawn(8, 128, 4)
    weight[3] = 0.0
    unused = torch.tensor([0, 5, 64])
    hessian[unused] = 0.0
    hessian[:, unused] = 0.0
    found = gptq(weight, hessian, 4, 32, SCALES, act_order=act_order).dequantize()
    assert found.isfinite().all() and not found[:, unused].any() and not found[3].any()
