"""Catches: an answer that depends on its neighbours, on the number of rows or on the row that it
replaced; a row that stays empty while prompts wait; sampling of another law or another seed than
plain decoding's; ends that are missed or kept twice."""

import pytest
import torch
from tiny import tiny_llama
from zoo import build

from eagle4 import Eagle4ForCausalLM
from eagle4.engine.continuous import Job, Sampling, answer_all
from eagle4.target import TargetAdapter

ENDS = [7, 20, 33, 50, 71, 88]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(eos_token_id=ENDS)


GREEDY = Sampling()


def jobs(count, sampling=GREEDY, longest=12):
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        ids = torch.randint(8, 90, (1 + (5 * i) % 7,), generator=generator).tolist()
        yield Job(f"j{i}", ids, 1 + (7 * i) % longest, sampling, seed=100 + i)


def plain(model, job):
    """The same answer from `generate`, alone."""
    pair = Eagle4ForCausalLM(model, None)
    law = job.sampling
    warpers = {"temperature": law.temperature, "top_k": law.top_k, "top_p": law.top_p}
    out = pair.generate(
        torch.tensor([job.ids]),
        max_new_tokens=job.max_new_tokens,
        do_sample=law.temperature > 0,
        **({**warpers, "seed": [job.seed]} if law.temperature else {}),
    )
    return out[0, len(job.ids) :].tolist()


def answers(model, todo, **options):
    options = {"ends": ENDS, "num_rows": 3, "capacity": 32, **options}
    return {job.id: answer for job, answer in answer_all(TargetAdapter(model), todo, **options)}


@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize(
    "sampling",
    [GREEDY, Sampling(0.8), Sampling(1.0, top_k=20, top_p=0.9), Sampling(1.3, top_k=5)],
)
def test_every_answer_is_plain_decoding_alone(model, num_rows, sampling):
    found = answers(model, jobs(11, sampling), num_rows=num_rows)
    assert found == {job.id: plain(model, job) for job in jobs(11, sampling)}
    assert any(answer[-1] in ENDS for answer in found.values())


def test_laws_may_be_mixed_in_one_batch(model):
    laws = [GREEDY, Sampling(0.8), Sampling(1.0, 20, 0.9)]
    mixed = [job._replace(sampling=laws[i % 3]) for i, job in enumerate(jobs(9))]
    assert answers(model, mixed) == {job.id: plain(model, job) for job in mixed}


@pytest.mark.parametrize("family", ["gemma3", "gpt_neox", "deepseek_v3"])
def test_other_families(family):
    model = build(family)
    found = answers(model, jobs(7), ends=[])
    for job in jobs(7):
        ids = torch.tensor([job.ids])
        out = model.generate(ids, max_new_tokens=job.max_new_tokens, do_sample=False)
        assert found[job.id] == out[0, len(job.ids) :].tolist()


def test_rows_are_refilled_at_once(model):
    adapter = TargetAdapter(model)
    sizes = []
    forward = adapter.forward

    def counting(token_R, *args, **kwargs):
        sizes.append(len(token_R))
        return forward(token_R, *args, **kwargs)

    adapter.forward = counting
    todo = [Job(str(i), [9, 9], 5 if i % 4 else 20) for i in range(24)]
    list(answer_all(adapter, todo, num_rows=4, capacity=32))
    # 18 answers of 5 tokens and 6 of 20 are 192 tokens after the first ones: full rows need 48
    assert sum(size <= 4 for size in sizes) <= 48 + 24 + 20


def test_a_job_is_taken_only_when_a_row_is_free(model):
    taken = []

    def watched():
        for job in jobs(8, longest=4):
            taken.append(job.id)
            yield job

    stream = answer_all(TargetAdapter(model), watched(), num_rows=2, capacity=32)
    next(stream)
    assert len(taken) <= 4
    stream.close()
    assert model.config._attn_implementation != "eagle4"


@pytest.mark.parametrize("job", [Job("e", [], 4), Job("l", [9] * 30, 4), Job("n", [9], 0)])
def test_what_cannot_be_answered_is_named(model, job):
    with pytest.raises(ValueError, match=f"prompt {job.id}"):
        answers(model, [job])
