"""Vocabularies of real models, padded ones and odd ones: no phantom column, no read past a row."""

import math

import pytest
import torch

from cotutor.kernels import (
    token_logprobs,
    token_logprobs_reference,
    topk_jsd,
    topk_jsd_reference,
)

VOCABS = [151_936, 151_937, 152_063, 129_920]


@pytest.mark.parametrize("beyond", [math.inf, 0.0])
@pytest.mark.parametrize("vocab", VOCABS)
def test_what_lies_beyond_the_row_is_not_read(device, backend, vocab, beyond):
    """The row is a slice of a wider tensor, whose other columns would show in every result."""
    generator = torch.Generator().manual_seed(vocab)
    wide = torch.full((2, 1, vocab + 200), beyond)
    wide[..., :vocab] = torch.randn(2, 1, vocab, generator=generator) - 8.0
    student, teacher = (z[:, :vocab].to(device) for z in wide)
    student.requires_grad_()
    double = student.detach().double().requires_grad_()
    targets = torch.tensor([vocab - 1], device=device)

    out = token_logprobs(student, targets, entropy=True, backend=backend)
    true = token_logprobs_reference(double, targets, entropy=True)
    loss = topk_jsd(student, teacher, k=20, backend=backend)
    true_loss = topk_jsd_reference(double, teacher, k=20)
    for mine, wanted in ((out.logprobs, true.logprobs), (out.entropy, true.entropy)):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss.double(), true_loss, rtol=1e-5, atol=1e-7)
    (grad,) = torch.autograd.grad(out.entropy.sum() + loss.sum(), student)
    (true_grad,) = torch.autograd.grad(true.entropy.sum() + true_loss.sum(), double)
    scale = true_grad.abs().max().item()
    torch.testing.assert_close(grad.double(), true_grad, rtol=1e-4, atol=1e-5 * scale)
