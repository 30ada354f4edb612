"""Can catch: a query that sees another slot's drafted keys, a window that does not shrink with
depth, positions off by one, teacher-forced tokens or states shifted the wrong way, supervision
beyond the end, context padding that leaks, attention whose gradient is off in low precision."""

import copy
from types import SimpleNamespace

import pytest
import torch

from eagle4 import Eagle4ForCausalLM
from eagle4.training import flex as flex_module
from eagle4.training.extract import tapped
from eagle4.training.features import FeatureSequence
from eagle4.training.runs import assemble
from eagle4.training.settings import TrainConfig
from eagle4.training.ttt import Runs, attend_private, unroll, unroll_depth
from eagle4.types import Candidates
from tests.training.small import TAPS, tiny_drafter, tiny_store, tiny_target

NUM_ANCHORS, NUM_DEPTHS = 7, 5


def serve_one(drafter, sequence, slot: int, num_depths: int) -> torch.Tensor:
    """Head inputs ``[K, H]`` of a chain drafted after position ``slot``, one row at a time."""
    window = drafter.config.sliding_window
    ids, taps = sequence.ids.long(), sequence.taps.float()
    rows: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def attend_at(position):
        def attend(query, key, value):
            rows.append((position, key[0], value[0]))
            seen = [r for r in rows if window is None or r[0] > position - window]
            keys, values = (torch.stack([r[i] for r in seen]) for i in (1, 2))
            group = query.shape[1] // key.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            score = torch.einsum("ad,lad->al", query[0], keys) * query.shape[-1] ** -0.5
            return torch.einsum("al,lad->ad", score.softmax(-1), values)[None]

        return attend

    heads, state = [], None
    for position in range(1, slot + 2 + num_depths - 1):
        if position <= slot + 1:
            state = drafter.fuse(taps[position - 1 : position])
        out = drafter(
            state, ids[position : position + 1], torch.tensor([position]), attend_at(position)
        )
        state = out.state_RH
        if position > slot:
            heads.append(out.head_RH[0])
    return torch.stack(heads)


@pytest.fixture(scope="module")
def store(tmp_path_factory, target):
    return tiny_store(tmp_path_factory.mktemp("store"), target, num_sequences=4)


FORMS = {
    "eagle4": {},
    "eagle4-nope": {"use_rope": False},
    "eagle3": {"eh_proj": False, "norm_output": False, "fc_norm": False},
    "eagle3-nope": {"eh_proj": False, "norm_output": False, "use_rope": False},
}


SLOW_FLEX = "ignore:flex_attention called without torch.compile"


