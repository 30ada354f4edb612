"""Can catch: an AdamW that is not torch's, an orthogonalisation that is not one."""

import torch

from eagle4.training.optim import MuonAdamW, orthogonalise


def test_adamw_equals_torch():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2))
    group = dict(params=[ours], kind="adamw", lr=1e-2)
    mine = MuonAdamW([group], betas=(0.9, 0.95), weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(20):
        ours.grad = torch.randn(4, 3, generator=generator)
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
    torch.testing.assert_close(ours, theirs)


def test_orthogonalise_brings_singular_values_near_one():
    for shape in ((20, 50), (50, 20), (30, 30)):
        matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        found = orthogonalise(matrix)
        values = torch.linalg.svdvals(found)
        assert 0.5 < float(values.min()) and float(values.max()) < 1.3
        assert float((found * (u @ v)).sum() / (found.norm() * (u @ v).norm())) > 0.97
