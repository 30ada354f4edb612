"""Catches: a value or a slope of any loss that differs from float64 autograd, cancellation near
convergence, a kernel that differs from the reference (ragged ends, blocks, ties, zero overlap,
low-precision inputs). The kernel runs under the Triton interpreter in a process of its own, and on
a GPU where there is one; it is compiled for GPUs that are not here.
"""

from __future__ import annotations

import interpreted
import pytest
import torch

from eagle4.ops.divergence import KINDS, divergence

KINKED = ("tv", "lk_alpha", "lk_lambda")
DONE = 7 * len(KINDS) - len(KINKED)


def rows(count=6, vocab=50, scale=3.0, seed=0, closeness=0.0, dtype=torch.float32):
    """Student logits, teacher log-probabilities and shares."""
    generator = torch.Generator().manual_seed(seed)
    teacher = scale * torch.randn(count, vocab, generator=generator)
    student = teacher * closeness + scale * (1 - closeness) * torch.randn(
        count, vocab, generator=generator
    )
    share_R = torch.rand(count, generator=generator)
    return student.to(dtype), teacher.log_softmax(-1).to(dtype), share_R


def definition(student, logp, kind, share):
    """The formulas in float64 through autograd."""
    z = student.double().requires_grad_()
    p, logp = logp.double().exp(), logp.double()
    p, logp = p / p.sum(-1, keepdim=True), logp - logp.logsumexp(-1, keepdim=True)
    logq = z.log_softmax(-1)
    q = logq.exp()
    overlap = torch.minimum(p, q).sum(-1)
    kl, m = (p * (logp - logq)).sum(-1), (p + q) / 2
    loss = {
        "forward_kl": kl,
        "reverse_kl": (q * (logq - logp)).sum(-1),
        "jsd": 0.5 * (p * (logp - m.log()) + q * (logq - m.log())).sum(-1),
        "tv": 0.5 * (p - q).abs().sum(-1),
        "hard_ce": -logq.gather(1, logp.argmax(-1, keepdim=True))[:, 0],
        "lk_alpha": -overlap.log(),
        "lk_lambda": share.double() * kl + (1 - share.double()) * 0.5 * (p - q).abs().sum(-1),
    }[kind]
    loss.sum().backward()
    return loss.detach(), z.grad, overlap.detach()


def compare(impl: str, device: str = "cpu") -> int:
    """All kinds on many shapes; returns the number of comparisons."""
    shapes = [dict(), dict(vocab=1), dict(count=1, vocab=257), dict(scale=30.0)]
    shapes += [dict(closeness=0.999), dict(vocab=5000, count=2), dict(dtype=torch.bfloat16)]
    done = 0
    for seed, shape in enumerate(shapes):
        student, logp, share = rows(seed=seed, **shape)
        for kind in KINDS:
            if shape.get("closeness") and kind in KINKED:
                continue  # the sign of p - q is anybody's guess
            shared = share if kind == "lk_lambda" else None
            wanted = definition(student, logp, kind, share)
            moved = [t if t is None else t.to(device) for t in (student, logp, shared)]
            found = divergence(moved[0], moved[1], kind, moved[2], impl=impl)
            # bf16 log-probabilities are not quite normalised, and p is taken as it is
            rtol, atol = 2e-4, 5e-6 * shape.get("scale", 1)
            if "dtype" in shape:
                rtol, atol = 2e-2, 2e-2
            for name, a, b in zip(found._fields, found, wanted, strict=True):
                torch.testing.assert_close(
                    a.cpu().double(), b, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n} {m}"
                )
            done += 1
    return done


def test_the_reference_is_the_definition_in_float64():
    assert compare("torch") == DONE


@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_student_has_no_loss_and_no_slope(kind):
    _, logp, share = rows()
    found = divergence(logp + 5.0, logp, kind, share if kind == "lk_lambda" else None)
    assert found.overlap_R.sub(1).abs().max() < 1e-5
    if kind != "hard_ce":
        assert found.loss_R.abs().max() < 1e-5
    if kind in ("forward_kl", "reverse_kl", "jsd"):  # the others have a kink there
        assert found.grad_RV.abs().max() < 1e-6


def test_bf16_logits_near_convergence_keep_their_slope():
    """The slope is a difference of nearly equal probabilities (trap J4)."""
    student, logp, _ = rows(closeness=0.9999, scale=1.0)
    found = divergence(student, logp)
    wanted = definition(student, logp, "forward_kl", torch.ones(6))
    cosine = torch.cosine_similarity(found.grad_RV.double().flatten(), wanted[1].flatten(), dim=0)
    assert cosine > 0.999


def test_bad_requests_are_named():
    student, logp, share = rows()
    with pytest.raises(ValueError, match="'l2' is not known"):
        divergence(student, logp, "l2")
    with pytest.raises(ValueError, match="share_R"):
        divergence(student, logp, "lk_lambda")
    with pytest.raises(ValueError, match="share_R"):
        divergence(student, logp, "tv", share)


def test_the_kernel_agrees_under_the_interpreter():
    program = "from tests.ops.test_divergence import compare; print(compare('triton'))"
    assert interpreted.output(program) == str(DONE)


@pytest.mark.parametrize("capability", [90, 100])
def test_the_kernel_compiles_for_gpus_that_are_not_here(capability):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from eagle4.ops.triton.divergence import _divergence_kernel as kernel

    pointers = ("student_ptr", "teacher_ptr", "share_ptr", "loss_ptr", "grad_ptr", "overlap_ptr")
    signature = {name: "*fp32" for name in pointers} | {"vocab": "i32"}
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    for kind in range(len(KINDS)):
        source = ASTSource(kernel, signature, {"KIND": kind, "BLOCK": 4096})
        assert compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


@pytest.mark.cuda
def test_the_kernel_agrees_on_the_device():
    assert compare("triton", "cuda") == DONE