@pytest.mark.filterwarnings(SLOW_FLEX)
@pytest.mark.parametrize(
    ("form", "window", "flex"),
    [("eagle4", w, flex) for w in (None, 1, 2, 4, 11) for flex in (False, True)]
    + [(form, w, False) for form in FORMS if form != "eagle4" for w in (None, 3)],
)
def test_unrolled_equals_served(target, store, form, window, flex):
    drafter = tiny_drafter(target, sliding_window=window, **FORMS[form])
    batch = [(0, 8), (1, 20), (2, 33)]
    runs = assemble(store, batch, NUM_ANCHORS, NUM_DEPTHS)
    with torch.no_grad():
        found = unroll(drafter, runs, flex=flex)
        checked = 0
        for b, (index, start) in enumerate(batch):
            for m in range(0, NUM_ANCHORS, 2):
                depths = int(runs.valid_BKM[b, :, m].sum())
                if depths:
                    wanted = serve_one(drafter, store[index], start + m, depths)
                    torch.testing.assert_close(found[b, :depths, m], wanted, rtol=1e-4, atol=1e-5)
                    checked += 1
    assert checked >= NUM_ANCHORS


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("form", ["eagle4", "eagle3"])
def test_unrolled_equals_the_engine(target, form, window):
    """The engine's drafter, which reads and writes the paged pool, on rounds that all succeed."""
    drafter = tiny_drafter(target, sliding_window=window, **FORMS[form])
    prompt, new = [5, 9, 11, 30, 2, 7], 3 * (NUM_DEPTHS + 1) + 1
    text = target.generate(torch.tensor([prompt]), max_new_tokens=new + 8, do_sample=False)[0]
    pair = Eagle4ForCausalLM(target, drafter)
    heads: list[torch.Tensor] = []

    def oracle(head_RH, top_k):
        """Proposes what the target will say, so that every chain is the text itself."""
        rounds, depth = divmod(len(heads), NUM_DEPTHS)
        heads.append(head_RH[0])
        position = len(prompt) + rounds * (NUM_DEPTHS + 1) + depth + 1
        return Candidates(text[None, position : position + 1], torch.zeros(1, 1))

    drafter.propose = oracle
    shape = {"mode": "chain", "max_depth": NUM_DEPTHS, "max_nodes": NUM_DEPTHS, "harness": False}
    pair.generate(torch.tensor([prompt]), speculative=shape, max_new_tokens=new, do_sample=False)
    assert pair.last_speculation.accept_length == NUM_DEPTHS + 1 and len(heads) == 3 * NUM_DEPTHS
    with torch.no_grad(), tapped(target, TAPS) as taps:
        last = target.model(text[None, :-1]).last_hidden_state[0]
        features = torch.stack([tap[0] for tap in taps], dim=1)
    sequence = FeatureSequence(text.int(), features, last, torch.ones(len(text)).bool())
    for i in range(3):
        slot = len(prompt) - 1 + i * (NUM_DEPTHS + 1)
        with torch.no_grad():
            found = unroll(drafter, assemble([sequence], [(0, slot)], 1, NUM_DEPTHS))[0, :, 0]
        wanted = torch.stack(heads[i * NUM_DEPTHS : (i + 1) * NUM_DEPTHS])
        logits = target.lm_head(found), target.lm_head(wanted)
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def filled_attention(query, key, value, mask, keys, values):
    """`attend_private` as one writes it down: filled scores, a float32 softmax per anchor."""
    heads = query.shape[2] // key.shape[2]
    rows = []
    for m in range(query.shape[1]):
        own_key, own_value = (
            torch.cat([base, *(part[:, m : m + 1] for part in parts)], dim=1)
            for base, parts in ((key, keys), (value, values))
        )
        own_key, own_value = (x.repeat_interleave(heads, 2) for x in (own_key, own_value))
        scores = torch.einsum("bad,bpad->bap", query[:, m], own_key) * query.shape[-1] ** -0.5
        seen = torch.cat([mask[:, m], mask.new_ones(len(mask), len(keys))], dim=-1)
        weight = scores.float().masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        rows.append(torch.einsum("bap,bpad->bad", weight.to(own_value.dtype), own_value))
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("num_private", [0, 3])
@pytest.mark.parametrize("is_bf16", [False, True])
def test_attention_equals_the_written_down_one(num_private, is_bf16):
    """Value and gradients; in bf16 it may be as far from float64 as that is, not further."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16), *[(2, 5, 2, 16)] * 2 * num_private]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    mask = torch.rand(2, 5, 9, generator=generator) > 0.4
    mask[..., 0] = True
    upstream = torch.randn(2, 5, 4, 16, generator=generator)

    def run(attend, dtype=torch.float32):
        tensors = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        private = tensors[3 : 3 + num_private], tensors[3 + num_private :]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16 and dtype == torch.float32):
            out = attend(*tensors[:3], mask, *private)
        (out * upstream).sum().backward()
        return [out.detach().double(), *(x.grad.double() for x in tensors)]

    exact = run(filled_attention, torch.float64)
    found, plain = run(attend_private), run(filled_attention)
    for i, (wanted, a, b) in enumerate(zip(exact, found, plain, strict=True)):
        if is_bf16:
            assert (a - wanted).norm() <= 1.3 * (b - wanted).norm() + 1e-6, i
        else:
            torch.testing.assert_close(a, wanted, rtol=1e-4, atol=1e-5)


def test_rows_that_ask_nothing_have_the_same_keys(target):
    for form in FORMS.values():
        attention = tiny_drafter(target, **form).layers[0].self_attn
        hidden = torch.randn(2, 5, attention.k_proj.in_features)
        position = torch.arange(10).view(2, 5)
        rotary = tiny_drafter(target, **form).rotary(hidden, position)
        wanted = attention.project(hidden, rotary)[1:]
        assert all(map(torch.equal, attention.keys(hidden, rotary), wanted))


def test_recomputed_activations_give_the_same_gradients(target, store):
    drafter = tiny_drafter(target, sliding_window=3)
    runs = assemble(store, [(0, 8), (1, 20)], NUM_ANCHORS, NUM_DEPTHS)
    slopes = []
    for recompute in (False, True):
        drafter.zero_grad()
        unroll(drafter, runs, recompute).square().sum().backward()
        slopes.append([param.grad.clone() for param in drafter.parameters()])
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b)


def dense_flex(query, key, value, block_mask, enable_gqa, return_aux):
    """What FlexAttention computes, written down; on CPUs its own has no backward pass."""
    heads, anchors, slots = query.shape[1], query.shape[2], key.shape[2]
    sizes = (len(query), heads, anchors, slots)
    index = [
        torch.arange(n).view(*(-1 if i == d else 1 for i in range(4))) for d, n in enumerate(sizes)
    ]
    sees = block_mask.mask_mod(*index).expand(sizes)
    key, value = (x.repeat_interleave(heads // key.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~sees, float("-inf"))
    return scores.softmax(-1) @ value, SimpleNamespace(lse=scores.logsumexp(-1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("window", [None, 2, 5])
@pytest.mark.parametrize("recompute", [False, True])
def test_flex_attention_gives_the_same_gradients(
    target, store, window, recompute, device, monkeypatch
):
    if device == "cpu":
        monkeypatch.setattr(flex_module, "flex_attention", dense_flex)
    drafter = tiny_drafter(target, sliding_window=window).to(device)
    drafter.bind(*(copy.deepcopy(m).to(device) for m in (drafter.embedding, drafter.head)))
    runs = assemble(store, [(0, 8), (1, 20), (3, 5)], NUM_ANCHORS, NUM_DEPTHS)
    runs = Runs(*(tensor.to(device) for tensor in runs))
    slopes = []
    for flex in (False, True):
        drafter.zero_grad()
        unroll(drafter, runs, recompute, flex=flex).square().sum().backward()
        slopes.append([param.grad.clone() for param in drafter.parameters()])
    for a, b in zip(*slopes, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_flex_attention_is_refused_where_it_cannot_train():
    assert not TrainConfig(compile=True).uses_flex(torch.device("cuda"))
    config = TrainConfig(compile=True, attention="flex")
    assert config.uses_flex(torch.device("cuda"))
    with pytest.raises(ValueError, match="on cpu.*'dense'"):
        config.uses_flex(torch.device("cpu"))
    with pytest.raises(ValueError, match="compile=True"):
        TrainConfig(attention="flex")
    with pytest.raises(ValueError, match="attention must be one of"):
        TrainConfig(attention="sparse")


def test_flex_attention_can_be_traced_whole(target, store):
    """Depth by depth and without a break, as compiled training does; sizes are symbolic."""
    drafter, found = tiny_drafter(target, sliding_window=4), []
    traced = [torch.compile(unroll_depth, fullgraph=True, dynamic=True, backend="eager")] * 3
    for batch in ([(0, 8), (1, 20)], [(2, 12), (0, 21), (3, 9)]):
        runs = assemble(store, batch, NUM_ANCHORS, 3)
        with torch.no_grad():
            found = [unroll(drafter, runs, depths=d, flex=True) for d in (None, traced)]
        torch.testing.assert_close(*found)


def test_supervision_stays_inside_the_text(tmp_path):
    store = tiny_store(tmp_path, tiny_target(), num_sequences=1, length=20, prompt=8)
    ids, mask = store[0].ids, store[0].mask
    runs = assemble(store, [(0, 12)], NUM_ANCHORS, NUM_DEPTHS)
    for k in range(NUM_DEPTHS):
        for m in range(NUM_ANCHORS):
            label = 12 + m + 2 + k
            assert bool(runs.valid_BKM[0, k, m]) == (label < len(ids) and bool(mask[label]))
            if runs.valid_BKM[0, k, m]:
                assert runs.token_BKM[0, k, m] == ids[label - 1]


def test_teacher_row_predicts_the_label(tmp_path):
    target = tiny_target()
    store = tiny_store(tmp_path, target, num_sequences=1)
    ids = store[0].ids.long()
    runs = assemble(store, [(0, 10)], NUM_ANCHORS, NUM_DEPTHS)
    best_J = target.lm_head(runs.teacher_BJH[0]).argmax(-1)
    # greedy text: the teacher of depth k and anchor m agrees with token x_{t+2+k}
    for k in range(NUM_DEPTHS):
        assert torch.equal(best_J[k : k + NUM_ANCHORS], ids[12 + k : 12 + k + NUM_ANCHORS])


def test_a_gap_in_the_mask_ends_the_chain(tmp_path):
    store = tiny_store(tmp_path, tiny_target(), num_sequences=1)
    sequence = store[0]
    mask = sequence.mask.clone()
    mask[20] = False

    class Gapped:
        def __getitem__(self, index):
            return sequence._replace(mask=mask)

    valid_KM = assemble(Gapped(), [(0, 14)], NUM_ANCHORS, NUM_DEPTHS).valid_BKM[0]
    for k in range(NUM_DEPTHS):
        for m in range(NUM_ANCHORS):
            labels = set(range(16 + m, 16 + m + k + 1))
            assert bool(valid_KM[k, m]) == (20 not in labels)
